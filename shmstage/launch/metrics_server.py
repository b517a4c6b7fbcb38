"""Serves a run's metrics over HTTP while it goes on, from the launcher: trainer and orchestrator have no part in it.

A scraper can be slow, silent, or send what is no HTTP: it holds one of a few connections, each for a few seconds, on a
thread that nobody waits for.
"""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Protocol, final

from shmstage.errors import MissingExtraError, SettingsError, named
from shmstage.launch.step_follower import StepFollower
from shmstage.memory.inspect import read_pools
from shmstage.settings import Settings

if TYPE_CHECKING:
    from socketserver import BaseRequestHandler

    from shmstage.launch.metrics import RunCollector

#: open at once; Prometheus scrapes one target over one connection
MAX_CONNECTIONS = 16
#: a connection is closed after so many seconds, whatever it is doing
CONNECTION_S = 10.0
#: between looks at whether a connection is overdue, and at whether to end, in seconds
POLL_S = 0.1


class Metrics(Protocol):
    """Whoever shows how the run goes to machines. Nothing here raises once the run has started."""

    address: dict[str, Any] | None
    """``host`` and ``port``; ``None``: switched off."""

    def begin(self) -> None:
        """OUT is ours now: what lies in it was trained before."""

    def poll(self) -> None:
        """Called about twenty times a second while the run goes on."""

    def children(self, pids: Mapping[str, int | None], epoch: int, restarts: Mapping[str, int]) -> None:
        """Pids, epoch or restarts are others now."""


@final
class NoMetrics:
    """Stands where metrics are switched off."""

    address: dict[str, Any] | None = None

    def begin(self) -> None:
        return

    def poll(self) -> None:
        return

    def children(self, pids: Mapping[str, int | None], epoch: int, restarts: Mapping[str, int]) -> None:
        return


@contextmanager
def serving(settings: Settings, say: Callable[[str], None]) -> Iterator[Metrics]:
    """Metrics of the run that ``settings`` (complete) describe, on ``metrics_port`` for the length of the block.

    Raises ``MissingExtraError`` without prometheus-client and ``SettingsError`` for an address that cannot be had.
    """
    if settings.metrics_port == "off":
        yield NoMetrics()
        return
    try:
        from prometheus_client import CollectorRegistry, MetricsHandler

        from shmstage.launch.metrics import RunCollector
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise MissingExtraError("metrics_port needs prometheus-client; pip install 'shmstage[metrics]'") from None
    collector = RunCollector(
        settings.run, settings.boundary, settings.out_dir, pools=lambda: read_pools(settings.run), failed=say
    )
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    server = _open(settings.metrics_host, settings.metrics_port, MetricsHandler.factory(registry), say)
    try:
        host, port = str(server.server_address[0]), int(server.server_address[1])
        say(f"metrics on http://{f'[{host}]' if ':' in host else host}:{port}/metrics")
        yield _Following(settings, collector, {"host": host, "port": port}, say)
    finally:
        server.close()


@final
class _Following:
    """Tells the collector what the launcher sees."""

    def __init__(
        self, settings: Settings, collector: RunCollector, address: dict[str, Any], say: Callable[[str], None]
    ) -> None:
        self.address: dict[str, Any] | None = address
        self.children = collector.children
        self._collector = collector
        self._say = say
        self._follower = StepFollower(settings.out_dir / "steps.jsonl")
        self._has_failed = False

    def begin(self) -> None:
        with suppress(ValueError, OSError):  # whoever has to rely on the file says what is wrong with it
            self._follower.new()

    def poll(self) -> None:
        try:
            self._collector.steps(self._follower.new())
        except Exception as error:  # an odd line, a disk gone: what was counted stays
            if not self._has_failed:
                self._has_failed = True
                self._say(f"metrics do not show some steps: {error}")


def _open(host: str, port: int, handler: type[BaseRequestHandler], say: Callable[[str], None]) -> _Server:
    remedy = "choose another metrics_port, or 0 for any free one"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _Server(family, address, handler, say)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no name"
        raise SettingsError(f"metrics_host = {named(host)}: {reason}; give an address of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise SettingsError(
                f"metrics_host = {named(host)} is no address of this machine; give one that is, as 127.0.0.1"
            ) from None
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(f"metrics_port = {port} is in use on {host}; {remedy}") from None
        raise SettingsError(f"metrics_port = {port} on {host}: {error.strerror}; {remedy}") from None


@final
class _Server(ThreadingMixIn, TCPServer):
    """HTTP with a bound on everything a client can make it hold."""

    # HTTPServer would look up its own name, which takes seconds where no name server answers
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, family: int, address: Any, handler: type[BaseRequestHandler], say: Callable[[str], None]
    ) -> None:
        self.address_family = family
        self._say = say
        self._has_failed = False
        self._lock = threading.Lock()
        self._open: dict[int, tuple[socket.socket, float]] = {}
        super().__init__(address, handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(POLL_S,), name="shmstage-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends what is being served; returns within a moment, whatever clients do."""
        self.shutdown()
        self._thread.join(5.0)
        self.server_close()
        self._cut(older_than_s=0.0)

    # --- what socketserver calls ----------------------------------------------------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[id(request)] = (request, time.monotonic())
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self._cut(older_than_s=CONNECTION_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, OSError) or self._has_failed:  # it went away, or was cut off
            return
        self._has_failed = True
        self._say(f"a request for metrics was not answered: {type(error).__name__}: {error}")

    def _cut(self, *, older_than_s: float) -> None:
        now = time.monotonic()
        with self._lock:  # held: a socket closed meanwhile could have another's number
            for key, (request, since) in list(self._open.items()):
                if now - since >= older_than_s:
                    del self._open[key]
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)  # its thread wakes and ends

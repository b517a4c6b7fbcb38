"""A network to be cut: a tcp port that passes connections on to another one, as long as it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import final


@final
class Forwarder:
    """``port`` leads to ``target``. Ends with ``close``; a context manager."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._changed = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._cut: set[socket.socket] = set()
        self._refuse = 0
        self._threads[0].start()

    def __enter__(self) -> Forwarder:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def refuse_next(self, count: int) -> None:
        """Closes as many connections as soon as they come."""
        self._refuse = count

    def cut(self) -> None:
        """What stands is deaf and dumb from now on, and never closed; new connections are passed on."""
        with self._changed:
            self._cut.update(end for pair in self._pairs for end in pair)

    def lose(self) -> None:
        """Closes what stands towards whoever connected; the target is not told."""
        self.cut()
        for near, _ in self._pairs:
            _shut(near)

    def reset(self) -> None:
        """Closes what stands."""
        with self._changed:
            pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            _shut(end)

    def close(self) -> None:
        _shut(self._listening)
        self.reset()
        for thread in self._threads:
            thread.join(20.0)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self._refuse:
                    self._refuse -= 1
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._changed:
                    self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if source not in self._cut:
                    sink.sendall(content)
        if source not in self._cut:
            _shut(sink)


def hear_out(port: int, said: bytes, wait_s: float = 20.0) -> None:
    """Says something to a port of this host and returns once the other end has closed the connection."""
    with socket.create_connection(("127.0.0.1", port), wait_s) as stranger:
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass
        except TimeoutError:
            raise
        except OSError:
            pass  # closed it meanwhile


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)

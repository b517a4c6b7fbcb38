"""The one thread that receives on a server's channel.

It computes nothing, so pings and retries are answered while the rest of the process sits in a device call. Sending
needs no hand-over to it: any thread may send.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from shmstage.errors import TransportError, WaitTimeoutError
from shmstage.transport.channel import Guard, ServerChannel

log = logging.getLogger(__name__)

_IDLE_S = 1.0
_CLOSE_S = 5.0


@final
class Receiver:
    """Runs ``step`` on a thread until closed. Tests leave the thread out and call ``step`` by hand."""

    def __init__(
        self,
        channel: ServerChannel,
        on_frame: Callable[[bytes, bytes], None],
        *,
        name: str,
        on_failure: Callable[[], None] = lambda: None,
        idle_s: float = _IDLE_S,
    ) -> None:
        """``on_frame(peer, frame)`` runs on the thread; it must not wait.

        ``on_failure()`` runs once should the thread end by an error, so that nobody waits for it in vain.
        """
        self._channel = channel
        self._on_frame = on_frame
        self._on_failure = on_failure
        self._name = name
        self._guard = Guard(name)
        self._idle_s = idle_s
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is not None:
            raise TransportError(f"{self._name} has been started already")
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises ``TransportError`` if the thread has ended by itself, ``ForkedError`` in a forked child.

        To be asked before any lock that the thread takes: a child forked meanwhile would wait for that lock for ever.
        """
        self._guard.check()
        if self._failure is not None:
            raise TransportError(f"{self._name} has stopped: {self._failure}") from self._failure

    def step(self, timeout_s: float) -> int:
        """At most one frame; returns how many."""
        received = self._channel.recv(timeout_s)
        if received is None:
            return 0
        self._on_frame(*received)
        return 1

    def close(self) -> None:
        """Ends the thread and closes the channel. Raises ``WaitTimeoutError`` after 5 s; harmless twice."""
        self._stopping = True
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._channel.wake()
            thread.join(_CLOSE_S)
            if thread.is_alive():
                raise WaitTimeoutError(f"{self._name} did not end within {_CLOSE_S} s of its close")
        self._channel.close()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.step(self._idle_s)
        except BaseException as error:
            # Nobody joins this thread for its result: the next check reports it, the log has the trace.
            self._failure = error
            log.exception("%s stopped", self._name)
            self._on_failure()

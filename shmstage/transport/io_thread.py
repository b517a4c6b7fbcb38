"""The one thread that touches a server's channel. Others post work to it and wake it.

It computes nothing, so it answers while the rest of the process sits in a device call.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import final

from shmstage.errors import TransportError, WaitTimeoutError
from shmstage.transport.channel import ServerChannel

log = logging.getLogger(__name__)

_IDLE_S = 1.0
_CLOSE_S = 5.0


@final
class IoThread:
    """Runs ``step`` until closed. Tests leave the thread out and call ``step`` by hand."""

    def __init__(self, channel: ServerChannel, on_frame: Callable[[bytes, bytes], None], *, name: str) -> None:
        """``on_frame(peer, frame)`` runs on the thread; it must neither wait nor raise."""
        self._channel = channel
        self._on_frame = on_frame
        self._outbox: deque[Callable[[], None]] = deque()
        self._name = name
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is not None:
            raise TransportError(f"{self._name} has been started already")
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """From any thread: ``work`` runs on the io thread, in the order of the posts."""
        self.check()
        self._outbox.append(work)
        if threading.current_thread() is not self._thread:
            self._channel.wake()

    def check(self) -> None:
        """Raises ``TransportError`` with the reason if the thread has ended by itself."""
        if self._failure is not None:
            raise TransportError(f"{self._name} has stopped: {self._failure}") from self._failure

    def step(self, timeout_s: float) -> int:
        """One turn: what was posted, then at most one frame. Returns how much it did."""
        done = self._run_posted()
        received = self._channel.recv(0.0 if done else timeout_s)
        if received is not None:
            self._on_frame(*received)
            done += 1
        return done

    def close(self) -> None:
        """Sends what was posted, ends the thread and closes the channel. Raises ``WaitTimeoutError`` after 5 s."""
        thread, self._stopping = self._thread, True
        if thread is not None and thread.is_alive():
            self._channel.wake()
            thread.join(_CLOSE_S)
            if thread.is_alive():
                raise WaitTimeoutError(f"{self._name} did not end within {_CLOSE_S} s of its close")
        elif self._failure is None:
            self._run_posted()
        self._channel.close()

    def _run_posted(self) -> int:
        done = 0
        while self._outbox:
            self._outbox.popleft()()
            done += 1
        return done

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.step(_IDLE_S)
            self._run_posted()
        except BaseException as error:
            # Nobody joins this thread for its result: the next post reports it, the log has the trace.
            self._failure = error
            log.exception("%s stopped", self._name)

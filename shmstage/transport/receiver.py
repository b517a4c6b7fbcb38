"""Who receives on a server's channel: one thread at a time.

There is a thread for it that computes nothing, so pings and retries are answered while the rest of the process sits in
a device call. Sending needs no hand-over to it: any thread may send. Neither needs receiving, where the thread that
acts on a message has nothing else to do: it borrows the turn and receives for itself, which saves two switches of
threads per message. If it does not come back for the next one, the thread takes over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import final

from shmstage.errors import TransportError, WaitTimeoutError
from shmstage.transport.channel import Guard, ServerChannel

log = logging.getLogger(__name__)

_IDLE_S = 1.0
_CLOSE_S = 5.0
#: how long a borrower may be away before the thread receives in its place
_TAKE_OVER_S = 0.02
#: how seldom the thread looks for that where nothing was borrowed since it last looked
_LOOK_S = 0.1


@final
class Receiver:
    """Runs ``step`` on a thread until closed. Tests leave the thread out and call ``step`` by hand.

    One other thread may ``borrow`` the turn.
    """

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
        self._turn = threading.Lock()  # to receive
        self._wanted = False
        self._loans = 0
        self._due_at = 0.0  # for the thread to take over
        self._closing = threading.Event()

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

    def borrow(self) -> bool:
        """From now on to ``give_back`` ``step_borrowed`` is the caller's to call. False if there is no thread.

        Raises as ``check``.
        """
        self.check()
        if self._thread is None:
            return False
        if not self._turn.acquire(blocking=False):
            self._wanted = True
            self._channel.wake()
            got = self._turn.acquire(timeout=_CLOSE_S)
            self._wanted = False
            if not got:
                raise WaitTimeoutError(f"{self._name} has not let go of its channel within {_CLOSE_S} s")
        return True

    def step_borrowed(self, timeout_s: float) -> int:
        """``step`` for the borrower. An error ends the receiving, as it does on the thread.

        Raises ``TransportError`` once another thread closes: it waits for the turn.
        """
        if self._stopping:
            raise TransportError(f"{self._name} is closed")
        try:
            return self.step(timeout_s)
        except Exception as error:
            self._fail(error)
            self.check()
            raise

    def give_back(self, *, busy: bool) -> None:
        """Soon the thread receives, unless the turn is borrowed again; ``busy``: there is something to do first."""
        self._loans += busy
        self._due_at = time.monotonic() + _TAKE_OVER_S
        self._turn.release()

    def step(self, timeout_s: float) -> int:
        """At most one frame; returns how many."""
        received = self._channel.recv(timeout_s)
        if received is None:
            return 0
        self._on_frame(*received)
        return 1

    def close(self) -> None:
        """Ends the thread and closes the channel, which nobody receives on by then, even if ``start`` was interrupted.

        Raises ``WaitTimeoutError`` after 5 s; harmless twice and in a forked child.
        """
        self._stopping = True
        if self._guard.forked:
            return  # whoever held a lock at the fork holds it here for ever
        self._closing.set()
        # A thread that has not come to life yet asks whether to stop before it asks for the turn.
        if self._turn.locked():
            with contextlib.suppress(TransportError):  # closed by another thread just now
                self._channel.wake()
        if not self._turn.acquire(timeout=_CLOSE_S):
            raise WaitTimeoutError(f"{self._name} did not end within {_CLOSE_S} s of its close")
        try:
            self._channel.close()
        finally:
            self._turn.release()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            seen = self._loans
            while not self._stopping and self._failure is None:
                if self._wanted or time.monotonic() < self._due_at or not self._turn.acquire(blocking=False):
                    self._closing.wait(_LOOK_S if seen == self._loans else _TAKE_OVER_S)
                    seen = self._loans
                    continue
                try:
                    while not self._stopping and not self._wanted:
                        self.step(self._idle_s)
                finally:
                    self._turn.release()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        # Nobody joins the thread for its result: the next check reports it, the log has the trace.
        self._failure = error
        log.exception("%s stopped", self._name)
        self._on_failure()

"""One ZeroMQ socket for a channel: who may touch it when, how it waits, what is watched beside it, how it ends."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, cast, final

import zmq

from shmstage.errors import TransportError
from shmstage.transport.channel import Guard
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

HIGH_WATER_MARK = 1000
"""Frames queued per peer before ``send`` refuses; a healthy session has fewer than ten."""

LINGER_MS = 500
"""How long ``close`` of the bound end waits for queued frames to leave, so that it always ends."""

# as plain integers: operators of pyzmq's enums cost more than the calls they are for
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)

Raw = zmq.Socket[bytes]
Context = zmq.Context[zmq.Socket[bytes]]


class Attendant(Protocol):
    """Who looks after a second socket in the same context: whom to let in, or why nobody lets us in.

    Called under the socket's lock. Must take everything that has come, or the descriptor's signal is lost.
    """

    raw: Raw

    def attend(self) -> None:
        """Does what there is to do; waits for nothing, raises nothing."""

    def check(self) -> None:
        """Raises what makes the main socket useless; asked where it can neither take nor give a message."""


class Waker:
    """A descriptor that any thread can make readable."""

    __slots__ = ("_lock", "fd")

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:  # else a late wake could write into whatever took the number over
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Harmless twice."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1


@final
class ZmqSocket:
    """One ZeroMQ socket in a context of its own. One thread receives, any thread sends.

    The socket itself is touched under the lock only. The receiver waits outside it, on the socket's descriptor,
    whose edge any call on the socket may consume: so whoever sends while it waits looks whether something can be
    received now, and wakes it. The usual alternative, a queue to the receiving thread, costs a hand-over per reply.
    """

    def __init__(self, kind: int, guard: Guard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._waker = Waker()
        self._woken = False
        self._waiting = False
        self.context: Context = zmq.Context()
        self.raw = self.context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, LINGER_MS)
        self.raw.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_NBYTES)
        #: ``raw.EVENTS`` would build an enum from each answer, which takes longer than to ask
        self._events = cast("Callable[[int], int]", self.raw.get)
        self._attendant: Attendant | None = None
        self._poll = select.poll()
        self._poll.register(self.raw.FD, select.POLLIN)
        self._poll.register(self._waker.fd, select.POLLIN)
        #: what besides the socket is closed with it
        self._beside: list[Raw | select.epoll] = []
        self._descriptor = -1
        # A socket that nobody closes is closed when it is collected: pyzmq's own clean-up of a context in a
        # reference cycle, such as a traceback makes, waits for ever. Not at exit: there pyzmq skips it by itself.
        self._finalizer = weakref.finalize(
            self, _shut, self.raw, self._beside, self.context, self._waker, os.getpid()
        )
        self._finalizer.atexit = False

    def attended_by(self, attendant: Attendant) -> None:
        """From now on ``attendant`` is asked on every call, and its socket watched in every wait. Takes it over."""
        self._attendant = attendant
        self._beside.append(attendant.raw)
        self._poll.register(attendant.raw.FD, select.POLLIN)

    def descriptor(self) -> int:
        """Becomes readable when there may be something to receive or to raise; not by ``wake``."""
        self._guard.check()
        with self._lock:
            self._guard.check_open()
            if self._attendant is None:
                return int(self.raw.FD)
            if self._descriptor < 0:
                both = select.epoll(flags=select.EPOLL_CLOEXEC)
                both.register(self.raw.FD, select.EPOLLIN)
                both.register(self._attendant.raw.FD, select.EPOLLIN)
                self._beside.append(both)
                self._descriptor = both.fileno()
            return self._descriptor

    def send(self, parts: Sequence[bytes]) -> None:
        """Raises ``zmq.ZMQError``, ``zmq.Again`` among them."""
        self._guard.check()  # before the lock: another thread may have held it at the fork, and holds it for ever
        with self._lock:
            self._guard.check_open()
            if self._attendant is not None:
                self._attendant.attend()
                self._attendant.check()
            try:
                for part in parts[:-1]:
                    self.raw.send(part, _SEND_MORE)
                self.raw.send(parts[-1], _NOBLOCK)
            finally:
                # who waits has looked after it said so, under this lock
                if self._waiting and self._events(_EVENTS) & _POLLIN:
                    self._waker.set()

    def recv(self, timeout_s: float) -> list[bytes] | None:
        """The parts of the next message; None after the timeout or a wake."""
        self._guard.check()
        self._waiting = timeout_s > 0
        try:
            parts = self._try_recv()
            if parts is not None or timeout_s <= 0:
                return parts
            deadline = time.monotonic() + timeout_s
            while not self._woken:
                ready = self._poll.poll(_milliseconds(timeout_s))
                for fd, _ in ready:
                    if fd == self._waker.fd:
                        self._waker.clear()
                parts = self._try_recv(likely=bool(ready))
                # The descriptors also become readable for what is no message: a peer that connected, a sender's nudge.
                timeout_s = deadline - time.monotonic()
                if parts is not None or timeout_s <= 0:
                    return parts
            self._woken = False
            return None
        finally:
            self._waiting = False

    def _try_recv(self, *, likely: bool = False) -> list[bytes] | None:
        with self._lock:
            self._guard.check_open()
            attendant = self._attendant
            if attendant is not None:
                attendant.attend()
            try:
                # asked first where nothing may well be there: an exception costs more than the question
                if likely or self._events(_EVENTS) & _POLLIN:
                    parts = [self.raw.recv(_NOBLOCK)]
                    while self._events(_RCVMORE):
                        parts.append(self.raw.recv(_NOBLOCK))
                    return parts
            except zmq.Again:
                pass
            except zmq.ZMQError as error:
                raise TransportError(f"cannot receive: {error.strerror}") from error
            if attendant is not None:
                attendant.check()  # last: what had come before is still received
            return None

    def wake(self) -> None:
        self._guard.check()
        self._woken = True
        self._waker.set()

    def close(self) -> None:
        with self._lock:
            self._finalizer()


def _milliseconds(timeout_s: float) -> int:
    # Rounded up: rounded down, a wait of half a millisecond would spin.
    return max(0, math.ceil(min(timeout_s, 3600.0) * 1000))


def _shut(socket: Raw, beside: list[Raw | select.epoll], context: Context, waker: Waker, pid: int) -> None:
    if os.getpid() == pid:
        socket.close()
        for other in beside:
            other.close()
        context.term()
        waker.close()

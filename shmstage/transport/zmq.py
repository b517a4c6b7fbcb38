"""Channels over ZeroMQ ``ipc://``: ROUTER on the bound end, DEALER on the connecting one.

Never PUB/SUB (drops silently), never REQ (stuck after a lost reply), never ``recv_pyobj`` (pickle).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import cast, final

import zmq

from shmstage.errors import PeerLostError, TransportError
from shmstage.transport.channel import Channel, Guard, ServerChannel
from shmstage.transport.endpoint_lock import EndpointLock
from shmstage.transport.endpoints import socket_path
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

HIGH_WATER_MARK = 1000
"""Frames queued per peer before ``send`` refuses; a healthy session has fewer than ten."""

LINGER_MS = 500
"""How long ``close`` of the bound end waits for queued frames to leave, so that it always ends."""

CONNECT_LINGER_MS = 100
"""The same for the connecting end, whose last frames matter less: their server may be gone for good."""

# as plain integers: operators of pyzmq's enums cost more than the calls they are for
_NOBLOCK = int(zmq.NOBLOCK)
_SEND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)

_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 200


def _milliseconds(timeout_s: float) -> int:
    # Rounded up: rounded down, a wait of half a millisecond would spin.
    return max(0, math.ceil(min(timeout_s, 3600.0) * 1000))


class _Waker:
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
        with self._lock:
            os.close(self.fd)
            self.fd = -1


@final
class _Socket:
    """One ZeroMQ socket in a context of its own. One thread receives, any thread sends.

    The socket itself is touched under the lock only. The receiver waits outside it, on the socket's descriptor,
    whose edge any call on the socket may consume: so whoever sends while it waits looks whether something can be
    received now, and wakes it. The usual alternative, a queue to the receiving thread, costs a hand-over per reply.
    """

    def __init__(self, kind: int, guard: Guard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._waker = _Waker()
        self._woken = False
        self._waiting = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.raw = self._context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, LINGER_MS)
        self.raw.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_NBYTES)
        #: ``raw.EVENTS`` would build an enum from each answer, which takes longer than to ask
        self._events = cast("Callable[[int], int]", self.raw.get)
        self._poll = select.poll()
        self._poll.register(self.raw.FD, select.POLLIN)
        self._poll.register(self._waker.fd, select.POLLIN)
        # A socket that nobody closes is closed when it is collected: pyzmq's own clean-up of a context in a
        # reference cycle, such as a traceback makes, waits for ever. Not at exit: there pyzmq skips it by itself.
        self._finalizer = weakref.finalize(self, _shut, self.raw, self._context, self._waker, os.getpid())
        self._finalizer.atexit = False

    def send(self, parts: Sequence[bytes]) -> None:
        """Raises ``zmq.ZMQError``, ``zmq.Again`` among them."""
        self._guard.check()  # before the lock: another thread may have held it at the fork, and holds it for ever
        with self._lock:
            self._guard.check_open()
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
            try:
                # asked first where nothing may well be there: an exception costs more than the question
                if not likely and not self._events(_EVENTS) & _POLLIN:
                    return None
                parts = [self.raw.recv(_NOBLOCK)]
                while self._events(_RCVMORE):
                    parts.append(self.raw.recv(_NOBLOCK))
                return parts
            except zmq.Again:
                return None
            except zmq.ZMQError as error:
                raise TransportError(f"cannot receive: {error.strerror}") from error

    def descriptor(self) -> int:
        self._guard.check()
        return int(self.raw.FD)

    def wake(self) -> None:
        self._guard.check()
        self._woken = True
        self._waker.set()

    def close(self) -> None:
        with self._lock:
            self._finalizer()


def _shut(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], waker: _Waker, pid: int) -> None:
    if os.getpid() == pid:
        socket.close()
        context.term()
        waker.close()


@final
class ZmqChannel(Channel):
    """A DEALER socket. Reconnects by itself; what is sent meanwhile waits for the server, up to the mark.

    A frame that so reaches a restarted server names another incarnation and is refused there. (``IMMEDIATE`` would
    hold it back, but libzmq then also throws away what has arrived when the server closes.)
    """

    def __init__(self, endpoint: str) -> None:
        """Starts connecting to ``endpoint``; nobody need listen yet. Use ``ZmqChannel.connect``."""
        path = socket_path(endpoint)
        self._guard = Guard(f"channel to {endpoint}")
        self._socket = _Socket(zmq.DEALER, self._guard)
        socket = self._socket.raw
        # A name of its own, so that the server knows this channel again after a reconnect.
        socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(8))
        socket.setsockopt(zmq.LINGER, CONNECT_LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        try:
            socket.connect(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot connect to {endpoint}: {error.strerror}") from error

    @classmethod
    def connect(cls, endpoint: str) -> ZmqChannel:
        """A channel to an ``ipc://`` endpoint. Raises ``TransportError`` for a path too long or another scheme."""
        return cls(endpoint)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send((frame,))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send {len(frame)} bytes: {error.strerror}") from error
        return True

    def recv(self, timeout_s: float) -> bytes | None:
        parts = self._socket.recv(timeout_s)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b""  # nobody of ours sends parts; the codec refuses b""

    def descriptor(self) -> int:
        return self._socket.descriptor()

    def wake(self) -> None:
        self._socket.wake()

    def close(self) -> None:
        if self._guard.close():
            self._socket.close()


@final
class ZmqServerChannel(ServerChannel):
    """A ROUTER socket that owns its path: a second bind is refused, a stale socket file is cleared."""

    def __init__(self, endpoint: str) -> None:
        """Binds ``endpoint``. Use ``ZmqServerChannel.bind``."""
        path = socket_path(endpoint)
        self._guard = Guard(f"server at {endpoint}")
        self._lock = EndpointLock(path)
        self._socket = _Socket(zmq.ROUTER, self._guard)
        socket = self._socket.raw
        # Otherwise a frame to a peer that is not there vanishes without a word.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A channel that reconnects before its old connection is noticed dead keeps its name.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"cannot listen at {endpoint}: {error.strerror}") from error

    @classmethod
    def bind(cls, endpoint: str) -> ZmqServerChannel:
        """A server at an ``ipc://`` endpoint.

        Raises ``EndpointBusyError`` if a living process owns it, ``TransportError`` if it cannot be bound.
        """
        return cls(endpoint)

    def recv(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        parts = self._socket.recv(timeout_s)
        if parts is None:
            return None
        return parts[0], parts[1] if len(parts) == 2 else b""

    def send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send((peer, frame))
        except zmq.Again as error:
            raise TransportError(f"peer {peer.hex()} does not take its frames: {HIGH_WATER_MARK} are queued") from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLostError(f"peer {peer.hex()} is not connected") from error
            raise TransportError(f"cannot send {len(frame)} bytes: {error.strerror}") from error

    def wake(self) -> None:
        self._socket.wake()

    def close(self) -> None:
        if self._guard.close():
            self._socket.close()
            self._lock.release()

"""Channels over ZeroMQ ``ipc://``: ROUTER on the bound end, DEALER on the connecting one.

Never PUB/SUB (drops silently), never REQ (stuck after a lost reply), never ``recv_pyobj`` (pickle).
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import final

import zmq

from shmstage.errors import PeerLostError, TransportError
from shmstage.transport.channel import Channel, Guard, ServerChannel
from shmstage.transport.endpoint_lock import EndpointLock
from shmstage.transport.endpoints import socket_path
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

HIGH_WATER_MARK = 1000
"""Frames queued per peer before ``send`` refuses; a healthy session has fewer than ten."""

LINGER_MS = 500
"""How long ``close`` waits for queued frames to leave, so that it always ends."""

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
    """One ZeroMQ socket in a context of its own, with a descriptor that wakes its wait."""

    def __init__(self, kind: int, guard: Guard) -> None:
        self._guard = guard
        self._waker = _Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.raw = self._context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, LINGER_MS)
        self.raw.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.raw.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT_NBYTES)
        self._poller = zmq.Poller()
        self._poller.register(self.raw, zmq.POLLIN)
        self._poller.register(self._waker.fd, zmq.POLLIN)

    def recv(self, timeout_s: float) -> list[bytes] | None:
        self._guard.check()
        try:
            return self.raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise TransportError(f"cannot receive: {error.strerror}") from error
        if timeout_s <= 0:
            return None
        try:
            ready = dict(self._poller.poll(_milliseconds(timeout_s)))
            if self._waker.fd in ready:
                self._waker.clear()
            return self.raw.recv_multipart(zmq.NOBLOCK) if self.raw in ready else None
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise TransportError(f"cannot receive: {error.strerror}") from error

    def wake(self) -> None:
        self._guard.check()
        self._waker.set()

    def close(self) -> None:
        self.raw.close()
        self._context.term()
        self._waker.close()


@final
class ZmqChannel(Channel):
    """A DEALER socket. Reconnects by itself; what is sent meanwhile is refused, not hoarded."""

    def __init__(self, endpoint: str) -> None:
        """Starts connecting to ``endpoint``; nobody need listen yet. Use ``ZmqChannel.connect``."""
        path = socket_path(endpoint)
        self._guard = Guard(f"channel to {endpoint}")
        self._socket = _Socket(zmq.DEALER, self._guard)
        socket = self._socket.raw
        # A name of its own, so that the server knows this channel again after a reconnect.
        socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(8))
        # Only to a live connection: a frame kept for a peer that restarted would be a command from the past.
        socket.setsockopt(zmq.IMMEDIATE, 1)
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
        self._guard.check()
        try:
            self._socket.raw.send(frame, zmq.NOBLOCK)
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
        self._guard.check()
        try:
            self._socket.raw.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.Again as error:
            raise TransportError(
                f"peer {peer.hex()} does not take its frames: {HIGH_WATER_MARK} are queued"
            ) from error
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

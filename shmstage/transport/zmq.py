"""Channels over ZeroMQ: ROUTER on the bound end, DEALER on the connecting one.

``ipc://`` inside a host; ``tcp://`` between hosts, never without CURVE. Never PUB/SUB (drops silently), never REQ
(stuck after a lost reply), never ``recv_pyobj`` (pickle).
"""

from __future__ import annotations

import os
from typing import final

import zmq

from shmstage.errors import PeerLostError, TransportError
from shmstage.transport.channel import Channel, Guard, ServerChannel
from shmstage.transport.curve import ClientAuth, ServerAuth, secure_client, secure_server
from shmstage.transport.endpoint_lock import EndpointLock
from shmstage.transport.endpoints import check_tcp_endpoint, socket_path, tcp_base
from shmstage.transport.zmq_socket import HIGH_WATER_MARK, ZmqSocket

CONNECT_LINGER_MS = 100
"""How long ``close`` of the connecting end waits, whose last frames matter less: their server may be gone for good."""

_RECONNECT_MS = 10
_RECONNECT_MAX_MS = 200


@final
class ZmqChannel(Channel):
    """A DEALER socket. Reconnects by itself; what is sent meanwhile waits for the server, up to the mark.

    A frame that so reaches a restarted server names another incarnation and is refused there. (``IMMEDIATE`` would
    hold it back, but libzmq then also throws away what has arrived when the server closes.)
    """

    def __init__(self, endpoint: str, auth: ClientAuth | None = None) -> None:
        """Starts connecting to ``endpoint``; nobody need listen yet. Use ``connect`` or ``connect_tcp``."""
        # only what the file system guards does without keys
        target = check_tcp_endpoint(endpoint) if auth is not None else f"ipc://{socket_path(endpoint)}"
        self.sent_nbytes = self.received_nbytes = 0
        self._guard = Guard(f"channel to {endpoint}")
        self._socket = ZmqSocket(zmq.DEALER, self._guard)
        socket = self._socket.raw
        # A name of its own, so that the server knows this channel again after a reconnect.
        socket.setsockopt(zmq.ROUTING_ID, b"c" + os.urandom(8))
        socket.setsockopt(zmq.LINGER, CONNECT_LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        try:
            if auth is not None:
                socket.setsockopt(zmq.IPV6, "[" in endpoint)
                secure_client(self._socket, auth, endpoint)
            socket.connect(target)
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                raise TransportError(f"cannot connect to {endpoint}: {error.strerror}") from error
            raise

    @classmethod
    def connect(cls, endpoint: str) -> ZmqChannel:
        """A channel to an ``ipc://`` endpoint. Raises ``TransportError`` for a path too long or another scheme."""
        return cls(endpoint)

    @classmethod
    def connect_tcp(cls, endpoint: str, auth: ClientAuth) -> ZmqChannel:
        """A channel to another host, ``tcp://`` with a numeric address and a port, as ``bind_tcp`` says it.

        Later, ``send`` and ``recv`` raise ``AuthError`` once it is known that the server does not hold
        ``auth.server_public`` or does not let ``auth.keys`` in; a server that is not there is waited for.
        """
        return cls(endpoint, auth)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send((frame,))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise TransportError(f"cannot send {len(frame)} bytes: {error.strerror}") from error
        self.sent_nbytes += len(frame)
        return True

    def recv(self, timeout_s: float) -> bytes | None:
        parts = self._socket.recv(timeout_s)
        if parts is None:
            return None
        frame = parts[0] if len(parts) == 1 else b""  # nobody of ours sends parts; the codec refuses b""
        self.received_nbytes += len(frame)
        return frame

    def descriptor(self) -> int:
        return self._socket.descriptor()

    def wake(self) -> None:
        self._socket.wake()

    def close(self) -> None:
        if self._guard.close():
            self._socket.close()


@final
class ZmqServerChannel(ServerChannel):
    """A ROUTER socket. One on ``ipc://`` owns its path: a second bind is refused, a stale socket file is cleared."""

    def __init__(self, endpoint: str, auth: ServerAuth | None = None) -> None:
        """Binds ``endpoint``. Use ``bind`` or ``bind_tcp``."""
        path = socket_path(endpoint) if auth is None else None
        self._guard = Guard(f"server at {endpoint}")
        self._lock = None if path is None else EndpointLock(path)
        self._socket = ZmqSocket(zmq.ROUTER, self._guard)
        socket = self._socket.raw
        # Otherwise a frame to a peer that is not there vanishes without a word.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A channel that reconnects before its old connection is noticed dead keeps its name.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            if auth is not None:
                socket.setsockopt(zmq.IPV6, "[" in endpoint)
                secure_server(self._socket, auth, endpoint.removesuffix(":0"))
            socket.bind(endpoint if path is None else f"ipc://{path}")
        except BaseException as error:
            self.close()
            if isinstance(error, zmq.ZMQError):
                remedy = "" if auth is None else "; name an address of this host"
                raise TransportError(f"cannot listen at {endpoint}: {error.strerror}{remedy}") from error
            raise
        #: where it can be reached, with the port that the kernel chose
        self.endpoint = endpoint if auth is None else socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @classmethod
    def bind(cls, endpoint: str) -> ZmqServerChannel:
        """A server at an ``ipc://`` endpoint.

        Raises ``EndpointBusyError`` if a living process owns it, ``TransportError`` if it cannot be bound.
        """
        return cls(endpoint)

    @classmethod
    def bind_tcp(cls, address: str, auth: ServerAuth) -> ZmqServerChannel:
        """A server for other hosts at one numeric address of this host and a free port; ``endpoint`` says which.

        Clients are let in while somebody receives. Raises ``TransportError`` if it cannot be bound or the address
        is none of its own (0.0.0.0), ``InputError`` for what is no key.
        """
        return cls(f"{tcp_base(address)}:0", auth)

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
            if self._lock is not None:
                self._lock.release()

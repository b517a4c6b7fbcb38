"""The in-process transport: the same contract as ZeroMQ's, no sockets.

With ``idle``, nothing ever blocks: instead of waiting, ``recv`` calls ``idle(timeout_s)``, which may step the other
side or advance a fake clock, and then looks once more. So a client and a server run in one thread, by hand.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import final

from shmstage.errors import PeerLostError, TransportError
from shmstage.transport.channel import Channel, Guard, ServerChannel

QUEUE_LIMIT = 1000
"""Frames queued per direction before ``send`` refuses, as with ZeroMQ's high-water mark."""

Idle = Callable[[float], None]


@final
class MemoryServerChannel(ServerChannel):
    """The bound end; ``connect`` makes the other ends."""

    def __init__(self, *, idle: Idle | None = None) -> None:
        self._guard = Guard("memory server channel")
        self._changed = threading.Condition()
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._peers: dict[bytes, MemoryChannel] = {}
        self._names = itertools.count(1)
        self._idle = idle
        self._woken = False

    def connect(self, *, idle: Idle | None = None) -> MemoryChannel:
        """A new channel to this server."""
        self._guard.check()
        return MemoryChannel(self, idle=idle)

    def recv(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        self._guard.check()
        if timeout_s > 0 and not self._inbox and not self._woken and self._idle is not None:
            self._idle(timeout_s)
        with self._changed:
            if not self._inbox and timeout_s > 0:
                wait_s = timeout_s if self._idle is None else 0.0
                self._changed.wait_for(lambda: self._inbox or self._woken, wait_s)
                self._woken = False
            return self._inbox.popleft() if self._inbox else None

    def send(self, peer: bytes, frame: bytes) -> None:
        self._guard.check()
        with self._changed:
            channel = self._peers.get(peer)
        if channel is None:
            raise PeerLostError(f"peer {peer.hex()} is not connected")
        if not channel._deliver(frame):
            raise TransportError(f"peer {peer.hex()} does not take its frames: {QUEUE_LIMIT} are queued")

    def wake(self) -> None:
        self._guard.check()
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        if self._guard.close():
            with self._changed:
                self._peers.clear()
                self._inbox.clear()

    # --- called by the channels ------------------------------------------------------------------------------

    def _join(self, channel: MemoryChannel) -> bytes:
        with self._changed:
            peer = b"m%d" % next(self._names)
            self._peers[peer] = channel
            return peer

    def _leave(self, peer: bytes) -> None:
        with self._changed:
            self._peers.pop(peer, None)

    def _take(self, peer: bytes, frame: bytes) -> bool:
        with self._changed:
            if peer not in self._peers or len(self._inbox) >= QUEUE_LIMIT:
                return False
            self._inbox.append((peer, frame))
            self._changed.notify_all()
            return True


@final
class MemoryChannel(Channel):
    """One connecting end. Use ``MemoryServerChannel.connect``."""

    def __init__(self, server: MemoryServerChannel, *, idle: Idle | None = None) -> None:
        self._guard = Guard("memory channel")
        self._server = server
        self._changed = threading.Condition()
        self._inbox: deque[bytes] = deque()
        self._idle = idle
        self._woken = False
        self._signal = -1  # readable while the inbox holds something; made for whoever asks for it
        self.sent_nbytes = self.received_nbytes = 0
        self._peer = server._join(self)

    def send(self, frame: bytes) -> bool:
        self._guard.check()
        taken = self._server._take(self._peer, bytes(frame))
        self.sent_nbytes += len(frame) if taken else 0
        return taken

    def recv(self, timeout_s: float) -> bytes | None:
        self._guard.check()
        if timeout_s > 0 and not self._inbox and not self._woken and self._idle is not None:
            self._idle(timeout_s)
        with self._changed:
            if not self._inbox and timeout_s > 0:
                wait_s = timeout_s if self._idle is None else 0.0
                self._changed.wait_for(lambda: self._inbox or self._woken, wait_s)
                self._woken = False
            if not self._inbox:
                return None
            frame = self._inbox.popleft()
            if not self._inbox and self._signal >= 0:
                os.eventfd_read(self._signal)
            self.received_nbytes += len(frame)
            return frame

    def descriptor(self) -> int:
        self._guard.check()
        with self._changed:
            if self._signal < 0:
                self._signal = os.eventfd(bool(self._inbox), os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._signal

    def wake(self) -> None:
        self._guard.check()
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        if self._guard.close():
            self._server._leave(self._peer)
            with self._changed:
                self._inbox.clear()
                if self._signal >= 0:
                    os.close(self._signal)
                    self._signal = -1

    def _deliver(self, frame: bytes) -> bool:
        with self._changed:
            if len(self._inbox) >= QUEUE_LIMIT:
                return False
            if not self._inbox and self._signal >= 0:
                os.eventfd_write(self._signal, 1)
            self._inbox.append(bytes(frame))
            self._changed.notify_all()
            return True

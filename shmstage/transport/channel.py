"""What the rest of shmstage asks of a transport. Frames may be lost, never reordered, altered or doubled.

``ZmqChannel`` is the real one; ``shmstage.testing.memory_channel`` holds the in-process one. One contract suite
(``tests/transport/test_channel_contract.py``) runs on both. To change behaviour, wrap a channel.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod

from shmstage.errors import ForkedError, TransportError


class Channel(ABC):
    """The end that connects. Used by one thread at a time, except for ``wake``."""

    #: bytes of the frames that ``send`` took and ``recv`` gave; what the transport adds to each is not counted
    sent_nbytes: int = 0
    received_nbytes: int = 0

    @abstractmethod
    def send(self, frame: bytes) -> bool:
        """Hands the frame on without waiting; False if the queue is full or the server is gone."""

    @abstractmethod
    def recv(self, timeout_s: float) -> bytes | None:
        """The next frame, or None after ``timeout_s`` seconds or a ``wake``."""

    @abstractmethod
    def descriptor(self) -> int:
        """What to poll in order to wait for several channels at once; the channel keeps and closes it.

        Once ``recv(0.0)`` has returned None and as long as nothing is sent, it becomes readable when there may be
        a frame to receive or an error to raise: then, and after every ``send``, receive until None again. It says
        nothing of ``wake``.
        """

    @abstractmethod
    def wake(self) -> None:
        """From any thread: the running or the next ``recv`` that would wait returns soon."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back within a second; harmless twice."""


class ServerChannel(ABC):
    """The end that is bound. One thread receives; any thread may ``send`` and ``wake``."""

    @abstractmethod
    def recv(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        """The next ``(peer, frame)``, or None after ``timeout_s`` seconds or a ``wake``."""

    @abstractmethod
    def send(self, peer: bytes, frame: bytes) -> None:
        """Hands the frame on without waiting.

        Raises ``PeerLostError`` if that peer is not connected, ``TransportError`` if its queue is full.
        """

    @abstractmethod
    def wake(self) -> None:
        """From any thread: the running or the next ``recv`` that would wait returns soon."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back within a second; harmless twice."""


class Guard:
    """Refuses an endpoint after ``close`` and in a forked child, which shares its sockets with the parent."""

    __slots__ = ("_closed", "_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._closed = False

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that opened the endpoint."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises ``ForkedError`` or ``TransportError``; cheap enough for every call."""
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._what} was opened by process {self._pid} and used in its forked child {os.getpid()}; "
                "start children with spawn and let them open their own"
            )
        self.check_open()

    def check_open(self) -> None:
        """Raises ``TransportError`` after ``close``: what is left to ask under a lock, where ``check`` has passed."""
        if self._closed:
            raise TransportError(f"{self._what} is closed")

    def close(self) -> bool:
        """True the first time, in the process that opened the endpoint."""
        first = not self._closed and not self.forked
        self._closed = True
        return first


class OneAtATime:
    """Refuses a second thread at once: a lock that is never waited for."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise TransportError("a client was used from two threads at once; give each its own")

    def __exit__(self, *raised: object) -> None:
        self._lock.release()

"""A channel that counts what goes through it."""

from __future__ import annotations

from typing import final

from shmstage.transport.channel import Channel


@final
class CountingChannel(Channel):
    """Wraps a channel; ``nbytes`` of all frames that were sent or received, both directions together."""

    def __init__(self, channel: Channel) -> None:
        self.nbytes = 0
        self._channel = channel

    def send(self, frame: bytes) -> bool:
        sent = self._channel.send(frame)
        self.nbytes += len(frame) if sent else 0
        return sent

    def recv(self, timeout_s: float) -> bytes | None:
        frame = self._channel.recv(timeout_s)
        self.nbytes += len(frame) if frame is not None else 0
        return frame

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()

"""What is sent for one micro-batch does not depend on how large it is: arrays go through a slot, never a message."""

from __future__ import annotations

from typing import final

import numpy as np

from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.transport.channel import ServerChannel
from shmstage.transport.consumer import Consumer
from shmstage.transport.producer import Producer

WAIT_S = 20.0
SLOTS = 3


@final
class Counting(ServerChannel):
    """A server's channel that notes the size of every frame in either direction."""

    def __init__(self, inner: MemoryServerChannel) -> None:
        self.nbytes: list[int] = []
        self._inner = inner

    def recv(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        received = self._inner.recv(timeout_s)
        if received is not None:
            self.nbytes.append(len(received[1]))
        return received

    def send(self, peer: bytes, frame: bytes) -> None:
        self.nbytes.append(len(frame))
        self._inner.send(peer, frame)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def frames_for(tokens: int) -> list[int]:
    """Sizes of all frames of a stream of ``SLOTS`` slots with ``tokens`` tokens each."""
    inner = MemoryServerChannel()
    channel = Counting(inner)
    producer = Producer("stream", {"tokens": ("int32", (tokens,))}, slots=SLOTS, channel=channel)
    consumer = Consumer("stream", timeout_s=WAIT_S, channel=inner.connect())
    for number in range(SLOTS):
        slot = producer.acquire(WAIT_S)
        slot.views["tokens"][...] = np.arange(tokens, dtype=np.int32) + number
        slot.publish(rows=1, step=number)
    for number in range(SLOTS):
        lease = consumer.receive(WAIT_S)
        assert lease is not None and lease.views["tokens"][-1] == tokens - 1 + number
        lease.end()
    consumer.close()
    producer._close(None)
    return sorted(channel.nbytes)


def test_frames_are_as_small_for_a_large_slot_as_for_a_small_one() -> None:
    """S77: 4 KB and 8 MB a slot."""
    small, large = frames_for(1_000), frames_for(2_000_000)
    assert len(small) == len(large) > SLOTS
    assert max(large) < 600
    # a number of more digits in the layout's description, and in the pages it counts
    assert sum(large) - sum(small) < 64

"""The fakes that are shipped: clock and in-process channel (its contract: ``tests/transport``)."""

from __future__ import annotations

import pytest

from shmstage.testing.fake_clock import FakeClock
from shmstage.testing.memory_channel import MemoryServerChannel


def test_fake_clock_moves_only_when_told_to() -> None:
    clock = FakeClock(1.5)
    assert (clock(), clock(), clock.now_ns) == (1.5, 1.5, 1_500_000_000)
    clock.advance(0.25)
    assert clock() == 1.75
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1.0)


def test_memory_channel_with_idle_runs_the_other_side_instead_of_waiting() -> None:
    waits: list[float] = []
    server = MemoryServerChannel(idle=waits.append)

    def idle(timeout_s: float) -> None:
        waits.append(timeout_s)
        received = server.recv(0.0)
        if received is not None:
            server.send(received[0], received[1].upper())

    channel = server.connect(idle=idle)
    channel.send(b"question")
    assert channel.recv(3600.0) == b"QUESTION"
    assert channel.recv(3600.0) is None
    assert server.recv(60.0) is None
    assert waits == [3600.0, 3600.0, 60.0]
    channel.close()
    server.close()

"""Who makes a micro-batch of a plan: in a slot of this host, or in one slot on each of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shmstage.memory.handle import Handle
from shmstage.orchestrator.intake import Planned, Upcoming


@dataclass(frozen=True)
class Filled:
    """A published micro-batch; ``*_ns`` on the monotonic clock of this process.

    ``nbytes``: written into slots, on all hosts together. ``fetch_s``: waited for trajectories that lie elsewhere; it
    is a part of the time from ``begun_ns`` to ``acquired_ns``, the rest of which was the wait for a slot.
    """

    handle: Handle
    real_tokens: int
    nbytes: int
    begun_ns: int
    acquired_ns: int
    filled_ns: int
    published_ns: int
    fetch_s: float = 0.0

    @property
    def slot_wait_s(self) -> float:
        return (self.acquired_ns - self.begun_ns) / 1e9 - self.fetch_s

    @property
    def pack_s(self) -> float:
        return (self.published_ns - self.acquired_ns) / 1e9


class Packer(Protocol):
    """Used by one thread. ``looks_ahead``: so many micro-batches it wants to hear of before their turn; 0: of none."""

    @property
    def looks_ahead(self) -> int: ...

    def ahead(self, upcoming: Sequence[Upcoming]) -> None:
        """These are packed next, in this order, unless the run ends before. Does not wait for anything."""

    def pack(self, planned: Planned, *, step: int, index: int, is_final: bool, stop: Callable[[], bool]) -> Filled:
        """Wait for a free slot, fill and publish it.

        Raises ``StoppedError`` soon after ``stop()`` is true, ``WaitTimeoutError`` when no slot comes free in time,
        ``PeerLostError`` when it never will.
        """

    def free_slot_count(self) -> int:
        """How many slots are free, as far as is known. Raises ``PoolError`` when there are none any more."""

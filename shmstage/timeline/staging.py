"""What a staged boundary cost beyond what it hid: the figures that the latch judges by.

Source of the formulas: the contract of the step boundary ("The latch: does staging pay?").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class StagingCost:
    """One staged boundary, in seconds. ``upload_s``: what an unstaged boundary would have waited for."""

    upload_s: float
    exposed_s: float
    overhead_s: float

    @property
    def pays(self) -> bool:
        return self.exposed_s + self.overhead_s < self.upload_s


def staging_cost(
    *,
    upload_begin: int,
    staged_ready: int,
    last_ready: int,
    update_dispatched: int,
    waited_elsewhere_s: float,
    microbatch_s: Sequence[float],
) -> StagingCost:
    """Instants in ns on the trainer's clock: F's upload, the end of L (replay included), the update's dispatch.

    Exposed is the part of the upload that outlasted L. Overhead is control time, for which the update was held back
    when both L and the upload were over (less ``waited_elsewhere_s``, which it would have waited unstaged, too: for a
    snapshot, for a hook), plus what L took longer than the median of its step, ``microbatch_s`` in order.
    """
    held_back_s = max(0, update_dispatched - max(last_ready, staged_ready)) / 1e9
    slowed_s = max(0.0, microbatch_s[-1] - median(microbatch_s)) if microbatch_s else 0.0
    return StagingCost(
        upload_s=(staged_ready - upload_begin) / 1e9,
        exposed_s=max(0, staged_ready - last_ready) / 1e9,
        overhead_s=max(0.0, held_back_s - waited_elsewhere_s) + slowed_s,
    )

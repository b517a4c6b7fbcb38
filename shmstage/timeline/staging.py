"""What a staged boundary cost beyond what it hid: the figures that the latch judges by.

Source of the formulas: the contract of the step boundary ("The latch: does staging pay?").
"""

from __future__ import annotations

from dataclasses import dataclass


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
    last_microbatch_s: float | None,
    median_microbatch_s: float | None,
) -> StagingCost:
    """Instants in ns on the trainer's clock: F's upload, the end of L (replay included), the update's dispatch.

    Exposed is the part of the upload that outlasted L. Overhead is the time the update was held back beyond the end of
    L, plus what L took longer than a usual micro-batch of its step while the upload went on beside it.
    """
    held_back_s = max(0, update_dispatched - last_ready) / 1e9
    slowed_s = 0.0
    if last_microbatch_s is not None and median_microbatch_s is not None:
        slowed_s = max(0.0, last_microbatch_s - median_microbatch_s)
    return StagingCost(
        upload_s=(staged_ready - upload_begin) / 1e9,
        exposed_s=max(0, staged_ready - last_ready) / 1e9,
        overhead_s=held_back_s + slowed_s,
    )

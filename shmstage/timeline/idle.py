"""How long the devices waited at a step boundary: two estimators over readiness stamps, the larger is reported.

Source of the formulas: the contract of the step boundary ("Measuring the idle"). The gap after "update landed" alone is
a false win, because it leaves out the wait *before* a late update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class BoundaryInstants:
    """Raw instants of the boundary from step k to k+1, all in ns on the trainer's monotonic clock.

    ``last_finished``: L, step k's last micro-batch, is done. ``first_ready``: F, step k+1's first, is done;
    ``first_patch_ready``: its late fields are on the device, 0 if it has none.
    """

    last_finished: int
    update_dispatched: int
    update_landed: int
    first_dispatched: int
    first_staged_ready: int
    first_ready: int
    first_patch_ready: int = 0


def boundary_idle_s(
    at: BoundaryInstants, microbatch_s: float | None, busy: Sequence[tuple[int, int]] = ()
) -> float:
    """Idle of one boundary in seconds: the larger of both estimators, never negative.

    ``busy`` are [begin, end) windows in which the devices evaluated or scored: that is not idle.

    ``microbatch_s`` is the calibrated time of one micro-batch (``calibrated_microbatch_s``); ``None`` leaves the
    second estimator out.
    """
    started = _started(at, microbatch_s)
    before_update = max(0, at.update_dispatched - at.last_finished)
    idle_ns = started - at.update_landed - covered_ns(busy, at.update_landed, started) + before_update
    return max(0, idle_ns) / 1e9


def idle_windows(
    at: BoundaryInstants, microbatch_s: float | None, busy: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """The [begin, end) windows in which the devices waited; their lengths sum up to ``boundary_idle_s``."""
    windows = [(at.last_finished, at.update_dispatched)] if at.last_finished < at.update_dispatched else []
    reached, started = at.update_landed, _started(at, microbatch_s)
    for begin, end in sorted(busy):
        if end <= reached or begin >= end:
            continue
        if reached < min(begin, started):
            windows.append((reached, min(begin, started)))
        reached = end
    if reached < started:
        windows.append((reached, started))
    return windows


def _started(at: BoundaryInstants, microbatch_s: float | None) -> int:
    started = max(at.first_dispatched, at.update_landed, at.first_staged_ready, at.first_patch_ready)
    if microbatch_s is not None:
        started = max(started, at.first_ready - round(microbatch_s * 1e9))
    return started


def covered_ns(windows: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """How much of [begin, end) the windows cover together."""
    covered, reached = 0, begin
    for window_begin, window_end in sorted(windows):
        start, stop = max(window_begin, reached), min(window_end, end)
        if stop > start:
            covered += stop - start
            reached = stop
    return covered


def calibrated_microbatch_s(intervals: Sequence[tuple[int, int, int]]) -> float | None:
    """Median device time of a micro-batch in seconds from (dispatched, previous ready, ready) in ns.

    A micro-batch starts at the later of its dispatch and the end of the one before it; ``None`` without samples.
    """
    samples = [ready - max(dispatched, previous) for dispatched, previous, ready in intervals]
    return median(samples) / 1e9 if samples else None

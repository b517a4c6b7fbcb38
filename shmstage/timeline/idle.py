"""How long the devices waited at a step boundary: two estimators over readiness stamps, the larger is reported.

Source of the formulas: the contract of the step boundary ("Measuring the idle"). The gap after "update landed" alone is
a false win, because it leaves out the wait *before* a late update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from shmstage.timeline.intervals import Interval, difference, length_ns, union

#: samples of which the calibrated micro-batch time is the median: the newest of one attempt
CALIBRATION_SAMPLES: Final = 64


@dataclass(frozen=True)
class BoundaryInstants:
    """Raw instants of the boundary from step k to k+1, all in ns on the trainer's monotonic clock.

    ``last_finished``: L, step k's last micro-batch, is done, its replay included. ``first_ready``: F, step k+1's first,
    is done, without a replay of its own; ``first_patch_ready``: its late fields are on the device, 0 if it has none.
    """

    last_finished: int
    update_dispatched: int
    update_landed: int
    first_dispatched: int
    first_staged_ready: int
    first_ready: int
    first_patch_ready: int = 0


@dataclass(frozen=True)
class BoundaryIdle:
    """Both estimates of one boundary in ns, and where on the clock the larger one lies.

    ``by_calibration_ns`` is ``None`` without a calibrated micro-batch time. ``before_update`` and ``after_update`` are
    sorted and disjoint; ``explained_until`` is when everything F needs was there: idle after it is the second
    estimator's alone.
    """

    by_stamps_ns: int
    by_calibration_ns: int | None
    before_update: tuple[Interval, ...]
    after_update: tuple[Interval, ...]
    first_started: int
    explained_until: int

    @property
    def idle_ns(self) -> int:
        return length_ns(self.before_update) + length_ns(self.after_update)


def boundary_idle(
    at: BoundaryInstants, microbatch_s: float | None, busy: Sequence[Interval] = ()
) -> BoundaryIdle:
    """Idle of one boundary, never negative.

    ``busy`` are [begin, end) windows in which the devices evaluated or scored: that is not idle.

    ``microbatch_s`` is the calibrated time of one micro-batch (``calibrated_microbatch_s``); ``None`` leaves the
    second estimator out.
    """
    windows = union(busy)
    # the update cannot land before it is dispatched; a stamp that says so must not count one wait twice
    landed = max(at.update_landed, at.update_dispatched)
    before = difference(union([(at.last_finished, at.update_dispatched)]), windows)
    stamped = max(at.first_dispatched, landed, at.first_staged_ready, at.first_patch_ready)
    by_stamps = difference(union([(landed, stamped)]), windows)
    started = stamped
    by_calibration_ns = None
    if microbatch_s is not None:
        calibrated = at.first_ready - round(microbatch_s * 1e9)
        started = max(stamped, calibrated)
        by_calibration_ns = length_ns(before) + length_ns(difference(union([(landed, calibrated)]), windows))
    return BoundaryIdle(
        by_stamps_ns=length_ns(before) + length_ns(by_stamps),
        by_calibration_ns=by_calibration_ns,
        before_update=tuple(before),
        after_update=tuple(difference(union([(landed, started)]), windows)),
        first_started=started,
        explained_until=stamped,
    )


def boundary_idle_s(at: BoundaryInstants, microbatch_s: float | None, busy: Sequence[Interval] = ()) -> float:
    """``boundary_idle`` in seconds: the larger of both estimators."""
    return boundary_idle(at, microbatch_s, busy).idle_ns / 1e9


def calibrated_microbatch_s(intervals: Sequence[tuple[int, int, int]]) -> float | None:
    """Median device time of a micro-batch in seconds from (dispatched, previous ready, ready) in ns.

    A micro-batch starts at the later of its dispatch and the end of the one before it; ``None`` without samples.
    """
    samples = [ready - max(dispatched, previous) for dispatched, previous, ready in intervals]
    return median(samples) / 1e9 if samples else None

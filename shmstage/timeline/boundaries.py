"""The boundaries of one attempt: two neighbouring steps, the idle between them, and step lines read as steps.

Pure. A run without events has the raw instants of its step lines: less is known then, the idle is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from shmstage.timeline.idle import (
    CALIBRATION_SAMPLES,
    BoundaryIdle,
    BoundaryInstants,
    boundary_idle,
    calibrated_microbatch_s,
)
from shmstage.timeline.intervals import Interval
from shmstage.timeline.microbatches import SPANS, Attempt, MicrobatchInstants, Spans, StepInstants


@dataclass(frozen=True, slots=True)
class Boundary:
    """From ``before``, step k, to ``after``, step k+1, with what else the attempt's threads did at the time."""

    before: StepInstants
    after: StepInstants
    at: BoundaryInstants
    idle: BoundaryIdle
    microbatch_s: float | None
    attempt: Attempt

    @property
    def last(self) -> MicrobatchInstants:
        return self.before.microbatches[len(self.before.microbatches) - 1]

    @property
    def first(self) -> MicrobatchInstants:
        return self.after.microbatches[0]


def boundaries_of(attempt: Attempt) -> Iterator[Boundary]:
    """Those of which every instant that the estimators need is known, in order of their steps."""
    samples: deque[tuple[int, int, int]] = deque(maxlen=CALIBRATION_SAMPLES)
    previous: StepInstants | None = None
    for number in sorted(attempt.steps):
        step = attempt.steps[number]
        samples.extend(_calibrating(step))
        at = instants_between(previous, step) if previous and previous.step == number - 1 else None
        if previous is not None and at is not None:
            microbatch_s = calibrated_microbatch_s(samples)
            idle = boundary_idle(at, microbatch_s, busy_windows(attempt, at))
            yield Boundary(previous, step, at, idle, microbatch_s, attempt)
        previous = step


def instants_between(before: StepInstants, after: StepInstants) -> BoundaryInstants | None:
    """``None`` if one is missing: the run ended there, or its events were lost."""
    last, first = before.last, after.first
    if last is None or first is None:
        return None
    at = BoundaryInstants(
        last_finished=last.finished,
        update_dispatched=before.update_dispatched,
        update_landed=before.update_landed,
        first_dispatched=first.dispatch_begun,
        first_staged_ready=first.staged_ready,
        first_ready=first.ready,
        first_patch_ready=first.patch_ready,
    )
    needed = (
        at.last_finished, at.update_dispatched, at.update_landed, at.first_dispatched, at.first_staged_ready,
        at.first_ready,
    )  # fmt: skip
    return at if all(needed) else None


def busy_windows(attempt: Attempt, at: BoundaryInstants) -> list[Interval]:
    """When the devices scored or evaluated at this boundary."""
    begin = min(at.last_finished, at.update_landed)
    end = max(at.first_ready, at.first_dispatched, at.first_staged_ready, at.first_patch_ready)
    return [(event.t, event.end) for event in attempt.spans["scored"].between(begin, end)]


def _calibrating(step: StepInstants) -> Iterator[tuple[int, int, int]]:
    """(dispatched, previous ready, ready) of micro-batches that follow one of their own step, without a replay."""
    for index in range(1, len(step.microbatches)):
        before, micro = step.microbatches.get(index - 1), step.microbatches.get(index)
        if before is None or micro is None or before.replay_ready or micro.replay_ready:
            continue
        if before.ready and micro.ready and micro.dispatch_begun:
            yield micro.dispatch_begun, before.ready, micro.ready


# --- without events -----------------------------------------------------------------------------------------

#: "instants_ns" of a step line → field of a micro-batch
_COLUMNS = {
    "packed": "packed",
    "dispatched": "dispatch_begun",
    "upload_begin": "upload_begun",
    "staged_ready": "staged_ready",
    "patch_ready": "patch_ready",
    "ready": "ready",
}


def step_of_line(line: Mapping[str, Any]) -> StepInstants | None:
    """The raw instants of a step line; ``None`` where it holds none. A replay is not told apart from its first run."""
    instants = line.get("instants_ns")
    if not isinstance(instants, Mapping):
        return None
    step = StepInstants(line["step"])
    for column, name in _COLUMNS.items():
        values = instants.get(column)
        for index, value in enumerate(values if isinstance(values, list) else ()):
            if _is_instant(value):
                micro = step.microbatches.setdefault(index, MicrobatchInstants(step.step, index))
                setattr(micro, name, value)
    dispatched, landed = instants.get("update_dispatched"), instants.get("update_landed")
    step.update_dispatched = dispatched if _is_instant(dispatched) else 0
    step.update_landed = landed if _is_instant(landed) else 0
    return step if step.microbatches else None


def _is_instant(value: object) -> TypeGuard[int]:
    """As ``reading`` takes them: what is larger is of a damaged line."""
    return type(value) is int and abs(value) < 1 << 63


def attempts_of_steps(steps: Iterable[tuple[int, StepInstants]]) -> list[Attempt]:
    """Attempts from (number of the attempt, step of a line), in the lines' order."""
    found: dict[int, Attempt] = {}
    for number, step in steps:
        attempt = found.setdefault(number, Attempt(number, spans={name: Spans() for name in SPANS}))
        attempt.steps[step.step] = step
    return [found[number] for number in sorted(found)]

"""The devices of ``scale.py``: one in-order queue, and what a run of it says about its boundaries.

Hosts are alike and a collective begins with the last of them, so one queue stands for all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from scale_events import Process, Signal, Simulation

from shmstage.timeline.idle import BoundaryInstants, boundary_idle_s

#: steps in which a run reaches its rhythm; their boundaries are left out, as the reference's warm-up arm is
WARM_UP_STEPS = 3
MEASURED_STEPS = 5


@dataclass
class Operation:
    """A program in the queue. ``data_ready``: when what it reads was on the devices, ``None`` if it reads nothing."""

    name: str
    duration_s: float
    dispatched: float
    finished: Signal
    began: float = 0.0
    data_ready: Signal | None = None


@dataclass
class Device:
    simulation: Simulation
    operations: list[Operation] = field(default_factory=list)

    def enqueue(self, name: str, duration_s: float, data_ready: Signal | None = None) -> Operation:
        before = self.operations[-1].finished if self.operations else None
        at = Operation(name, duration_s, self.simulation.now, Signal(f"finished({name})"), data_ready=data_ready)
        self.operations.append(at)
        self.simulation.spawn(self._run(at, before), name)
        return at

    def _run(self, operation: Operation, before: Signal | None) -> Process:
        for needed in (before, operation.data_ready):
            if needed is not None:
                yield needed
        operation.began = self.simulation.now
        yield operation.duration_s
        self.simulation.fire(operation.finished)


@dataclass(frozen=True)
class Boundaries:
    """Means over a run's measured boundaries, which are all alike wherever calls are hidden.

    ``device_idle_s``: from the device's own begin and end, no estimate. ``instep_idle_s``: what a step has besides.
    """

    idle_s: float
    device_idle_s: float
    step_s: float
    instep_idle_s: float


def boundaries_of(operations: Sequence[Operation], microbatches: int) -> Boundaries:
    """``operations`` in the device's order, ``microbatches`` and an update per step.

    Idle is the contract's ("Measuring the idle", both estimators, the larger), from the instants of this run.
    """
    per_step = microbatches + 1
    idle, truth, steps, inside = [], [], [], []
    for begin in range(WARM_UP_STEPS * per_step, len(operations) - per_step, per_step):
        first, last = operations[begin], operations[begin + microbatches - 1]
        update, following = operations[begin + microbatches], operations[begin + per_step]
        at = BoundaryInstants(
            last_finished=_ns(last.finished.when),
            update_dispatched=_ns(update.dispatched),
            update_landed=_ns(update.finished.when),
            first_dispatched=_ns(following.dispatched),
            first_staged_ready=_ns(following.data_ready.when) if following.data_ready else 0,
            first_ready=_ns(following.finished.when),
        )
        idle.append(boundary_idle_s(at, following.duration_s))
        truth.append(following.began - last.finished.when - update.duration_s)
        steps.append(following.began - first.began)
        inside.append(steps[-1] - truth[-1] - update.duration_s - microbatches * last.duration_s)
    return Boundaries(fmean(idle), fmean(truth), fmean(steps), fmean(inside))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

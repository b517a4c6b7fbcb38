"""The reference's loop in ``scale.py``: one path from the orchestrator to one trainer process, calls that block.

Its orders are those of the contract of the boundary; what a call blocks on is the reference's trainer: it settles the
micro-batch before, a step's second call flushes the metrics of the step before and so waits for its own micro-batch,
and a call with the update in it reads the last micro-batch's overflow flag before it dispatches the update.
"""

from __future__ import annotations

from scale_device import MEASURED_STEPS, WARM_UP_STEPS, Boundaries, Device, Operation, boundaries_of
from scale_events import Process, Signal, Simulation
from scale_inputs import Reference


class ReferenceLoop:
    """``order`` is one of the four of the contract. ``blocks``: whether the engine settles and flushes."""

    def __init__(self, given: Reference, order: str, microbatches: int, *, blocks: bool = True) -> None:
        self.given, self.order, self.microbatches, self.blocks = given, order, microbatches, blocks
        self.simulation = Simulation()
        self.device = Device(self.simulation)
        self._last: Operation | None = None
        self._staged: Signal | None = None  # when the staged micro-batch's data are on the devices
        self._wait_until = 0.0  # a staged copy keeps a device wait busy this long, whatever the devices do

    def run(self) -> Boundaries:
        self.simulation.spawn(self._loop(), "the loop")
        self.simulation.run()
        return boundaries_of(self.device.operations, self.microbatches)

    def _loop(self) -> Process:
        given, before = self.given, self.order == "staged_before_update"
        steps = WARM_UP_STEPS + MEASURED_STEPS + 1
        for step in range(steps):
            for index in range(self.microbatches):
                yield from self._train_call(step, index)
                if index == 0 and self.order != "serial":
                    yield from self._bookkeep(step)
            staged = step + 1 < steps
            if before and staged:
                yield from self._stage_call()
            yield from self._update(wait=before)
            if self.order == "staged_after_update" and staged:
                yield from self._stage_call()
                yield from self._device_wait()
            yield self.device.operations[-1].finished  # get_metrics
            yield given.after_landing_s
            if self.order == "serial":
                yield from self._bookkeep(step + 1)

    def _bookkeep(self, step: int) -> Process:
        """Of the step before ``step``."""
        if step:
            yield self.given.bookkeeping_s

    def _train_call(self, step: int, index: int) -> Process:
        given, before = self.given, self._last
        ready, self._staged = self._staged, None
        if ready is None:
            yield given.arrival_call_s + given.placing_call_s
        this = self._last = self.device.enqueue(f"micro-batch {index} of step {step}", given.microbatch_s, ready)
        if self.blocks and before is not None:
            yield from self._seen(before)
        if self.blocks and index == 1 and step:
            yield from self._seen(this)

    def _stage_call(self) -> Process:
        yield self.given.arrival_stage_s
        self._staged = self.simulation.spawn(_after(self.given.placing_staged_s), "placing")
        self._wait_until = self.simulation.now + self.given.device_wait_s

    def _update(self, *, wait: bool) -> Process:
        if self.blocks or wait:
            if wait:
                yield from self._device_wait()
            if self._last is not None:
                yield from self._seen(self._last)
        self.device.enqueue("update", self.given.update_s)

    def _device_wait(self) -> Process:
        yield max(0.0, self._wait_until - self.simulation.now)

    def _seen(self, operation: Operation) -> Process:
        yield operation.finished
        yield self.given.readiness_s


def _after(seconds: float) -> Process:
    yield seconds

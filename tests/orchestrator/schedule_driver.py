"""Runs the sans-IO schedule against a trainer that is only a record of the commands it got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shmstage.orchestrator.schedule import FORWARD, SCORE, BoundarySchedule, Command, Config, Kind

Micro = tuple[int, int]


@dataclass
class Driver:
    """``input_end`` is the number of micro-batches the input holds; ``late`` ones are packed only when waited for."""

    config: Config
    input_end: int | None = None
    late: frozenset[Micro] = frozenset()
    device_is_slow: bool = True
    fault: Callable[[BoundarySchedule, Command], bool] | None = None
    on_complete: Callable[[BoundarySchedule, Command], bool] | None = None
    log: list[str] = field(default_factory=list)
    packed: list[Micro] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.schedule = BoundarySchedule(self.config)
        self._next = 0
        self._pending: list[Command] = []

    def run(self, limit: int = 2000) -> list[str]:
        for _ in range(limit):
            if self.schedule.state.done:
                return self.log
            self._feed(waited_for=False)
            command = self.schedule.next()
            if command is not None:
                self._do(command)
            elif not (self._complete_one() or self._feed(waited_for=True)):
                raise AssertionError(f"stuck after {self.log[-5:]}: {self.schedule.state}")
        raise AssertionError("did not end")

    # --- the feeder -------------------------------------------------------------------------------------

    def _feed(self, *, waited_for: bool) -> bool:
        fed = False
        while True:
            step, index = divmod(self._next, self.config.microbatches_per_step)
            micro = (step + 1, index)
            if self._input_is_over(step + 1):
                if not self.schedule.state.exhausted:
                    self.schedule.end_of_input()
                    return True
                return fed
            if micro > self.schedule.pack_limit or (micro in self.late and not waited_for):
                return fed
            self._next += 1
            self.packed.append(micro)
            self.schedule.packed(*micro, index == self.config.microbatches_per_step - 1)
            fed = True
            if waited_for:
                return True

    def _input_is_over(self, step: int) -> bool:
        if self.input_end is not None and self._next >= self.input_end:
            return True
        return self.config.last_step is not None and step > self.config.last_step

    # --- the trainer ------------------------------------------------------------------------------------

    def _do(self, command: Command) -> None:
        if self.fault is not None and self.fault(self.schedule, command):
            return
        if command.kind is not Kind.FINISH:
            self.log.append(as_text(command))
        self.schedule.returned(command)
        self._pending.append(command)
        if not self.device_is_slow:
            while self._complete_one():
                pass

    def _complete_one(self) -> bool:
        if not self._pending:
            return False
        command = self._pending.pop(0)
        if self.on_complete is not None and self.on_complete(self.schedule, command):
            return True
        if command.kind in FORWARD:
            self.schedule.finished(command.step, command.index)
        if command.kind in (Kind.APPLY_DEFERRED, Kind.UPDATE) or (
            command.kind in FORWARD and command.is_final and not command.defer_update
        ):
            self.schedule.landed(command.step)
        if command.kind is Kind.GET_METRICS:
            self.schedule.metrics_ready(command.step)
        if command.kind in SCORE:
            self.schedule.late_field_ready(command.kind, command.key)
        if command.kind is Kind.SYNC_WEIGHTS:
            self.schedule.weights_published(command.step)
        if command.kind is Kind.SAVE_CHECKPOINT:
            self.schedule.hook_returned(command.step, go_on=True)
        return True


def as_text(command: Command) -> str:
    if command.kind in (*FORWARD, *SCORE, Kind.PATCH, Kind.STAGE):
        defer = " defer" if command.defer_update else ""
        return f"{command.kind.value} {command.step}.{command.index}{defer}"
    if command.kind in (Kind.APPLY_DEFERRED, Kind.UPDATE):
        return command.kind.value
    return f"{command.kind.value} {command.step}"

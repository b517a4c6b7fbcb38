"""What can happen next: every event that a run may see in a state, and the state it leads to.

Events reach the schedule only between calls, because program.py talks to the trainer on one thread. A command, its
effect and its return are therefore one transition; what goes on meanwhile is settled when it is seen (trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmstage.orchestrator.schedule import Key
from walk import calls, deliveries, disturbances, invariants, trainer
from walk import facts as at
from walk.cases import Case
from walk.facts import FAILED, FINISHED, Facts, State, Step, fresh
from walk.invariants import violated
from walk.machine import Machine

__all__ = ["FAILED", "FINISHED", "State", "Step", "World"]


class World:
    """One case with one machine. ``begin`` and ``successors`` are all a walker needs."""

    def __init__(self, case: Case, machine: Machine) -> None:
        self.case = case
        self.machine = machine

    def begin(self) -> State:
        return self.life(restored=0, floor=0, total=-1, budget=self.case.budget)

    def life(self, *, restored: int, floor: int, total: int, budget: int) -> State:
        """What ``prepare`` leaves: checkpoint ``restored`` is durable, its weights published unless below ``floor``."""
        case = self.case
        packed = restored * case.microbatches
        return tuple(fresh(
            SCHEDULE=self.machine.start(case.config(restored, floor)), TOTAL=total,
            PACKED=packed if total < 0 else min(packed, total), UPDATED=restored, DURABLE=restored, LANDED=restored,
            BOOKED=restored, BASE=restored, FLOOR=floor, BUDGET=budget, PUBLISHED=max(floor, restored),
        ))  # fmt: skip

    def successors(self, state: State) -> list[Step]:
        """Empty at the end of a run. Raises ``ViolationError``."""
        if len(state) == 1:
            return []
        if state[at.CALL] is not None:
            return calls.retry(self, state)
        command, in_flight, limit, waits_for_stage = self.machine.view(state[at.SCHEDULE])
        steps = deliveries.deliverable(self, state)
        steps += deliveries.verdicts(self, state)
        if self.case.deadline and waits_for_stage and not self.machine.state(state[at.SCHEDULE]).stage_wait_over:
            steps.append(self.told(state, "stage deadline", self.tell, "stage_wait_over"))
        moves_by_itself = bool(steps)
        self._feed(state, limit, steps)
        if command is None:
            invariants.on_waiting(self.case, state)
        if command is not None:
            steps += calls.issue(self, state, command, in_flight)
        elif not steps:
            violated("deadlock", "nothing can happen")
        elif not moves_by_itself:
            invariants.on_silence(self.case, list(state))
        if state[at.DUPLICATE]:
            steps.append(self.told(state, "late reply ignored", disturbances.ignore_duplicate))
        if state[at.BUDGET]:
            steps += disturbances.disturbances(self, state)
        return steps

    # --- for those who change a state -------------------------------------------------------------------------

    def told(self, state: State, label: str, change: Callable[..., Any], *told: Any) -> Step:
        """The transition that ``change`` makes to a copy of ``state``."""
        w = list(state)
        change(w, *told)
        return label, tuple(w)

    def tell(self, w: Facts, event: str, *told: Any, **named: Any) -> bool:
        """The schedule hears of an event; ``False`` if it says that this is the end."""
        w[at.SCHEDULE], answer = self.machine.tell(w[at.SCHEDULE], event, *told, **named)
        return answer is not False

    # --- the input --------------------------------------------------------------------------------------------

    def _feed(self, state: State, limit: Key, steps: list[Step]) -> None:
        if state[at.END]:
            return
        case, number = self.case, state[at.PACKED]
        most = case.steps * case.microbatches
        if number == state[at.TOTAL] or number == most or (case.free_end and state[at.TOTAL] < 0):
            steps.append(self.told(state, "end of input", self._end_of_input))
        if number in (state[at.TOTAL], most):
            return
        step, index = divmod(number, case.microbatches)
        key = (step + 1, index)
        if key > limit or (case.tight and state[at.LANDED] < step):
            return
        w = list(state)
        while len(w[at.HELD]) >= case.slots:
            if not w[at.UPLOADS]:
                return  # a lease that ends only with another command
            trainer.upload_ready(case, w)
        invariants.on_packed(case, w, key)
        w[at.HELD] += (key,)
        w[at.PACKED] = number + 1
        self.tell(w, "packed", step + 1, index, index == case.microbatches - 1)
        steps.append((f"packed {step + 1}.{index}", tuple(w)))

    def _end_of_input(self, w: Facts) -> None:
        w[at.END], w[at.TOTAL] = 1, w[at.PACKED]
        self.tell(w, "end_of_input")

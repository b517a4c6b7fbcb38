"""Walks lists of cases and keeps count, so that the last test can say what was walked in all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from collector import without_collector

from shmstage.orchestrator.schedule import Config
from walk.cases import Case
from walk.invariants import ViolationError
from walk.machine import Machine, quickly
from walk.walker import shortest_trace, walk


@dataclass
class Tally:
    """``violations`` are texts with the shortest trace; ``faults`` maps a seeded fault to whether it was found."""

    states: int = 0
    orders: int = 0
    cases: int = 0
    violations: list[str] = field(default_factory=list)
    faults: dict[str, bool] = field(default_factory=dict)
    table: list[tuple[str, int, int, int]] = field(default_factory=list)

    def walk_all(self, group: str, cases: Iterable[Case]) -> list[str]:
        """Walk every case to the end, print one line for each; returns the violations."""
        before = (self.cases, self.states, self.orders)
        found: list[str] = []
        machine, shared = Machine(), None
        with without_collector(), quickly():
            for case in cases:
                schedule = case.config(0, 0)
                if schedule != shared:
                    machine, shared = Machine(), schedule
                found += self._walk_one(case, machine, schedule)
        self.table.append((group, *(now - then for now, then in zip(
            (self.cases, self.states, self.orders), before, strict=True
        ))))  # fmt: skip
        self.violations += found
        return found

    def _walk_one(self, case: Case, machine: Machine, schedule: Config) -> list[str]:
        self.cases += 1
        try:
            walked = walk(case, machine)
        except ViolationError as error:
            nearest = shortest_trace(case, machine) or error
            return [f"{case}: {nearest}\n  " + "\n  ".join(nearest.trace)]
        self.states += walked.states
        self.orders += walked.orders
        print(f"{walked.states:>8} states {walked.orders:>32} orders  {case}", flush=True)
        return []

    def summary(self) -> str:
        """The table of groups, then the line that counts."""
        rows = [f"{cases:>6} configurations {states:>9} states {orders:.3g} orders: {group}"
                for group, cases, states, orders in self.table]  # fmt: skip
        caught = sum(self.faults.values())
        return "\n".join([*rows, (
            f"walked {self.states} states, {self.orders} orders, {self.cases} configurations, "
            f"{len(self.violations)} violations, {caught} of {len(self.faults)} seeded faults found"
        )])  # fmt: skip

"""From a source to planned micro-batches: one deterministic stream, the same however often it is begun again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from shmstage.errors import TrajectoryError
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.source import Source
from shmstage.packing.trajectory import Trajectory


@dataclass(frozen=True)
class Arrival:
    """One trajectory as it came in: ``pass_number`` counts runs over the input from 1."""

    pass_number: int
    trajectory: Trajectory


@dataclass(frozen=True)
class Planned:
    """A planned micro-batch and the trajectories its plan names, keyed by arrival number."""

    plan: PlannedMicrobatch
    arrivals: dict[int, Arrival]


@final
class Intake:
    """Reads groups, plans them batch by batch, hands out micro-batches; keeps only what is not handed out yet.

    The plan depends on the order of the input alone, so a resumed run that skips what it has already trained sees the
    very micro-batches of an undisturbed one.
    """

    def __init__(self, source: Source, settings: PlanSettings, *, passes: int | None) -> None:
        self.planner = Planner(settings)
        self._source = source
        self._passes = passes
        self._held: dict[int, Arrival] = {}
        self._handed_out = 0

    def __iter__(self) -> Iterator[Planned]:
        """Planned micro-batches; raises ``TrajectoryError`` if a whole pass holds nothing to train."""
        arrival = 0
        pass_number = 1
        while self._passes is None or pass_number <= self._passes:
            kept_before = self._handed_out + len(self._held)
            batch: int | None = None
            for group in self._source.groups(0):
                if batch is not None and group.batch_index != batch:
                    yield from self._taken(self.planner.close_window())
                batch = group.batch_index
                for trajectory in group.trajectories:
                    self.planner.add(arrival, trajectory.length, trajectory.trajectory_id)
                    self._held[arrival] = Arrival(pass_number, trajectory)
                    arrival += 1
            yield from self._taken(self.planner.close_window())
            if self._handed_out + len(self._held) == kept_before:
                raise TrajectoryError(
                    f"pass {pass_number} over the input has nothing to train: {self.planner.dropped} trajectories "
                    f"dropped as over-long, {self.planner.skipped_empty} empty; check the input or raise tokens"
                )
            pass_number += 1
        yield from self._taken(self.planner.flush())

    def _taken(self, plans: list[PlannedMicrobatch]) -> Iterator[Planned]:
        for plan in plans:
            arrivals = {number: self._held.pop(number) for number in plan.arrivals}
            self._handed_out += len(arrivals)
            yield Planned(plan, arrivals)
        # what the planner neither placed nor keeps (empty, dropped) is let go here
        self._held = {number: self._held[number] for number in self.planner.leftovers}

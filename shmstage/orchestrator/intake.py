"""From a source to planned micro-batches: one deterministic stream that can be gone on with behind any micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NoReturn, final

from shmstage.errors import TrajectoryError
from shmstage.events import NO_EVENTS, Events
from shmstage.orchestrator.arrivals import DescribedGroup, Groups
from shmstage.orchestrator.batch_order import Admitted, BatchEnd, Item, Order, PassEnd
from shmstage.orchestrator.held import HeldBytes
from shmstage.orchestrator.queue import Cursor
from shmstage.orchestrator.reader import SourceReader, read_passes
from shmstage.orchestrator.resume import Place, ResumeState, ranges_between
from shmstage.packing.held_form import HeldForm
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.reference import Described


@dataclass(frozen=True)
class Arrival:
    """One trajectory as it came in: ``pass_number`` counts runs over the input from 1."""

    pass_number: int
    trajectory: Described
    nbytes: int


@dataclass(frozen=True)
class Planned:
    """A planned micro-batch and the trajectories its plan names, keyed by arrival number.

    ``state_after``: an intake begun from it hands out exactly the micro-batches after this one. ``handed_out``: of the
    batches before this one nothing is left.
    """

    plan: PlannedMicrobatch
    arrivals: dict[int, Arrival]
    state_after: ResumeState
    handed_out: Cursor = (1, 0)

    @property
    def nbytes(self) -> int:
        return sum(arrival.nbytes for arrival in self.arrivals.values())


@dataclass(frozen=True, slots=True)
class Upcoming:
    """A planned micro-batch whose turn has not come, and its trajectories by arrival number."""

    plan: PlannedMicrobatch
    trajectories: Mapping[int, Described]


@dataclass(frozen=True, slots=True)
class _Opened:
    """A group of which something may not be handed out yet, and its first trajectory's arrival number."""

    first_arrival: int
    place: Place
    pass_number: int
    batch: Cursor


@final
class Intake:
    """Reads groups, plans them batch by batch, hands out micro-batches; keeps only what is not handed out yet.

    The plan depends on the order of the input alone. ``resume`` is a ``Planned.state_after`` of an earlier intake over
    the same source with the same settings: this one goes on behind that micro-batch, with the same arrival numbers.
    ``form``: what trajectories are brought into as they are read; what is held, and counted as held, has it. Without
    one they stay as they come: what only stands for trajectories has none.
    Reads the source as it goes, or ahead of it after ``read_ahead``; what is handed out is the same.
    """

    def __init__(
        self,
        source: Groups,
        settings: PlanSettings,
        *,
        passes: int | None,
        resume: ResumeState | None = None,
        order: Order = "arrival",
        max_held_bytes: int = 0,
        form: HeldForm | None = None,
    ) -> None:
        state = resume or ResumeState.start()
        self.planner = Planner(settings)
        self.planner.dropped, self.planner.skipped_empty = state.dropped, state.empty
        self._source = source
        self._passes = passes
        self._order: Order = order
        self._form = form
        self._keeps_leftovers = not getattr(source, "windows_are_microbatches", False)
        self._begun_at = state
        self._done_begins = [begin for begin, _ in state.done]
        self._arrival = state.first_arrival
        #: whether what was trained is needed on until a durable checkpoint covers it: the source gives it only once
        self.until_durable = not getattr(source, "source_is_replayable", True)
        self._held_bytes = HeldBytes(max_held_bytes, until_durable=self.until_durable)
        self.reader: SourceReader | None = None
        self._next = _Opened(state.first_arrival, state.place, state.pass_number, (state.pass_number, 0))
        self._opened: list[_Opened] = []
        # in order of arrival, as everything that goes in and out of it
        self._held: dict[int, Arrival] = {}
        # of the windows that are closed
        self._planned: deque[PlannedMicrobatch] = deque()

    def read_ahead(self, events: Events = NO_EVENTS) -> SourceReader:
        """Read the source on a thread from now on; it is the caller's to close."""
        self.reader = SourceReader(
            self._source, self._begun_at, passes=self._passes, order=self._order, held=self._held_bytes,
            form=self._form, events=events,
        )  # fmt: skip
        self.reader.start()
        return self.reader

    def release(self, cursor: int, pass_number: int = 1) -> None:
        """Nobody will resume from before ``ResumeState.cursor`` = ``cursor`` of that pass any more."""
        release = getattr(self._source, "release", None)
        if release is not None:
            release(cursor, pass_number)

    def landed(self, cursor: int, pass_number: int) -> None:
        """Groups before number ``cursor`` of that pass are trained; a resume may still ask for them again."""
        landed = getattr(self._source, "landed", None)
        if landed is not None:
            landed(cursor, pass_number)

    def upcoming(self, count: int) -> list[Upcoming]:
        """What is handed out next, as far as it is planned already; ``count`` at most. For the thread that iterates."""
        return [
            Upcoming(plan, {number: self._held[number].trajectory for number in plan.arrivals})
            for plan in islice(self._planned, count)
        ]

    def __iter__(self) -> Iterator[Planned]:
        """Planned micro-batches; raises ``TrajectoryError`` if a whole pass holds nothing to train."""
        pass_number = self._begun_at.pass_number
        batch: int | None = None
        # a pass that was begun before has been found good
        is_new, kept = self._begun_at.place == Place() and self._is_new_ground, 0
        for item in self._items():
            self._next = _Opened(self._arrival, item.place, pass_number, _batch_from(item, pass_number))
            if not isinstance(item, Admitted) or item.group.batch_index != batch:
                yield from self._close_window()
            if isinstance(item, Admitted):
                batch = item.group.batch_index
                kept += self._add(item.group, pass_number)
            elif isinstance(item, PassEnd):
                if is_new and not kept:
                    self._refuse_pass(pass_number)
                pass_number += 1
                is_new, kept = self._is_new_ground, 0
        yield from self._taken(self.planner.flush())

    def _items(self) -> Iterator[Item]:
        if self.reader is not None:
            return self.reader.items()
        return read_passes(self._source, self._begun_at, passes=self._passes, order=self._order, form=self._form)

    @property
    def _is_new_ground(self) -> bool:
        """Whether all that was planned before the resume has been read again."""
        return self._arrival >= self._begun_at.planned_through

    def _add(self, group: DescribedGroup, pass_number: int) -> int:
        """Take a group into the window; returns how many of its trajectories go there."""
        self._opened.append(self._next)
        kept = 0
        for trajectory in group.trajectories:
            number, self._arrival = self._arrival, self._arrival + 1
            # what is done is neither planned nor counted again
            if not self._is_done(number) and self.planner.add(number, trajectory.length, trajectory.trajectory_id):
                self._held[number] = Arrival(pass_number, trajectory, trajectory.nbytes)
                kept += 1
            elif self.reader is not None:
                self.reader.queue.let_go(trajectory.nbytes)
        return kept

    def _is_done(self, number: int) -> bool:
        place = bisect_right(self._done_begins, number) - 1
        return place >= 0 and number < self._begun_at.done[place][1]

    def _close_window(self) -> Iterator[Planned]:
        # windows closed before the one that was being handed out have nothing more to give; planning what is left
        # of them without what joined it later could make a micro-batch that never was
        if self._is_new_ground:
            yield from self._taken(self.planner.close_window() if self._keeps_leftovers else self.planner.flush())

    def _taken(self, plans: list[PlannedMicrobatch]) -> Iterator[Planned]:
        self._planned.extend(plans)
        while self._planned:
            plan = self._planned.popleft()
            arrivals = {number: self._held.pop(number) for number in plan.arrivals}
            oldest = self._oldest()
            yield Planned(plan, arrivals, self._state(oldest), oldest.batch)

    def _oldest(self) -> _Opened:
        """The oldest group not wholly handed out, or what comes next."""
        if not self._held:
            self._opened.clear()
            return self._next
        number = next(iter(self._held))
        # of several groups that begin there all but the last are without trajectories
        position = bisect_right(self._opened, number, key=lambda opened: opened.first_arrival) - 1
        del self._opened[:position]
        return self._opened[0]

    def _state(self, oldest: _Opened) -> ResumeState:
        """Where the input stands now, between two windows."""
        return ResumeState(
            pass_number=oldest.pass_number, place=oldest.place, first_arrival=oldest.first_arrival,
            planned_through=self._arrival, done=ranges_between(oldest.first_arrival, self._arrival, self._held),
            dropped=self.planner.dropped, empty=self.planner.skipped_empty, seed=self._begun_at.seed,
        )  # fmt: skip

    def _refuse_pass(self, pass_number: int) -> NoReturn:
        raise TrajectoryError(
            f"pass {pass_number} over the input has nothing to train: {self.planner.dropped} trajectories "
            f"dropped as over-long, {self.planner.skipped_empty} empty; check the input or raise tokens"
        )


def _batch_from(item: Item, pass_number: int) -> Cursor:
    """The first batch that ``item`` leaves open."""
    if isinstance(item, Admitted):
        return pass_number, item.group.batch_index
    if isinstance(item, BatchEnd):
        return pass_number, item.batch_index + 1
    return pass_number + 1, 0

"""In which order groups are trained: as they come, or batch by batch. Pure; one object per pass over the input.

The order is a function of what is put in, in which order, and of nothing else: not of how fast it is taken out. That is
why a replay gives the same order again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from shmstage.errors import TrajectoryError
from shmstage.orchestrator.arrivals import DescribedGroup
from shmstage.orchestrator.resume import Place

Order = Literal["arrival", "prompt_batch"]
#: how many groups a batch will have, if that is known
Expected = Callable[[int], int | None]


@final
@dataclass(frozen=True, slots=True)
class Admitted:
    """A group whose turn it is; ``place``: begin reading there to get it as the first one again."""

    group: DescribedGroup
    place: Place


@final
@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Nothing more of batch ``batch_index`` is expected; its window can be closed.

    ``place``: begin reading there to get whatever has its turn next as the first one.
    """

    batch_index: int
    place: Place


@final
@dataclass(frozen=True, slots=True)
class PassEnd:
    """The source has nothing more for this pass; ``place``: begin reading there to find just that again."""

    place: Place


Item = Admitted | BatchEnd | PassEnd


@final
@dataclass(frozen=True, slots=True)
class _Held:
    group: DescribedGroup
    before: Place  # as it was when the group came; `skip` is not set


@final
class BatchOrder:
    """``prompt_batch``: whole batches in rising order, within a batch as they come.

    The batch being served is passed when it has as many groups as expected (``expected``, ``expect``), when the source
    is at a batch two ahead of it, or at the end of the pass. What it lacks then are holes. A group that comes after its
    batch was passed is late: its turn is at once, because nothing is ever dropped.

    Attributes: ``serving`` (the batch whose groups have their turn as they come), ``late`` (how many came late).
    """

    def __init__(self, order: Order, place: Place | None = None, expected: Expected | None = None) -> None:
        place = place or Place()
        self.order = order
        self.serving = place.serving
        self.late = 0
        self._number = place.cursor
        self._skip = place.skip
        self._expected_of = expected
        self._expected: dict[int, int] = {}
        self._known = {place.serving + i: count for i, count in enumerate(place.seen) if count}
        self._highest = max(self._known, default=place.serving - 1)
        # groups of batch `serving + 1`, which is as far ahead as a source can be
        self._ahead: list[_Held] = []
        # numbers of groups admitted although an earlier one still waits, to count what a replay admits again
        self._overtaken: list[int] = []

    @property
    def ahead(self) -> int:
        """Groups that came and whose turn it is not."""
        return len(self._ahead)

    def put(self, group: DescribedGroup) -> list[Item]:
        """The source gives ``group``; returns what has its turn now, in order."""
        batch = group.batch_index
        out = self.approach(batch)
        held = _Held(group, self._before())
        self._number += 1
        if self.order == "arrival":
            return self._admitted(held, self._ahead)
        if batch >= self.serving:
            self._count(batch, 1)
        if batch > self.serving:
            self._ahead.append(held)
        else:
            self.late += batch < self.serving
            out += self._admitted(held, self._ahead)
        return out + self._pass_complete()

    def approach(self, batch: int) -> list[Item]:
        """The source is at ``batch``: whatever lies more than one batch before it is passed."""
        if self.order == "arrival" or batch <= self.serving + 1:
            return []
        return self._pass_to(batch - 1)

    def expect(self, batch: int, groups: int) -> list[Item]:
        """Batch ``batch`` will have ``groups`` groups. Of a batch that was passed already it changes nothing."""
        if groups < 0:
            raise TrajectoryError(f"batch {batch}: {groups} groups expected; give at least 0")
        if self.order == "arrival" or batch < self.serving:
            return []
        self._expected[batch] = groups
        self._highest = max(self._highest, batch)
        return self._pass_complete()

    def hole(self, batch: int, groups: int = 1) -> list[Item]:
        """So many expected groups of ``batch`` will never come."""
        if groups < 1:
            raise TrajectoryError(f"batch {batch}: {groups} holes; give at least 1")
        if self.order == "arrival" or batch < self.serving:
            return []
        self._count(batch, groups)
        return self._pass_complete()

    def end(self) -> list[Item]:
        """The pass ends: everything has its turn."""
        out: list[Item] = []
        if self._ahead:
            out = self._pass_to(self.serving + 1)
        out.append(PassEnd(self._before()))
        return out

    # --- how a batch is passed ----------------------------------------------------------------------------

    def _count(self, batch: int, groups: int) -> None:
        self._known[batch] = self._known.get(batch, 0) + groups
        self._highest = max(self._highest, batch)

    def _pass_complete(self) -> list[Item]:
        out: list[Item] = []
        # no further than anything is known of: a source may expect 0 groups of every batch there could be
        while self.serving <= self._highest:
            expected = self._expected.get(self.serving)
            if expected is None and self._expected_of is not None:
                expected = self._expected_of(self.serving)
            if expected is None or self._known.get(self.serving, 0) < expected:
                break
            out += self._pass_to(self.serving + 1)
        return out

    def _pass_to(self, serving: int) -> list[Item]:
        passed, self.serving = self.serving, serving
        for table in (self._known, self._expected):
            for batch in [batch for batch in table if batch < serving]:
                del table[batch]
        turn, self._ahead = self._ahead, []
        out: list[Item] = [BatchEnd(passed, self._counted(turn[0].before if turn else self._before()))]
        for position, held in enumerate(turn):
            out += self._admitted(held, turn[position + 1 : position + 2])
        if turn and serving > passed + 1:
            out.append(BatchEnd(passed + 1, self._counted(self._before())))
        return out

    # --- where to begin again -----------------------------------------------------------------------------

    def _seen(self) -> tuple[int, int]:
        return self._known.get(self.serving, 0), self._known.get(self.serving + 1, 0)

    def _before(self) -> Place:
        """The place before the group that comes next; how much of it is done is not counted yet."""
        if self.order == "arrival":
            return Place(self._number)
        return Place(self._number, self.serving, self._seen())

    def _admitted(self, held: _Held, waiting: list[_Held]) -> list[Item]:
        """``waiting``: groups not admitted yet, the one that came first at the front."""
        came_first = min((held, *waiting[:1]), key=lambda each: each.before.cursor)
        place = self._counted(came_first.before)
        self._overtaken.append(held.before.cursor)
        if self._skip:
            self._skip -= 1
            return []
        return [Admitted(held.group, place)]

    def _counted(self, place: Place) -> Place:
        self._overtaken = [number for number in self._overtaken if number >= place.cursor]
        return Place(place.cursor, place.serving, place.seen, len(self._overtaken))

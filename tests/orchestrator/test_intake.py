"""The intake hands out every trajectory once per pass, in an order that depends on the input alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from shmstage.errors import TrajectoryError
from shmstage.orchestrator.intake import Intake
from shmstage.packing.plan import PlanSettings
from shmstage.packing.source import Group
from shmstage.packing.trajectory import Trajectory


def trajectory(name: str, length: int, batch: int) -> Trajectory:
    ones = np.ones(length, np.float32)
    return Trajectory(
        trajectory_id=name, group_id=name, batch_index=batch, tokens=np.arange(length, dtype=np.int32),
        loss_mask=ones, advantages=ones, old_logprobs=-ones,
    )  # fmt: skip


class Lengths:
    replayable = True

    def __init__(self, lengths: list[int], per_batch: int = 5) -> None:
        self._all = [trajectory(f"t{i}", n, i // per_batch) for i, n in enumerate(lengths)]

    def groups(self, cursor: int) -> Iterator[Group]:
        for item in self._all[cursor:]:
            yield Group(item.group_id, item.batch_index, (item,))


LENGTHS = [3, 7, 2, 8, 5, 5, 1, 6, 4, 4, 8, 2, 3]


def ids(planned: object) -> list[tuple[int, str]]:
    return [(a.pass_number, a.trajectory.trajectory_id) for a in planned.arrivals.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_every_trajectory_comes_exactly_once_per_pass(passes: int) -> None:
    """P4"""
    intake = Intake(Lengths(LENGTHS), PlanSettings(rows=2, tokens=8), passes=passes)
    seen = Counter(each for planned in intake for each in ids(planned))
    assert seen == {(p, f"t{i}"): 1 for p in range(1, passes + 1) for i in range(len(LENGTHS))}
    assert intake.planner.leftovers == ()


def test_without_a_number_of_passes_the_input_repeats() -> None:
    intake = Intake(Lengths(LENGTHS), PlanSettings(rows=2, tokens=8), passes=None)
    seen = Counter(each for planned in islice(intake, 30) for each in ids(planned))
    assert max(seen.values()) == 1
    assert max(p for p, _ in seen) > 3


def test_beginning_again_gives_the_same_stream() -> None:
    streams = [
        [ids(planned) for planned in Intake(Lengths(LENGTHS), PlanSettings(rows=2, tokens=8), passes=3)]
        for _ in range(2)
    ]
    assert streams[0] == streams[1]


@pytest.mark.parametrize("passes", [1, None])
def test_input_with_nothing_to_train_is_an_error_not_an_endless_loop(passes: int | None) -> None:
    settings = PlanSettings(rows=2, tokens=4, on_overlong="drop")
    with pytest.raises(TrajectoryError, match="nothing to train: 2 trajectories dropped"):
        list(Intake(Lengths([5, 6]), settings, passes=passes))


def test_dropped_trajectories_are_counted_and_not_held() -> None:
    """P2"""
    intake = Intake(Lengths([5, 2, 9, 2]), PlanSettings(rows=1, tokens=4, on_overlong="drop"), passes=1)
    assert [each for planned in intake for each in ids(planned)] == [(1, "t1"), (1, "t3")]
    assert (intake.planner.dropped, intake.planner.leftovers) == (2, ())

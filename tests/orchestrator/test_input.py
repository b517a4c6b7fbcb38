"""Looking at the first trajectory costs nothing; what a live source cannot do is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_intake import trajectory

from shmstage.errors import SettingsError, TrajectoryError
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.session import _check_same_plan, plan_facts
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group
from shmstage.settings import Settings


class Live:
    """Gives each group once, whoever asks."""

    replayable = False

    def __init__(self, count: int) -> None:
        filled = [Group(f"g{i}", 0, (trajectory(f"t{i}", 4, 0),)) for i in range(count)]
        self._left = iter([Group("empty", 0, ()), *filled])

    def groups(self, cursor: int) -> Iterator[Group]:
        yield from self._left


def test_a_live_source_loses_nothing_to_the_look_at_its_first_trajectory() -> None:
    source = Input(Live(9), Settings())
    assert source.first.trajectory_id == "t0"
    intake = Intake(source, PlanSettings(rows=2, tokens=8), passes=source.passes)
    trained = [a.trajectory.trajectory_id for planned in intake for a in planned.arrivals.values()]
    assert sorted(trained) == [f"t{i}" for i in range(9)]


def test_a_source_that_cannot_be_replayed_is_run_over_once_and_never_resumed() -> None:
    assert Input(Live(1), Settings()).passes == 1
    with pytest.raises(SettingsError, match="passes = 2"):
        Input(Live(1), Settings(passes=2))
    with pytest.raises(SettingsError, match="resume"):
        Input(Live(1), Settings(resume=True))


def test_an_empty_input_is_an_error() -> None:
    with pytest.raises(TrajectoryError, match="no trajectory"):
        Input(Live(0), Settings())


@pytest.mark.parametrize("change", [{"microbatches_per_step": 1}, {"rows": 5}, {"tokens": 99}, {"segment_align": 8}])
def test_resuming_with_another_plan_is_refused_by_name(change: dict[str, int]) -> None:
    first = trajectory("a", 5, 0)
    then = plan_facts(Settings(), first)
    _check_same_plan(then, plan_facts(Settings(steps=99), first))
    with pytest.raises(SettingsError, match=f"resume: {next(iter(change))} was"):
        _check_same_plan(then, plan_facts(Settings(**change), first))  # type: ignore[arg-type]


def test_resuming_with_another_input_is_refused() -> None:
    then = plan_facts(Settings(), trajectory("a", 5, 0))
    with pytest.raises(SettingsError, match="first_trajectory"):
        _check_same_plan(then, plan_facts(Settings(), trajectory("a", 6, 0)))

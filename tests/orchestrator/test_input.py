"""Looking at the first trajectory costs nothing; a live source is trained exactly once, whatever dies."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from input_making import Given, group_lists, plan_settings
from test_intake import trajectory
from test_resume import facts, orders

from shmstage.errors import PluginError, SettingsError, TrajectoryError
from shmstage.orchestrator.batch_order import Order
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.layouts import Layouts
from shmstage.orchestrator.resume import ResumeState
from shmstage.orchestrator.session import _check_same_plan, check_engine_can, plan_facts
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group
from shmstage.settings import Settings


class Live:
    """Gives each group once, whoever asks; a new process asks for those not handed over."""

    replayable = False

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.cursors: list[int] = []

    def groups(self, cursor: int) -> Iterator[Group]:
        self.cursors.append(cursor)
        yield from self._groups[cursor:]


def filled(count: int) -> list[Group]:
    return [Group("empty", 0, ()), *(Group(f"g{i}", 0, (trajectory(f"t{i}", 4, 0),)) for i in range(count))]


def test_a_live_source_loses_nothing_to_the_look_at_its_first_trajectory(tmp_path: Path) -> None:
    live = Live(filled(9))
    source = Input(live, Settings(out=tmp_path))
    assert source.first.trajectory_id == "t0"
    intake = Intake(source, PlanSettings(rows=2, tokens=8), passes=source.passes)
    trained = [a.trajectory.trajectory_id for planned in intake for a in planned.arrivals.values()]
    assert sorted(trained) == [f"t{i}" for i in range(9)]
    assert live.cursors == [0]
    source.close()


def test_a_replayable_source_is_not_journaled_and_can_be_begun_anywhere(tmp_path: Path) -> None:
    source = Input(Given(filled(9)), Settings(out=tmp_path))
    assert source.source_is_replayable
    for cursor in (5, 0, 5):
        assert [group.group_id for group in source.groups(cursor)] == [g.group_id for g in filled(9)[cursor:]]
    source.release(5)
    source.close()
    assert not list(tmp_path.iterdir())


def test_a_source_that_cannot_be_replayed_is_run_over_once(tmp_path: Path) -> None:
    source = Input(Live(filled(1)), Settings(out=tmp_path))
    assert source.passes == 1
    source.close()
    with pytest.raises(SettingsError, match="passes = 2"):
        Input(Live(filled(1)), Settings(out=tmp_path, passes=2))


@pytest.mark.slow
@settings(max_examples=120, derandomize=True, database=None, deadline=None)
@given(group_lists(), plan_settings, orders, st.data())
def test_a_live_source_is_trained_exactly_once_over_any_deaths(
    groups: list[Group], chosen: PlanSettings, order: Order, data: st.DataObject
) -> None:
    """P4: trained is what a restored checkpoint covers and what came after the last one; multisets are compared."""
    undisturbed = [facts(planned) for planned in Intake(Given(groups), chosen, passes=1, order=order)]
    with tempfile.TemporaryDirectory() as out:
        trained: list[tuple[Any, ...]] = []
        durable, states = 0, [ResumeState.start()]
        source = Input(Live(groups), Settings(out=Path(out)))
        for _ in range(data.draw(st.integers(1, 4))):
            if data.draw(st.booleans(), label="a new process"):
                source.close()
                source = Input(Live(groups), Settings(out=Path(out)))
                assert source.first.trajectory_id == groups[0].trajectories[0].trajectory_id
            del trained[durable:], states[durable + 1 :]
            intake = Intake(source, chosen, passes=1, order=order, resume=states[durable])
            reader = intake.read_ahead() if data.draw(st.booleans(), label="read ahead") else None
            for planned in islice(intake, data.draw(st.integers(0, 6), label="dies after")):
                trained.append(facts(planned))
                states.append(planned.state_after)
                if data.draw(st.booleans(), label="durable"):
                    durable = len(trained)
                    intake.release(planned.state_after.cursor)
            if reader is not None:
                reader.close()
        del trained[durable:]
        trained += [facts(p) for p in Intake(source, chosen, passes=1, order=order, resume=states[durable])]
        source.close()
    assert trained == undisturbed


def test_an_empty_input_is_an_error(tmp_path: Path) -> None:
    for source in (Live(filled(0)), Given(filled(0))):
        with pytest.raises(TrajectoryError, match="no trajectory"):
            Input(source, Settings(out=tmp_path))


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


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (Settings(recompute_old_logps=True, reference_logps=True), "per_token_logps"),
        (Settings(eval_every=2, eval_bundle=Path("b")), "eval_step"),
    ],
)
def test_a_setting_that_needs_what_the_engine_cannot_do_is_refused_before_anything_is_trained(
    settings: Settings, missing: str
) -> None:
    both = ["eval_step", "per_token_logps"]
    layouts = Layouts(microbatch_layout(2, 8), None)
    check_engine_can(settings, both, layouts)
    with pytest.raises(PluginError, match=f"has no {missing}; give it one"):
        check_engine_can(settings, [name for name in both if name != missing], layouts)
    check_engine_can(Settings(), [], layouts)


def test_another_order_is_another_plan() -> None:
    first = trajectory("a", 5, 0)
    with pytest.raises(SettingsError, match="order was 'arrival'"):
        _check_same_plan(plan_facts(Settings(), first), plan_facts(Settings(order="prompt_batch"), first))

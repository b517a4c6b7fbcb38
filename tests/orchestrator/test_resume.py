"""Behind every micro-batch a new intake goes on exactly where the old one stood; a state says so or is refused."""

from __future__ import annotations

import json
import stat
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from input_making import Given, Sized, group_lists, make_group, plan_settings

from shmstage.errors import CheckpointError
from shmstage.orchestrator.batch_order import Order
from shmstage.orchestrator.intake import Intake, Planned
from shmstage.orchestrator.resume import (
    INLINE_NBYTES,
    Place,
    ResumeState,
    ranges_between,
    state_from_metadata,
    state_to_metadata,
)
from shmstage.packing.fill import microbatch_digest
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Group
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import Request

MANY = settings(max_examples=150, derandomize=True, database=None, deadline=None)
orders = st.sampled_from(["arrival", "prompt_batch"])


def facts(planned: Planned) -> tuple[Any, ...]:
    """All that must be the same: the plan with its arrival numbers, ids, passes, content, and the state behind it."""
    trajectories = {number: arrival.trajectory for number, arrival in planned.arrivals.items()}
    named = [(number, a.pass_number, a.trajectory.trajectory_id) for number, a in planned.arrivals.items()]
    return planned.plan, named, microbatch_digest(planned.plan, trajectories), planned.state_after


def through_json(state: ResumeState) -> ResumeState:
    return ResumeState.from_wire(json.loads(json.dumps(state.to_wire())))


def check_every_resume(groups: list[Group], chosen: PlanSettings, passes: int, order: Order, kind: type[Given]) -> int:
    whole = Intake(kind(groups), chosen, passes=passes, order=order)
    undisturbed = [facts(planned) for planned in whole]
    for number, (*_, state) in enumerate(undisturbed):
        source = kind(groups)
        resumed = Intake(source, chosen, passes=passes, order=order, resume=through_json(state))
        assert [facts(planned) for planned in resumed] == undisturbed[number + 1 :]
        assert source.cursors[0] == state.cursor
        assert (resumed.planner.dropped, resumed.planner.skipped_empty) == (
            whole.planner.dropped,
            whole.planner.skipped_empty,
        )
    return len(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Given, Sized])
@MANY
@given(group_lists(), plan_settings, st.integers(1, 3), orders)
def test_an_intake_begun_behind_any_microbatch_gives_exactly_the_others(
    kind: type[Given], groups: list[Group], chosen: PlanSettings, passes: int, order: Order
) -> None:
    check_every_resume(groups, chosen, passes, order, kind)


def test_what_was_planned_together_is_planned_together_again() -> None:
    """A window that was closed before the one being handed out must not be planned again without it.

    First-fit is not monotone: what is left of an old window may need more rows than the whole of it did.
    """
    groups = [make_group(0, 0, [6]), make_group(1, 1, [12])]
    chosen = PlanSettings(rows=1, tokens=12)
    apart = Intake(Given(groups), chosen, passes=1)
    together = Intake(Given(groups), chosen, passes=1, resume=ResumeState(planned_through=2))
    assert [p.plan.arrivals for p in apart] == [(0,), (1,)]
    assert [p.plan.arrivals for p in together] == [(1,), (0,)]


def test_counters_and_arrival_numbers_are_carried_on() -> None:
    groups = [make_group(0, 0, [5, 0, 13]), make_group(1, 1, [12, 12, 99]), make_group(2, 2, [0, 3])]
    chosen = PlanSettings(rows=1, tokens=12, on_overlong="drop")
    whole = Intake(Given(groups), chosen, passes=2)
    *_, last = list(whole)
    assert (whole.planner.dropped, whole.planner.skipped_empty) == (4, 4)
    assert (last.state_after.dropped, last.state_after.empty) == (4, 4)
    assert last.state_after.first_arrival == 16
    beyond = Intake(Given(groups), chosen, passes=3, resume=last.state_after)
    assert min(min(p.plan.arrivals) for p in beyond) == 16
    assert (beyond.planner.dropped, beyond.planner.skipped_empty) == (6, 6)


def test_the_multiset_of_trained_trajectories_is_whole_over_a_resume_in_the_middle() -> None:
    """P4: with a leftover that overflowed a row in the state."""
    groups = [make_group(i, i // 3, [7, 6, 1 + i % 5]) for i in range(9)]
    chosen = PlanSettings(rows=2, tokens=12)
    first = list(islice(Intake(Given(groups), chosen, passes=2), 5))
    state = through_json(first[-1].state_after)
    assert state.done, "a leftover was meant to be in it"
    rest = Intake(Given(groups), chosen, passes=2, resume=state)
    trained = Counter((a.pass_number, a.trajectory.trajectory_id) for p in (*first, *rest) for a in p.arrivals.values())
    assert trained == Counter((p, t.trajectory_id) for p in (1, 2) for group in groups for t in group.trajectories)


def test_a_seed_goes_through_every_state() -> None:
    state = ResumeState.start(seed=7)
    intake = Intake(Given([make_group(0, 0, [3])]), PlanSettings(rows=1, tokens=12), passes=1, resume=state)
    assert [planned.state_after.seed for planned in intake] == [7]


# --- on the wire and on disk ----------------------------------------------------------------------------------

SOME = ResumeState(
    pass_number=2, place=Place(5, 3, (1, 2), 1), first_arrival=40, planned_through=60, done=((40, 42), (50, 60)),
    dropped=1, empty=2, seed=3,
)  # fmt: skip


def test_a_state_survives_json_and_msgpack() -> None:
    assert through_json(SOME) == SOME
    message = Request(1, 1, 1, "save_checkpoint", {"step": 1, "metadata": {"step": 1, "state": SOME.to_wire()}})
    assert ResumeState.from_wire(decode(encode(message)).arguments["metadata"]["state"]) == SOME  # type: ignore[union-attr]


@pytest.mark.slow
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
@given(st.data())
def test_nonsense_is_refused_by_name_and_never_crashes(data: st.DataObject) -> None:
    wire = SOME.to_wire()
    key = data.draw(st.sampled_from(sorted(wire)))
    odd = st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.integers(),
                    st.lists(st.one_of(st.integers(-2, 70), st.text(max_size=2)), max_size=6))  # fmt: skip
    bad = {**wire, key: data.draw(odd)}
    try:
        state = ResumeState.from_wire(bad)
    except CheckpointError as error:
        assert "another --out" in str(error)
    else:
        assert state.to_wire() == bad


@pytest.mark.parametrize(
    "bad",
    [
        None, [], {}, {**SOME.to_wire(), "more": 1}, {**SOME.to_wire(), "state": 2}, {**SOME.to_wire(), "pass": 0},
        {**SOME.to_wire(), "done": [40]}, {**SOME.to_wire(), "done": [39, 42]}, {**SOME.to_wire(), "done": [50, 61]},
        {**SOME.to_wire(), "done": [40, 42, 42, 50]}, {**SOME.to_wire(), "done": [42, 40]},
        {**SOME.to_wire(), "place": [1, 2, 3]}, {**SOME.to_wire(), "dropped": -1}, {**SOME.to_wire(), "seed": True},
        {**SOME.to_wire(), "first_arrival": 61, "done": []},
    ],
)  # fmt: skip
def test_an_impossible_state_is_refused(bad: object) -> None:
    with pytest.raises(CheckpointError, match=r"resume: .* wants .*another --out"):
        ResumeState.from_wire(bad)


def test_ranges_hold_everything_but_what_is_missing() -> None:
    assert ranges_between(3, 9, [3, 5, 6, 8]) == ((4, 5), (7, 8))
    assert ranges_between(3, 9, []) == ((3, 9),)
    assert ranges_between(3, 3, []) == ()


def huge() -> ResumeState:
    done = tuple((2 * i, 2 * i + 1) for i in range(60_000))
    return ResumeState(planned_through=120_000, done=done)


def test_a_small_state_travels_in_the_metadata_and_a_large_one_beside_it(tmp_path: Path) -> None:
    metadata = json.loads(json.dumps({"step": 4, **state_to_metadata(SOME, tmp_path, 4)}))
    assert state_from_metadata(metadata, tmp_path) == SOME
    assert not list(tmp_path.iterdir())
    metadata = {"step": 4, **state_to_metadata(huge(), tmp_path, 4)}
    assert len(json.dumps(metadata)) < 500
    (file,) = (tmp_path / "state").iterdir()
    assert file.name == "4.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size > INLINE_NBYTES
    assert state_from_metadata(metadata, tmp_path) == huge()
    # the same step saved once more, by a later attempt
    assert state_to_metadata(huge(), tmp_path, 4) == {"state": metadata["state"]}


def test_a_state_file_that_is_altered_or_gone_is_refused(tmp_path: Path) -> None:
    metadata = state_to_metadata(huge(), tmp_path, 4)
    file = tmp_path / "state" / "4.json"
    text = file.read_bytes()
    file.write_bytes(text.replace(b'"dropped":0', b'"dropped":1'))
    with pytest.raises(CheckpointError, match="sha256 of"):
        state_from_metadata(metadata, tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        state_from_metadata(metadata, tmp_path)
    for name in ("../x.json", "state/../../x.json", "state/-1.json", "state/٣.json", 4, None):
        with pytest.raises(CheckpointError, match="wants state/<step>.json"):
            state_from_metadata({"state": {"file": name, "sha256": ""}}, tmp_path)


def test_a_checkpoint_from_before_there_was_a_state_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 does not say.*another --out"):
        state_from_metadata({"step": 3, "plan": {}}, tmp_path)


def test_a_state_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        state_to_metadata(huge(), tmp_path, 4)

"""Legs partition the idle to the nanosecond, and each is blamed for what it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import MS, Made, Plan, made

from shmstage.timeline.boundaries import Boundary, boundaries_of
from shmstage.timeline.intervals import Interval, length_ns, union
from shmstage.timeline.legs import LEGS, Leg, legs_of, partition
from shmstage.timeline.microbatches import attempts_of

MODES = ("serial", "pipelined", "staged_after_update", "staged_before_update")


def boundaries(run: Made) -> list[Boundary]:
    return [b for attempt in attempts_of(run.processes()) for b in boundaries_of(attempt)]


def legs_in(plan: Plan, step: int = 3) -> dict[str, int]:
    """Idle by leg of the boundary before ``step``, those with any."""
    boundary = next(b for b in boundaries(made(plan)) if b.after.step == step)
    return {leg: ns for leg, ns in legs_of(boundary).idle_ns.items() if ns}


INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)
CAUSES = st.lists(st.tuples(st.sampled_from(LEGS), INTERVALS), max_size=6)


@given(INTERVALS, CAUSES)
def test_a_partition_covers_the_idle_once_and_blames_the_first(
    idle: list[Interval], causes: list[tuple[Leg, list[Interval]]]
) -> None:
    segments = partition(idle, causes)
    waited = {t for begin, end in idle for t in range(begin, end)}
    blamed = [(t, s.leg) for s in segments for t in range(s.begin, s.end)]
    assert len(blamed) == len(waited) and {t for t, _ in blamed} == waited
    for t, leg in blamed:
        first = next((name for name, intervals in causes if any(b <= t < e for b, e in intervals)), "control")
        assert leg == first


PLANS = st.builds(
    Plan,
    mode=st.sampled_from(MODES),
    steps=st.just(4),
    microbatches=st.integers(1, 4),
    microbatch=st.integers(1, 90).map(lambda n: n * MS),
    update=st.integers(1, 40).map(lambda n: n * MS),
    upload=st.integers(1, 200).map(lambda n: n * MS),
    pack=st.integers(0, 50).map(lambda n: n * MS + 1),
    data_wait=st.sampled_from([0, 30 * MS]),
    bookkeeping=st.integers(0, 90).map(lambda n: n * MS + 1),
    copy=st.integers(1, 120).map(lambda n: n * MS),
    scoring=st.sampled_from([0, 15 * MS]),
    patch=st.sampled_from([0, 4 * MS]),
    checkpoint_every=st.integers(0, 2),
    jitter=st.sampled_from([0.0, 0.4]),
    seed=st.integers(1, 99),
)


@pytest.mark.slow
@given(PLANS)
def test_legs_of_any_boundary_add_up_to_its_idle(plan: Plan) -> None:
    run = made(plan)
    found = boundaries(run)
    assert len(found) == plan.steps - 1
    for boundary in found:
        legs = legs_of(boundary)
        assert sum(legs.idle_ns.values()) == boundary.idle.idle_ns == run.truth[boundary.before.step]
        assert union((s.begin, s.end) for s in legs.segments) == union(
            (*boundary.idle.before_update, *boundary.idle.after_update)
        )
        assert all(legs.idle_ns[leg] <= legs.whole_ns[leg] for leg in LEGS if leg not in ("update", "placement"))
        assert length_ns((s.begin, s.end) for s in legs.segments) == boundary.idle.idle_ns


def test_a_serial_boundary_goes_where_the_plan_says() -> None:
    plan = Plan(mode="serial")
    assert legs_in(plan) == {
        "placement": plan.upload,
        "snapshots": 2 * plan.snapshot_call,
        "transfer": plan.trip,
        "packing": plan.slot_wait + plan.pack,
        "bookkeeping": plan.bookkeeping,
        # five replies and calls, and what lies between begin of a call, upload and dispatch
        "control": 5 * plan.trip + 21_000,
    }


def test_a_staged_boundary_hides_its_legs() -> None:
    boundary = boundaries(made(Plan(mode="staged_before_update")))[1]
    legs = legs_of(boundary)
    assert legs.segments == ()
    plan = Plan()
    assert legs.whole_ns["placement"] == plan.upload
    assert legs.whole_ns["packing"] == plan.slot_wait + plan.pack
    assert legs.whole_ns["update"] == plan.update


def test_an_upload_that_outlasts_the_step_is_placement() -> None:
    plan = Plan(mode="staged_before_update", upload=200 * MS)
    assert legs_in(plan) == {"placement": plan.upload - plan.microbatch - plan.update}


def test_waiting_for_input_is_its_own_leg() -> None:
    assert legs_in(Plan(mode="serial", data_wait=70 * MS))["input"] == 70 * MS


def test_late_fields_are_placement_and_the_call_around_scoring_is_scoring() -> None:
    plan = Plan(mode="staged_before_update", scoring=9 * MS, patch=3 * MS)
    legs = legs_in(plan)
    assert legs["placement"] == plan.patch
    assert legs["scoring"] == MS // 2, "the devices scored meanwhile: only the call's own time is idle"


def test_a_first_microbatch_that_begins_late_without_a_reason_is_the_devices() -> None:
    run = made(Plan(mode="staged_before_update"))
    late = [replace(e, t=e.t + 7 * MS) if (e.event, e.step, e.index) == ("ready", 3, 0) else e for e in run.events]
    boundary = next(b for b in boundaries(Made(run.plan, late)) if b.after.step == 3)
    assert {leg: ns for leg, ns in legs_of(boundary).idle_ns.items() if ns} == {"device": 7 * MS}


def late_update(by: int, **ticket: object) -> dict[str, int]:
    """Legs of a boundary whose deferred update is dispatched ``by`` after L's end, all of it in the update's call."""
    run = made(Plan(mode="staged_before_update", steps=4))
    boundary = next(b for b in boundaries(run) if b.after.step == 3)
    at = boundary.at
    shift = at.last_finished + by - at.update_dispatched
    events = []
    for e in run.events:
        of_update = e.event == "landed" or e.figures.get("kind") == "update"
        if e.t >= at.update_dispatched and (e.step > 2 or (e.step == 2 and of_update)):
            e = replace(e, t=e.t + shift, end=e.end + shift if e.end else 0)
        elif e.step == 2 and e.figures.get("command") == "apply_deferred_update" and e.end:
            e = replace(e, end=e.end + shift)
        elif ticket and e.event == "ticketed" and e.step == 1:
            e = replace(e, end=at.last_finished + by - 2 * MS)
        events.append(e)
    moved = next(b for b in boundaries(Made(run.plan, events)) if b.after.step == 3)
    assert moved.at.update_dispatched == at.last_finished + by
    return {leg: ns for leg, ns in legs_of(moved).idle_ns.items() if ns}


def test_a_wait_inside_the_updates_call_is_the_updates() -> None:
    assert late_update(20 * MS)["update"] >= 20 * MS


def test_a_copy_that_the_update_waits_for_is_of_the_snapshots() -> None:
    legs = late_update(20 * MS, waits=True)
    assert legs["snapshots"] >= 18 * MS
    assert legs["update"] <= 3 * MS


def test_without_the_trainers_calls_the_upload_stands_for_the_staging_call() -> None:
    run = made(Plan(mode="serial"))
    left = Made(run.plan, [e for e in run.events if e.event not in ("executed", "called", "received")])
    boundary = next(b for b in boundaries(left) if b.after.step == 3)
    legs = legs_of(boundary)
    assert sum(legs.idle_ns.values()) == run.truth[2]
    assert legs.idle_ns["placement"] == run.plan.upload and legs.idle_ns["bookkeeping"] == run.plan.bookkeeping

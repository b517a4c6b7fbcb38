"""The idle estimators give what a device with exact stamps would say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Plan, made

from shmstage.timeline.boundaries import attempts_of_steps, boundaries_of, step_of_line
from shmstage.timeline.idle import (
    BoundaryInstants,
    boundary_idle,
    boundary_idle_s,
    calibrated_microbatch_s,
)
from shmstage.timeline.intervals import intersection, length_ns, union
from shmstage.timeline.microbatches import attempts_of

MS = 1_000_000
#: L done at 100, update runs 100..115, F was dispatched at 90 and runs 115..215: the device never waits
SEAMLESS = BoundaryInstants(
    last_finished=100 * MS, update_dispatched=95 * MS, update_landed=115 * MS, first_dispatched=96 * MS,
    first_staged_ready=60 * MS, first_ready=215 * MS,
)  # fmt: skip


def test_a_seamless_boundary_has_no_idle() -> None:
    assert boundary_idle_s(SEAMLESS, 0.1) == 0.0


def test_late_dispatch_of_the_first_microbatch_is_idle() -> None:
    late = replace(SEAMLESS, first_dispatched=120 * MS, first_ready=220 * MS)
    assert boundary_idle_s(late, 0.1) == 0.005


def test_a_late_upload_is_idle() -> None:
    late = replace(SEAMLESS, first_staged_ready=135 * MS, first_ready=235 * MS)
    assert boundary_idle_s(late, None) == 0.02


def test_a_wait_before_a_late_update_is_not_a_win() -> None:
    late = replace(
        SEAMLESS, update_dispatched=140 * MS, update_landed=155 * MS, first_dispatched=141 * MS, first_ready=255 * MS
    )
    assert boundary_idle_s(late, 0.1) == 0.04


def test_the_larger_estimator_is_reported() -> None:
    stalled = replace(SEAMLESS, first_ready=245 * MS)
    assert boundary_idle_s(stalled, None) == 0.0
    assert boundary_idle_s(stalled, 0.1) == 0.03


def test_calibration_is_the_median_of_device_times() -> None:
    assert calibrated_microbatch_s([]) is None
    intervals = [(0, 10 * MS, 20 * MS), (30 * MS, 20 * MS, 50 * MS), (40 * MS, 50 * MS, 65 * MS)]
    assert calibrated_microbatch_s(intervals) == 0.015


def test_a_first_microbatch_that_waits_for_its_late_fields_is_idle() -> None:
    patched = replace(SEAMLESS, first_patch_ready=125 * MS, first_ready=225 * MS)
    assert boundary_idle_s(patched, None) == 0.01


def test_time_in_which_the_devices_scored_or_evaluated_is_not_idle() -> None:
    late = replace(SEAMLESS, first_dispatched=155 * MS, first_ready=255 * MS)
    assert boundary_idle_s(late, 0.1) == 0.04
    windows = [(110 * MS, 125 * MS), (120 * MS, 135 * MS), (150 * MS, 200 * MS)]  # they overlap, and reach beyond
    assert boundary_idle_s(late, 0.1, windows) == 0.015


def test_late_fields_that_arrive_late_are_idle() -> None:
    assert boundary_idle_s(replace(SEAMLESS, first_patch_ready=125 * MS, first_ready=225 * MS), 0.1) == 0.01


def test_scoring_before_a_late_update_is_no_idle_either() -> None:
    late = replace(
        SEAMLESS, update_dispatched=140 * MS, update_landed=155 * MS, first_dispatched=141 * MS, first_ready=255 * MS
    )
    assert boundary_idle_s(late, 0.1, [(105 * MS, 125 * MS)]) == 0.02


def test_both_estimates_are_told_and_where_the_larger_one_lies() -> None:
    stalled = replace(SEAMLESS, first_dispatched=120 * MS, first_ready=245 * MS)
    idle = boundary_idle(stalled, 0.1)
    assert (idle.by_stamps_ns, idle.by_calibration_ns, idle.idle_ns) == (5 * MS, 30 * MS, 30 * MS)
    assert idle.after_update == ((115 * MS, 145 * MS),)
    assert (idle.explained_until, idle.first_started) == (120 * MS, 145 * MS)


NS = st.integers(1, 400)


@given(st.tuples(NS, NS, NS, NS, NS, NS, NS), st.none() | NS, st.lists(st.tuples(NS, NS), max_size=4))
def test_the_larger_estimate_is_the_idle_whatever_the_stamps_say(
    stamps: tuple[int, ...], microbatch_ns: int | None, busy: list[tuple[int, int]]
) -> None:
    at = BoundaryInstants(*stamps)
    idle = boundary_idle(at, None if microbatch_ns is None else microbatch_ns / 1e9, busy)
    assert idle.idle_ns == max(idle.by_stamps_ns, idle.by_calibration_ns or 0)
    waits = (*idle.before_update, *idle.after_update)
    assert idle.idle_ns == length_ns(union(waits)), "no wait is counted twice"
    assert not intersection(union(waits), union(busy))


TRUTH_PLANS = [
    Plan(mode=mode, **more)
    for mode in ("serial", "pipelined", "staged_after_update", "staged_before_update")
    for more in (
        {}, {"scoring": 9 * MS}, {"scoring": 9 * MS, "patch": 3 * MS}, {"microbatches": 1}, {"upload": 200 * MS},
        {"replays": frozenset({(2, 2), (3, 0), (4, 1)})}, {"jitter": 0.3}, {"data_wait": 70 * MS, "slot_wait": 9 * MS},
        {"bookkeeping": 300 * MS, "copy": 90 * MS, "checkpoint_every": 2},
    )
]  # fmt: skip


@pytest.mark.parametrize("plan", TRUTH_PLANS, ids=lambda plan: f"{plan.mode}")
def test_the_estimate_is_what_the_device_waited(plan: Plan) -> None:
    run = made(plan)
    (attempt,) = attempts_of(run.processes())
    found = {b.before.step: b.idle.idle_ns for b in boundaries_of(attempt)}
    assert found == run.truth


@pytest.mark.parametrize("plan", [p for p in TRUTH_PLANS if not p.scoring and not p.replays], ids=lambda p: p.mode)
def test_step_lines_alone_give_the_same(plan: Plan) -> None:
    run = made(plan)
    steps = [(1, step) for line in run.lines if (step := step_of_line(line)) is not None]
    (attempt,) = attempts_of_steps(steps)
    assert {b.before.step: b.idle.idle_ns for b in boundaries_of(attempt)} == run.truth


def test_a_first_microbatch_that_is_run_again_is_not_taken_for_a_late_one() -> None:
    run = made(Plan(mode="staged_before_update", replays=frozenset({(3, 0)})))
    (attempt,) = attempts_of(run.processes())
    idle = {b.after.step: b.idle for b in boundaries_of(attempt)}
    assert idle[3].by_calibration_ns == run.truth[2]

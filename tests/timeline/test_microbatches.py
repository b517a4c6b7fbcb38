"""Instants from events: whole runs, killed ones, lost events, restarts, hosts with clocks of their own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import MS, ORCHESTRATOR, Made, Plan, made

from shmstage.timeline.boundaries import boundaries_of
from shmstage.timeline.microbatches import Attempt, Spans, aligned, attempts_of
from shmstage.timeline.reading import Event, ProcessEvents


def attempt_of(run: Made) -> Attempt:
    (attempt,) = attempts_of(run.processes())
    return attempt


def test_each_microbatch_has_all_its_instants_in_order() -> None:
    attempt = attempt_of(made(Plan(mode="staged_before_update", steps=4)))
    assert sorted(attempt.steps) == [1, 2, 3, 4]
    for step in attempt.steps.values():
        for micro in step.microbatches.values():
            instants = (
                micro.slot_asked, micro.slot_acquired, micro.pack_begun, micro.packed, micro.published, micro.sent,
                micro.received, micro.upload_begun, micro.staged_ready, micro.dispatch_begun, micro.ready,
                micro.settled, micro.retired,
            )  # fmt: skip
            assert all(instants), micro
            assert micro.id == f"{micro.step}.{micro.index}@0:2"
            assert micro.sent < micro.received <= micro.upload_begun < micro.staged_ready
            assert micro.slot_acquired == micro.pack_begun < micro.packed < micro.published
        assert 0 < step.update_dispatched < step.update_returned and step.update_landed


def test_a_slot_that_was_acquired_before_it_was_known_for_what_is_found_by_its_number() -> None:
    run = made(Plan(steps=2))
    run.events = [replace(e, step=-1, index=-1, id="") if e.event == "slot_acquired" else e for e in run.events]
    first = attempt_of(run).steps[2].microbatches[0]
    assert 0 < first.slot_asked < first.slot_acquired == first.pack_begun


def test_a_replay_does_not_move_when_it_was_first_ready() -> None:
    micro = attempt_of(made(Plan(replays=frozenset({(2, 1)})))).steps[2].microbatches[1]
    assert micro.ready < micro.replay_ready == micro.finished


def test_every_restore_begins_an_attempt() -> None:
    first = made(Plan(steps=5))
    again = made(Plan(first_step=3, steps=4, begin=first.end + 50 * MS))
    attempts = attempts_of([*first.processes(1), *again.processes(2)])
    assert [(a.number, sorted(a.steps)) for a in attempts] == [(1, [1, 2, 3, 4, 5]), (2, [3, 4, 5, 6])]
    assert [{b.before.step: b.idle.idle_ns for b in boundaries_of(a)} for a in attempts] == [first.truth, again.truth]


def test_a_run_killed_at_any_moment_has_the_boundaries_that_were_over() -> None:
    run = made(Plan(mode="staged_after_update", steps=5, upload=200 * MS))
    whole = {b.after.step: b for b in boundaries_of(attempt_of(run))}
    for end in sorted(event.t for event in run.events)[5::7]:
        killed = Made(run.plan, [e for e in run.events if max(e.t, e.end) <= end])
        for attempt in attempts_of(killed.processes()):
            for boundary in boundaries_of(attempt):
                assert boundary.at == whole[boundary.after.step].at
                assert boundary.idle.by_stamps_ns == whole[boundary.after.step].idle.by_stamps_ns


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_lost_events_never_make_a_boundary_up(chance: random.Random, lost: int) -> None:
    run = made(Plan(mode="staged_before_update", steps=3))
    left = list(run.events)
    for _ in range(min(lost, len(left))):
        left.pop(chance.randrange(len(left)))
    stamps = {e.t for e in left} | {e.end for e in left}
    for attempt in attempts_of(Made(run.plan, left).processes()):
        for boundary in boundaries_of(attempt):
            at = boundary.at
            assert {at.last_finished, at.update_dispatched, at.update_landed, at.first_staged_ready} <= stamps


def test_figures_of_a_damaged_file_are_not_believed() -> None:
    run = made(Plan(steps=2))
    run.events = [replace(e, figures={**e.figures, "slot": "x", "kind": e.figures.get("kind", [])}) for e in run.events]
    assert attempt_of(run).steps[1].microbatches[0].slot == -1


def test_an_orchestrator_on_another_host_is_put_on_the_trainers_clock() -> None:
    run = made(Plan(steps=3))
    here = run.processes()
    apart = 5_000_000 * MS
    there = [p if p.process != ORCHESTRATOR else moved(p, apart) for p in here]
    assert [(e.t, e.end, e.event) for e in aligned(there)] == [(e.t, e.end, e.event) for e in aligned(here)]


def moved(process: ProcessEvents, by: int) -> ProcessEvents:
    events = [replace(e, t=e.t + by, end=e.end + by if e.end else 0) for e in process.events]
    return replace(process, wall_offset_ns=process.wall_offset_ns - by, events=events)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=12), st.integers(0, 60), st.integers(1, 40))
def test_spans_are_found_by_time(spans: list[tuple[int, int]], begin: int, length: int) -> None:
    events = [Event(t, t + lasts, "called", "control", -1, -1, "", {}) for t, lasts in spans]
    found = Spans(events).between(begin, begin + length)
    wanted = [e for e in events if e.t < begin + length and e.end > begin]
    assert sorted((e.t, e.end) for e in found) == sorted((e.t, e.end) for e in wanted)


def test_no_events_are_no_attempts() -> None:
    assert attempts_of([]) == []
    assert attempts_of([ProcessEvents("trainer", 1, 1, "r", 0)]) == []


@pytest.mark.parametrize("missing", ["landed", "ready", "staged", "dispatched"])
def test_a_boundary_that_lacks_an_instant_is_left_out(missing: str) -> None:
    run = made(Plan(steps=4))
    run.events = [e for e in run.events if not (e.event == missing and e.step == 2)]
    found = {b.after.step for b in boundaries_of(attempt_of(run))}
    assert 2 not in found or missing == "landed"
    assert 3 not in found or missing == "staged"
    assert 4 in found


@pytest.mark.parametrize("said", [["fwd_bwd"], {}, None, 7])
def test_a_figure_that_is_no_text_names_no_command(said: object) -> None:
    run = made(Plan(steps=2))
    odd = [replace(e, t=e.t + 1, figures={"command": said, "kind": said}) for e in run.events]
    run.events = [*run.events, *(e for e in odd if e.event in ("called", "received", "executed", "ticketed"))]
    step = attempt_of(run).steps[2]
    assert 0 < step.microbatches[0].sent < step.microbatches[0].received

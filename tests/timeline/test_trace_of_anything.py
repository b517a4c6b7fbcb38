"""Whatever is lost, damaged, doubled or out of order: the trace is one that the strict checker accepts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from event_schedule import MS, event, process, schedule
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmstage.events import LANES
from shmstage.testing.trace_checker import faults_of
from shmstage.timeline.clocks import on_one_axis
from shmstage.timeline.idle import BoundaryInstants, boundary_idle
from shmstage.timeline.reading import Event, ProcessEvents
from shmstage.timeline.trace import trace_events

SHORT = st.integers(0, 40)
TIMES = SHORT | st.integers(-(1 << 62), 1 << 62)
KINDS = st.sampled_from(["fwd_bwd", "replay", "update", "metrics", "eval_step", "", 3, None])
NUMBERS = st.booleans() | st.integers() | st.floats() | st.just(10**400)
JSON = st.none() | NUMBERS | st.text(max_size=4) | st.lists(st.integers(), max_size=2)


@st.composite
def events(draw: st.DrawFn) -> Event:
    t = draw(SHORT) if draw(st.integers(0, 9)) else draw(TIMES)
    end = 0 if draw(st.booleans()) else t + draw(SHORT)
    name = draw(st.sampled_from(list(LANES)) | st.text(max_size=3))
    figures: dict[str, Any] = {
        "slot": draw(st.integers(-1, 2) | JSON),
        "generation": draw(st.integers(1, 3) | JSON),
        "kind": draw(KINDS),
        "command": draw(KINDS | JSON),
        "digest": draw(st.sampled_from(["d", "e", 3])),
        "figure": draw(JSON),
    }
    kept = draw(st.sets(st.sampled_from(list(figures))))
    lane = LANES[name] if name in LANES else draw(st.sampled_from(["counters", "device", "slot 0", "", "\ud800"]))
    identity = draw(st.sampled_from(["", "0.0@0:2", "0.1@1:2", "\udc00"]))
    return Event(
        t, end, name, lane, draw(st.integers(-1, 2)), draw(st.integers(-1, 1)), identity,
        {key: value for key, value in figures.items() if key in kept},
    )  # fmt: skip


@st.composite
def processes(draw: st.DrawFn) -> list[ProcessEvents]:
    return [
        ProcessEvents(
            draw(st.sampled_from(["orchestrator", "trainer", "\ud800", ""])), draw(st.integers(0, 3)),
            draw(st.integers(0, 3)), "r", draw(st.sampled_from([0, 1, 7 * 10**18])),
            draw(st.lists(events(), max_size=25)), draw(st.integers(0, 2)), draw(st.booleans()),
        )
        for _ in range(draw(st.integers(0, 4)))
    ]  # fmt: skip


def checked(found: list[ProcessEvents]) -> None:
    text = json.dumps({"traceEvents": list(trace_events(on_one_axis(found)))}, allow_nan=False)
    assert faults_of(text) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(processes())
def test_random_events_give_a_trace_that_passes(found: list[ProcessEvents]) -> None:
    checked(found)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_that_were_killed_rotated_and_started_again_give_a_trace_that_passes(data: st.DataObject) -> None:
    found = []
    for start in range(1, data.draw(st.integers(1, 3)) + 1):
        late = data.draw(st.integers(0, 5)) * MS
        orchestrator, trainer, _ = schedule(2, 2, late_update=late, begin=(50 + 60 * start) * MS)
        for whole in (orchestrator, trainer):
            first = data.draw(st.integers(0, 20))
            last = data.draw(st.integers(first, len(whole.events)))
            lost = data.draw(st.sets(st.sampled_from(list(LANES)), max_size=4))
            left = [e for e in whole.events[first:last] if e.event not in lost]
            skew = data.draw(st.sampled_from([0, 0, 20 * MS, 3600 * 1000 * MS]))
            found.append(replace(whole, start=start, events=left, wall_offset_ns=whole.wall_offset_ns + skew))
    checked(found)


@example((0, 0, 0, 20, 0, 0, 0), None, [(0, 9), (1, 3)])
@given(st.tuples(*[SHORT] * 7), st.none() | st.integers(0, 9), st.lists(st.tuples(SHORT, SHORT), max_size=4))
def test_the_marked_windows_sum_up_to_the_idle(
    instants: tuple[int, ...], microbatch: int | None, busy: list[tuple[int, int]]
) -> None:
    at = BoundaryInstants(*instants)
    microbatch_s = None if microbatch is None else microbatch / 1e9
    idle = boundary_idle(at, microbatch_s, busy)
    windows = [*idle.before_update, *idle.after_update]
    assert all(begin < end for begin, end in windows)
    assert sum(end - begin for begin, end in windows) == idle.idle_ns


@pytest.mark.slow
def test_a_long_run_of_overlapping_spans_has_as_many_lanes_as_overlap() -> None:
    uploads = [event("staged", n, n + 50, id=f"{n}") for n in range(1, 30_000)]
    lanes = [e for e in trace_events(on_one_axis([process("trainer", uploads)])) if e["name"] == "thread_name"]
    assert len(lanes) == 50

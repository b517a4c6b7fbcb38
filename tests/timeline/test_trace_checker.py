"""The strict checker finds every kind of broken trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from event_schedule import event, process, schedule

from shmstage.testing.trace_checker import faults_of
from shmstage.timeline.clocks import on_one_axis
from shmstage.timeline.trace import trace_events

Events = list[dict[str, Any]]


def good() -> Events:
    orchestrator, trainer, _ = schedule(steps=1, microbatches=2)
    other = process("orchestrator", [event("data_wait", 90_000_000, 90_000_500)], start=2)
    return list(trace_events(on_one_axis([orchestrator, trainer, other])))


def faults(events: Events) -> list[str]:
    return faults_of(json.dumps({"traceEvents": events}))


def first(events: Events, phase: str) -> dict[str, Any]:
    return next(e for e in events if e["ph"] == phase)


def changed(phase: str, **to: Any) -> Callable[[Events], None]:
    return lambda events: first(events, phase).update(to)


def without(phase: str, key: str) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        del first(events, phase)[key]

    return change


def removed(phase: str, name: str = "") -> Callable[[Events], None]:
    return lambda events: events.remove(next(e for e in events if e["ph"] == phase and name in e["name"]))


def repeated(phase: str, name: str = "") -> Callable[[Events], None]:
    def change(events: Events) -> None:
        position = next(n for n, e in enumerate(events) if e["ph"] == phase and name in e["name"])
        events.insert(position, dict(events[position]))

    return change


def metadata_last(events: Events) -> None:
    events.append(events.pop(0))


def overlapping(events: Events) -> None:
    """A slice that begins within another and ends a nanosecond after it."""
    position = next(n for n, e in enumerate(events) if e["ph"] == "X" and e["name"].startswith("pack 0.0"))
    inner = json.loads(json.dumps(events[position]))
    inner["ts"], inner["dur"] = inner["ts"] + 0.001, inner["dur"]
    events.insert(position + 1, inner)


def within_nothing(events: Events) -> None:
    """A slice that begins where one without length is."""
    position = next(n for n, e in enumerate(events) if e["ph"] == "X")
    events.insert(position, {**events[position], "dur": 0})


def backwards(events: Events) -> None:
    timed = [n for n, e in enumerate(events) if e["ph"] == "X"]
    events[timed[0]], events[timed[-1]] = events[timed[-1]], events[timed[0]]


def elsewhere(events: Events) -> None:
    """An arrow's end that is moved to a thread on which nothing is drawn at that time."""
    threads = [e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == 3]
    next(e for e in events if e["ph"] == "f").update(pid=3, tid=threads[0])


def after_an_instant(events: Events) -> None:
    """An instant within a slice, a while before the arrow's end that is to be tied to it."""
    end = next(n for n, e in enumerate(events) if e["ph"] == "f")
    where = {"pid": events[end]["pid"], "tid": events[end]["tid"], "ts": events[end - 1]["ts"]}
    assert where["ts"] < events[end]["ts"]
    instant = {**first(events, "i"), **where}
    events.insert(end, instant)


def other_microbatch(events: Events) -> None:
    ends = [e for e in events if e["ph"] == "f"]
    ends[0]["id"], ends[1]["id"] = ends[1]["id"], ends[0]["id"]


def of_nobody(events: Events) -> None:
    for e in events:
        if e["ph"] == "X":
            e["args"].pop("id", None)


def foreign_thread(events: Events) -> None:
    threads = [e for e in events if e["name"] == "thread_name"]
    threads[-1]["tid"] = threads[0]["tid"]


def test_a_good_trace_has_no_faults() -> None:
    assert faults(good()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (overlapping, "overlaps the slice until"),
        (within_nothing, "overlaps the slice until"),
        (backwards, "comes after an event of"),
        (changed("X", dur=-0.001), "dur is no length"),
        (changed("X", dur=0.0005), "dur is no length"),
        (changed("X", dur="1"), "dur is no length"),
        (changed("X", ts=-1), "ts is no time"),
        (changed("X", ts=1.0001), "ts is no time"),
        (changed("X", ts=None), "ts is no time"),
        (changed("X", ts=1e300), "ts is no time"),
        (changed("X", name=""), "no name"),
        (changed("X", args=[]), "args are no object"),
        (changed("X", more=1), "keys of X"),
        (without("X", "args"), "keys of X"),
        (changed("X", ph="B"), "unknown phase"),
        (changed("X", ph="x"), "unknown phase"),
        (changed("X", pid=77), "process 77 has no name"),
        (changed("X", pid="1"), "pid and tid are integers"),
        (changed("X", tid=77), "thread 77 of process 1 has no name"),
        (changed("i", s="g"), "scope"),
        (changed("C", args={}), "counts nothing"),
        (changed("C", args={"value": "3"}), "counts nothing"),
        (changed("C", args={"value": True}), "counts nothing"),
        (changed("C", pid=77), "process 77 has no name"),
        (removed("s"), "has no begin"),
        (removed("f"), "has no end"),
        (repeated("s"), "a second begin"),
        (repeated("f"), "has no begin, or is over"),
        (changed("s", id="1"), "its id is no integer"),
        (changed("f", bp="x"), "not bound"),
        (without("f", "bp"), "keys of f"),
        (elsewhere, "is not around it"),
        (after_an_instant, "is not around it"),
        (other_microbatch, "leads from micro-batch"),
        (of_nobody, "of no micro-batch"),
        (removed("M", "process_name"), "process_name is missing"),
        (removed("M", "process_sort_index"), "process_sort_index is missing"),
        (removed("M", "thread_name"), "thread_name is missing"),
        (removed("M", "thread_sort_index"), "thread_sort_index is missing"),
        (repeated("M", "thread_name"), "a second thread_name"),
        (foreign_thread, "belongs to process"),
        (metadata_last, "metadata after events"),
        (changed("M", name="nonsense"), "unknown metadata"),
        (changed("M", args={"name": ""}), "args of process_name"),
        (changed("M", args={"name": 3}), "args of process_name"),
        (changed("M", pid=0), "integers from 1"),
        (changed("M", tid=5), "keys of metadata"),
    ],
)
def test_a_broken_trace_is_found(change: Callable[[Events], None], says: str) -> None:
    events = good()
    change(events)
    found = faults(events)
    assert any(says in fault for fault in found), found


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents":[],}', '{"traceEvents":[NaN]}', '{"traceEvents":[Infinity]}', "[]", "", "[" * 100_000,
        '{"traceEvents":[],"traceEvents":[]}', '{"traceEvents":[{"ph":"M","ph":"M"}]}', '{"traceEvents":["\\ud800"]}',
        '{"traceEvents":[{"name":"\\ud800"}]}', '{"traceEvents":{}}', '{"traceEvents":[1]}', "{}",
    ],
)  # fmt: skip
def test_what_is_no_strict_json_is_found(text: str) -> None:
    assert len(faults_of(text)) == 1

"""The file of raw instants: whole lines, a head per start, bounded, never in the way."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from shmstage._native import EventLog
from shmstage.events import EventWriter


def writer(path: Path, limit_nbytes: int = 1 << 20) -> EventWriter:
    return EventWriter(path, process="trainer", run="r1", start=2, limit_nbytes=limit_nbytes)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_event_is_a_line_with_its_lane_and_the_identity_of_the_handle(tmp_path: Path) -> None:
    events = writer(tmp_path / "events" / "trainer.jsonl")
    events.note("staged", 5, 9, step=3, index=0, request_id='3.0@1:4"', nbytes=64)
    events.note("executed", 10, 11, command="info", share=0.5)
    events.close()
    head, staged, executed = lines(tmp_path / "events" / "trainer.jsonl")
    assert (head["schema"], head["process"], head["start"], head["run"]) == (1, "trainer", 2, "r1")
    assert {"monotonic_ns", "wall_s", "pid"} <= head.keys()
    assert staged == {"t": 5, "end": 9, "event": "staged", "lane": "uploads", "step": 3, "index": 0,
                      "id": '3.0@1:4"', "nbytes": 64}  # fmt: skip
    assert executed == {"t": 10, "end": 11, "event": "executed", "lane": "trainer", "command": "info", "share": 0.5}


ODD: list[int | float | str] = [
    0, -1, 1 << 62, 1 << 80, -(1 << 70), True, 0.1, 1e300, float("inf"), "", 'say "so"', "back\\slash", "line\nend\0",
    "\x7f", "Grüße", "\ud800 half", "🙂", "plain",
]  # fmt: skip


def test_whatever_a_figure_or_an_identity_is_it_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    events = writer(path)
    for figure in ODD:
        events.note("called", 5, 6, request_id=figure if isinstance(figure, str) else "", command=figure)
    events.close()
    found = lines(path)[1:]
    assert [record["command"] for record in found] == ODD
    assert [record.get("id", "") for record in found] == [f if isinstance(f, str) else "" for f in ODD]


def test_a_start_after_a_kill_cuts_the_torn_line_and_adds_a_head_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_text('{"schema":1}\n{"t":5,"eve')
    writer(path).close()
    assert [record.get("schema") for record in lines(path)] == [1, 1]


def test_at_half_the_limit_the_older_half_makes_room_and_the_newest_events_are_kept(tmp_path: Path) -> None:
    path, limit = tmp_path / "trainer.jsonl", 20_000
    for _ in range(4):  # starts; a write that finds more than half of the limit begins a new file
        events = writer(path, limit)
        for number in range(200):
            events.note("retired", number + 1, buffer=number)
        events.close()
    old = path.with_suffix(".old.jsonl")
    assert old.exists()
    assert path.stat().st_size + old.stat().st_size < 2 * limit
    assert lines(old)[0]["schema"] == lines(path)[0]["schema"] == 1


def test_what_comes_faster_than_it_is_written_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmstage.events.CAPACITY_NBYTES", 1000)
    path = tmp_path / "trainer.jsonl"
    events = writer(path, 1 << 30)
    for number in range(1000):  # no other thread has the interpreter until this one waits
        events.note("retired", number + 1)
    events.close()
    records = lines(path)
    kept = sum(record.get("event") == "retired" for record in records)
    dropped = sum(int(str(record["events"])) for record in records if record.get("event") == "dropped")
    assert kept + dropped == 1000
    assert dropped > 0 < kept


def test_lines_that_wait_are_bounded_and_what_was_dropped_is_told_once() -> None:
    log = EventLog({"retired": '"event":"retired"'}, json.dumps, 100)
    for number in range(1, 11):
        log.note("retired", number)
    text, dropped, fault = log.take()
    kept = [json.loads(line) for line in text.splitlines()]
    assert [record["t"] for record in kept] == list(range(1, len(kept) + 1))
    assert len(text) >= 100 > len(text) - len(text.splitlines()[-1]) - 1
    assert (dropped, fault) == (10 - len(kept), "")
    assert log.take() == ("", 0, "")
    log.note("retired", 11)
    assert log.take() == ('{"t":11,"event":"retired"}\n', 0, "")
    log.close()
    log.note("retired", 12)
    assert log.take() == ("", 1, "")


def test_a_note_does_not_outlive_or_leak_its_log() -> None:
    dumps = partial(json.dumps)
    log = EventLog({"retired": '"event":"retired"'}, dumps, 100)
    held = sys.getrefcount(dumps)
    note = log.note
    del log
    event, figures = "".join(["reti", "red"]), {"kind": "Grüße", "odd": object()}
    counts = [sys.getrefcount(each) for each in (event, *figures, *figures.values())]
    for number in range(1, 4):
        note(event, number, kind=figures["kind"])
        note(event, number, **figures)
    assert [sys.getrefcount(each) for each in (event, *figures, *figures.values())] == counts
    assert sys.getrefcount(dumps) == held
    del note
    assert sys.getrefcount(dumps) == held - 1


def test_events_noted_by_other_threads_while_one_is_made_are_whole_lines() -> None:
    """What has to be escaped is Python's, and there others may run."""
    others: list[threading.Thread] = []

    def dumps(value: object) -> str:
        other = threading.Thread(target=lambda: log.note("retired", 2, buffer=7))
        other.start()
        other.join()
        others.append(other)
        return json.dumps(value)

    log = EventLog({"retired": '"event":"retired"', "called": '"event":"called"'}, dumps, 1 << 20)
    log.note("called", 1, command="Grüße", reason='a "word"')
    found = [json.loads(line) for line in log.take()[0].splitlines()]
    assert len(others) == 2
    assert found == [{"t": 2, "event": "retired", "buffer": 7}] * 2 + [
        {"t": 1, "event": "called", "command": "Grüße", "reason": 'a "word"'}
    ]


@pytest.mark.parametrize(
    ("noted", "says"),
    [
        (lambda note: note("staged", 5, nbytes=object()), "^staged: TypeError: .*not JSON serializable$"),
        (lambda note: note("staged", 5, text="x" * 2000), "^staged: too long$"),
        (lambda note: note("no such event"), "no event 'no such event'"),
        (lambda note: note(), "no event"),
        (lambda note: note(["staged"]), "no event"),
        (lambda note: note("staged", 1 << 80), "too large to convert|too big to convert"),
        (lambda note: note("staged", step="three"), "^staged: .*str"),
        (lambda note: note("staged", 1, 2, 3), "note\\(event, t, end"),
    ],
)
def test_what_cannot_be_an_event_is_told_and_never_raised(noted: Callable[[object], None], says: str) -> None:
    log = EventLog({"staged": '"event":"staged"'}, json.dumps, 1000)
    noted(log.note)
    text, dropped, fault = log.take()
    assert (text, dropped) == ("", 1)
    assert re.search(says, fault)


def test_an_interrupt_that_comes_while_a_line_is_made_is_its_callers() -> None:
    def dumps(value: object) -> str:
        raise KeyboardInterrupt

    log = EventLog({"retired": '"event":"retired"'}, dumps, 1000)
    with pytest.raises(KeyboardInterrupt):
        log.note("retired", 1, kind="Grüße")
    log.note("retired", 2)
    assert log.take() == ('{"t":2,"event":"retired"}\n', 1, "")


def test_names_that_are_made_at_run_time_are_known_too() -> None:
    log = EventLog({"retired": '"event":"retired"'}, json.dumps, 1000)
    made = {"".join(letters): 3 for letters in (["st", "ep"], ["t"], ["en", "d"], ["buf", "fer"])}
    log.note("retired", **made)
    assert json.loads(log.take()[0]) == {"event": "retired", "step": 3, "t": 3, "end": 3, "buffer": 3}


def test_an_instant_is_now_on_the_monotonic_clock() -> None:
    log = EventLog({"retired": '"event":"retired"'}, json.dumps, 1000)
    before = time.monotonic_ns()
    log.note("retired")
    assert before <= json.loads(log.take()[0])["t"] <= time.monotonic_ns()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    events = writer(tmp_path / "events" / "trainer.jsonl")
    events.note("retired")
    events.close()
    events.note("retired")
    assert (tmp_path / "events").read_text() == "a file where the folder should be"


def test_what_cannot_be_written_costs_no_other_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trainer.jsonl"
    events = writer(path)
    events.note("staged", 5, nbytes=object())  # type: ignore[arg-type]
    events.note("no such event", 6)
    events.note("retired", 7)
    events.close()
    assert [record.get("event") for record in lines(path)] == [None, "retired", "dropped"]
    assert lines(path)[-1]["events"] == 2
    assert caplog.text.count("is left out, and others like it") == 1

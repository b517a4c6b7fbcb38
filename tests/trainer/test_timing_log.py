"""The trainer's log carries one line per step that tools can read, and no watcher waits for it."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from shmstage.errors import ProtocolError
from shmstage.trainer.timing_log import Event, StepTimingLog
from shmstage.wire.messages import TicketEvent, TokenEvent

MS = 10**6
NOW_MS = 1000


def work(kind: str, step: int, index: int, begin_ms: int, ready_ms: int) -> TokenEvent:
    name = f"update.{step}" if kind == "update" else f"{step}.{index}@0:2"
    stamps = {"dispatch_begin_ns": begin_ms * MS, "dispatch_end_ns": (begin_ms + 1) * MS, "ready_ns": ready_ms * MS}
    return TokenEvent(0, kind, name, step, index, True, "", stamps)


def reports(events: list[Event]) -> list[dict[str, Any]]:
    lines: list[str] = []
    passed: list[Event] = []
    log = StepTimingLog(passed.append, lines.append, clock_ns=lambda: NOW_MS * MS)
    for event in events:
        log(event)
    log.close()
    assert passed == events
    shape = re.compile(r"TRAINER_STEP_TIMING step=(\d+) policy_version=\1 rtt_s=0\.000 timing=(.*)")
    found = [shape.fullmatch(line) for line in lines]
    timings = [json.loads(match[2]) for match in found if match]
    assert [str(timing["train_step"]) for timing in timings] == [match[1] for match in found if match]
    assert len(timings) == len(lines) and all(t["v"] == 1 and t["prepare"] is None for t in timings)
    return timings


def test_a_landed_step_is_one_line_with_every_microbatch_and_the_update() -> None:
    staged = TokenEvent(0, "staged", "1.0@0:2", 1, 0, True, "", {"upload_begin_ns": 1, "staged_ready_ns": 2})
    ticket = TicketEvent(0, 1, "metrics", 1, True, {}, "", {})
    events = [staged, work("fwd_bwd", 1, 0, 100, 200), work("fwd_bwd", 1, 1, 150, 300), ticket]
    (report,) = reports([*events, work("update", 1, 0, 160, 400)])
    assert report["train_step"] == 1
    assert [(each.get("i", -1), each["dispatch_begin_ago_s"], each["dispatch_end_ago_s"], each["ready_ago_s"])
            for each in (*report["mb"], report["update"])] == [
        (0, 0.9, 0.899, 0.8), (1, 0.85, 0.849, 0.7), (-1, 0.84, 0.839, 0.6),
    ]  # fmt: skip


def test_a_replayed_microbatch_is_ready_when_its_replay_is() -> None:
    events = [work("fwd_bwd", 1, 0, 100, 200), work("replay", 1, 0, 250, 300), work("update", 1, 0, 260, 400)]
    (report,) = reports([*events])
    assert report["mb"][0]["ready_ago_s"] == 0.7


def test_of_a_step_given_up_and_trained_again_only_the_second_attempt_is_told() -> None:
    events = [work("fwd_bwd", 2, 0, 100, 200), work("fwd_bwd", 2, 1, 100, 200), work("fwd_bwd", 2, 0, 300, 400)]
    (report,) = reports([*events, work("update", 2, 0, 310, 500)])
    assert [each["dispatch_begin_ago_s"] for each in report["mb"]] == [0.7]


def test_each_step_has_its_own_line() -> None:
    events: list[Event] = []
    for step in (1, 2):
        events += [work("fwd_bwd", step, 0, 100 * step, 150), work("update", step, 0, 101 * step, 200)]
    assert [(report["train_step"], len(report["mb"])) for report in reports(events)] == [(1, 1), (2, 1)]


def test_a_log_that_cannot_be_written_holds_up_no_event() -> None:
    free, passed = threading.Event(), []
    log = StepTimingLog(passed.append, lambda line: free.wait(20.0) or None)  # type: ignore[func-returns-value]
    for step in range(1, 100):
        log(work("update", step, 0, 1, 2))
    assert len(passed) == 99
    free.set()
    log.close()


def test_an_event_that_could_not_be_told_is_not_counted() -> None:
    def refuse(event: Event) -> None:
        raise ProtocolError("too long")

    lines: list[str] = []
    log = StepTimingLog(refuse, lines.append)
    with pytest.raises(ProtocolError):
        log(work("update", 1, 0, 1, 2))
    log.close()
    assert not lines

from __future__ import annotations

import itertools
import queue
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmstage.errors import CheckpointError, WaitTimeoutError
from shmstage.trainer.snapshots import Snapshots
from shmstage.wire.codec import encode
from shmstage.wire.messages import TicketEvent

DEADLINE_S = 10.0


@pytest.fixture
def events() -> queue.SimpleQueue[TicketEvent]:
    return queue.SimpleQueue()


@pytest.fixture
def snapshots(events: queue.SimpleQueue[TicketEvent]) -> Iterator[Snapshots]:
    snapshots = Snapshots(events.put, clock_ns=lambda: 42)
    yield snapshots
    snapshots.close()


def test_a_ticket_resolves_with_what_was_copied(
    snapshots: Snapshots, events: queue.SimpleQueue[TicketEvent]
) -> None:
    number = snapshots.submit("metrics", 3, lambda: {"loss": 1.5})
    event = events.get(timeout=DEADLINE_S)
    assert event == TicketEvent(0, number, "metrics", 3, True, {"loss": 1.5}, "", {"begin_ns": 42, "done_ns": 42})


def test_a_ticket_says_when_it_was_asked_for_and_when_it_was_done(events: queue.SimpleQueue[TicketEvent]) -> None:
    release, clock = threading.Event(), itertools.count(1)
    snapshots = Snapshots(events.put, clock_ns=lambda: next(clock))
    snapshots.submit("metrics", 1, lambda: {"waited": release.wait(DEADLINE_S)})
    snapshots.submit("metrics", 2, dict)
    release.set()
    stamps = [events.get(timeout=DEADLINE_S).stamps for _ in range(2)]
    assert stamps == [{"begin_ns": 1, "done_ns": 3}, {"begin_ns": 2, "done_ns": 4}]
    snapshots.close()


def test_a_ticket_with_a_write_resolves_when_it_is_durable(
    snapshots: Snapshots, events: queue.SimpleQueue[TicketEvent]
) -> None:
    durable = threading.Event()
    snapshots.submit("checkpoint", 1, lambda: None, lambda: {"durable": durable.wait(DEADLINE_S)})
    assert events.empty()
    durable.set()
    assert events.get(timeout=DEADLINE_S).value == {"durable": True}


def test_the_update_waits_for_copies_that_read_what_it_donates_and_for_no_others(snapshots: Snapshots) -> None:
    release = threading.Event()
    snapshots.submit("metrics", 1, lambda: {"waited": release.wait(DEADLINE_S)})
    assert snapshots.wait_copies(0.0) == 0.0
    snapshots.submit("checkpoint", 1, lambda: None, dict, holds=True)
    with pytest.raises(WaitTimeoutError, match=r"copy of checkpoint 1, .*raise call_timeout_s"):
        snapshots.wait_copies(0.01)
    release.set()
    assert snapshots.wait_copies(DEADLINE_S) >= 0.0
    assert snapshots.wait_copies(0.0) == 0.0


def test_a_slow_disk_does_not_hold_up_the_next_metrics(
    snapshots: Snapshots, events: queue.SimpleQueue[TicketEvent]
) -> None:
    """B3"""
    release = threading.Event()
    snapshots.submit("checkpoint", 1, lambda: None, lambda: {"waited": release.wait(DEADLINE_S)}, holds=True)
    snapshots.submit("metrics", 2, dict)
    assert events.get(timeout=DEADLINE_S).kind == "metrics"
    assert snapshots.wait_copies(DEADLINE_S) >= 0.0  # copied is enough; durable comes later
    release.set()
    assert events.get(timeout=DEADLINE_S).kind == "checkpoint"


def test_what_others_wait_for_is_held_up_by_no_copy_and_no_disk(
    snapshots: Snapshots, events: queue.SimpleQueue[TicketEvent]
) -> None:
    release = threading.Event()
    for _ in range(3):  # one is written, one waits, one was copied and waits to be handed over
        snapshots.submit("checkpoint", 1, lambda: None, lambda: {"w": release.wait(DEADLINE_S)}, holds=True)
    snapshots.submit("metrics", 1, lambda: {"waited": release.wait(DEADLINE_S)})
    numbers = [snapshots.submit(kind, 2, dict, apart=True) for kind in ("logps", "eval")]
    assert [events.get(timeout=DEADLINE_S).ticket for _ in numbers] == numbers == [5, 6]
    assert events.empty()
    release.set()


def test_join_and_close_wait_for_what_is_copied_apart() -> None:
    told: list[str] = []
    release, snapshots = threading.Event(), Snapshots(lambda event: told.append(event.kind))
    snapshots.submit("logps", 1, lambda: {"waited": release.wait(DEADLINE_S)}, apart=True)
    with pytest.raises(WaitTimeoutError, match="logps 1"):
        snapshots.join(0.01)
    snapshots.submit("eval", 1, dict, apart=True)
    release.set()
    snapshots.close()
    assert told == ["logps", "eval"]
    assert not any(thread.is_alive() for thread in snapshots._threads)


def test_host_copies_do_not_pile_up_behind_a_slow_disk(snapshots: Snapshots) -> None:
    release, copied = threading.Event(), []
    for step in range(1, 5):
        snapshots.submit("checkpoint", step, lambda step=step: copied.append(step), lambda: {"w": release.wait()})
    while len(copied) < 3:  # one is written, one waits, one was copied and waits to be handed over
        threading.Event().wait(0.001)
    assert copied == [1, 2, 3]
    release.set()
    snapshots.join(DEADLINE_S)
    assert copied == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["copy", "write"])
def test_what_goes_wrong_is_told_by_the_ticket(
    snapshots: Snapshots, events: queue.SimpleQueue[TicketEvent], where: str
) -> None:
    def fail() -> dict[str, object]:
        raise CheckpointError("disk\nfull")

    def works() -> dict[str, object]:
        return {}

    snapshots.submit("checkpoint", 1, fail if where == "copy" else works, fail, holds=True)
    event = events.get(timeout=DEADLINE_S)
    assert (event.ok, event.value, event.error) == (False, {}, "checkpoint of step 1: disk full")
    snapshots.wait_copies(DEADLINE_S)
    snapshots.submit("metrics", 1, works)
    assert events.get(timeout=DEADLINE_S).ok


def test_join_waits_for_every_ticket(snapshots: Snapshots) -> None:
    release = threading.Event()
    snapshots.submit("checkpoint", 1, lambda: None, lambda: {"w": release.wait(DEADLINE_S)})
    with pytest.raises(WaitTimeoutError, match=r"checkpoint 1 .*raise call_timeout_s"):
        snapshots.join(0.01)
    release.set()
    snapshots.join(DEADLINE_S)


def test_a_reporter_that_raises_does_not_end_the_threads() -> None:
    told: list[str] = []

    def emit(event: TicketEvent) -> None:
        told.append(event.kind)
        raise ValueError("nobody listens")

    snapshots = Snapshots(emit)
    snapshots.submit("metrics", 1, dict)
    snapshots.submit("eval", 1, dict)
    snapshots.join(DEADLINE_S)
    snapshots.close()
    assert told == ["metrics", "eval"]


@pytest.fixture
def travelled() -> Iterator[tuple[Snapshots, queue.SimpleQueue[TicketEvent]]]:
    """Snapshots whose events are encoded, as a server does."""
    arrived: queue.SimpleQueue[TicketEvent] = queue.SimpleQueue()

    def emit(event: TicketEvent) -> None:
        encode(event)
        arrived.put(event)

    snapshots = Snapshots(emit)
    yield snapshots, arrived
    snapshots.close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"path": object()}, r"checkpoint of step 3 cannot be reported: TicketEvent.value.path is builtins.object"),
        ({"log": "x" * (2 << 20)}, r"checkpoint of step 3 cannot be reported: .* the frame limit is 1048576"),
        (None, r"checkpoint of step 3: TypeError: 'NoneType' object is not iterable"),
    ],
    ids=["foreign_object", "over_the_frame_limit", "no_mapping"],
)
def test_a_value_that_cannot_travel_fails_its_ticket(
    travelled: tuple[Snapshots, queue.SimpleQueue[TicketEvent]], value: Any, reason: str
) -> None:
    snapshots, arrived = travelled
    number = snapshots.submit("checkpoint", 3, lambda: None, lambda: value)
    event = arrived.get(timeout=1.0)
    assert (event.ticket, event.ok, event.value) == (number, False, {})
    assert re.match(reason, event.error)
    snapshots.submit("checkpoint", 4, lambda: None, dict)
    assert arrived.get(timeout=DEADLINE_S).ok  # the thread lives


def test_numpy_scalars_in_a_value_travel_as_numbers(
    travelled: tuple[Snapshots, queue.SimpleQueue[TicketEvent]],
) -> None:
    snapshots, arrived = travelled
    value = {"nbytes": np.int64(7), "parts": [{"scale": np.float32(0.5), "whole": np.bool_(True)}], "path": "a"}
    snapshots.submit("checkpoint", 3, lambda: None, lambda: value)
    event = arrived.get(timeout=DEADLINE_S)
    assert event.ok
    assert event.value == {"nbytes": 7, "parts": [{"scale": 0.5, "whole": True}], "path": "a"}
    assert type(event.value["nbytes"]) is int


def test_a_ticket_whose_outcome_cannot_be_noted_is_still_told(events: queue.SimpleQueue[TicketEvent]) -> None:
    def on_done(kind: str, step: int, error: str) -> None:
        raise ValueError(kind)

    snapshots = Snapshots(events.put, on_done=on_done)
    snapshots.submit("metrics", 1, dict)
    assert events.get(timeout=1.0).ok
    snapshots.close()

"""Events of several hosts, in every order in which they and the replies before them may arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shmstage.errors import TrainerError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.fleet_events import FleetEvents
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.wire.messages import TicketEvent, TokenEvent

NAMES = ("host 0 (a)", "host 1 (b)", "host 2 (c)")


def whole(step: int, index: int) -> Handle:
    return Handle(0, 100 * step + index, 1, step=step, index=index)


def part(host: int, step: int, index: int) -> Handle:
    return Handle(host + 1, 2 * (step + index + host), 1, step=step, index=index)


def book_of(hosts: int, *names: tuple[int, int], aux: bool = False) -> HandleBook:
    book = HandleBook(hosts)
    for step, index in names:
        book.put(whole(step, index), [part(host, step, index) for host in range(hosts)], aux=aux)
    return book


def token(host: int, number: int, kind: str, step: int, index: int = 0, *, error: str = "") -> TokenEvent:
    name = f"update.{step}" if kind == "update" else part(host, step, index).request_id
    return TokenEvent(number, kind, name, step, index, not error, error, {"ready_ns": 1000 * (host + 1) + number})


def ticket(host: int, number: int, which: int, *, error: str = "", kind: str = "metrics", **value: Any) -> TicketEvent:
    return TicketEvent(number, which, kind, 1, not error, value, error, {"done_ns": 1000 * (host + 1)})


def interleavings(streams: list[list[Any]]) -> Iterator[list[Any]]:
    """Every order that keeps each stream's own."""
    if not any(streams):
        yield []
        return
    for number, stream in enumerate(streams):
        if stream:
            rest = [each[1:] if other == number else each for other, each in enumerate(streams)]
            for following in interleavings(rest):
                yield [stream[0], *following]


KINDS = ("staged", "fwd_bwd")


def step_of(host: int, micros: int, kinds: tuple[str, ...]) -> list[TokenEvent | TicketEvent]:
    """What one host tells of step 1 of so many micro-batches, and of the metrics after it (its ticket 5 + host)."""
    tokens = [(kind, index) for index in range(micros) for kind in kinds]
    events: list[TokenEvent | TicketEvent] = [
        token(host, number, kind, 1, index) for number, (kind, index) in enumerate([*tokens, ("update", 0)], start=1)
    ]
    return [*events, ticket(host, len(events) + 1, 5 + host, denominator=8.0)]


def walk(hosts: int, micros: int, kinds: tuple[str, ...] = KINDS) -> int:
    """All orders of the hosts' events and of the reply that names the tickets; returns how many there were."""
    walks = 0
    streams: list[list[tuple[int, Any]]] = [
        [(host, event) for event in step_of(host, micros, kinds)] for host in range(hosts)
    ]
    wanted = [*((kind, index) for index in range(micros) for kind in kinds), ("update", 0)]
    reply = (-1, None)
    for order in interleavings([*streams, [reply]]):
        walks += 1
        book = book_of(hosts, *((1, index) for index in range(micros)))
        fleet = FleetEvents(NAMES[:hosts], book)
        told: list[TokenEvent | TicketEvent] = []
        heard = [0] * hosts
        for host, event in order:
            if event is None:
                assert fleet.promised([5 + each for each in range(hosts)]) == 1
            else:
                heard[host] += 1
                fleet.heard(host, event)
            told += fleet.take()
            assert len(told) <= min(heard), "told before all hosts had told theirs"
        assert [event.number for event in told] == list(range(1, len(wanted) + 2)), "lost, or told twice"
        # the ticket is told when its reply has come, too; everything else keeps the order of every host
        assert [(e.kind, e.index) for e in told if isinstance(e, TokenEvent)] == wanted
        assert [e.ticket for e in told if isinstance(e, TicketEvent)] == [1]
        assert all(event.ok and all(1000 <= ns < 2000 for ns in event.stamps.values()) for event in told)
        ids = {(e.index, e.request_id) for e in told if isinstance(e, TokenEvent) and e.kind != "update"}
        assert ids == {(index, whole(1, index).request_id) for index in range(micros)}
        assert len(book) == (0 if kinds == KINDS else micros) and not fleet.missing()
    return walks


def test_two_hosts_of_one_microbatch_in_every_order() -> None:
    assert walk(2, 1) == 630  # 9! / (4! 4! 1!)


@pytest.mark.slow
def test_two_hosts_of_two_microbatches_in_every_order() -> None:
    assert walk(2, 2) == 12012  # 13! / (6! 6! 1!)


@pytest.mark.slow
def test_three_hosts_in_every_order() -> None:
    assert walk(3, 1, ("fwd_bwd",)) == 16800  # 10! / (3! 3! 3! 1!)


def test_one_failure_makes_the_whole_fail_and_names_its_host() -> None:
    fleet = FleetEvents(NAMES, book_of(3, (1, 0)))
    for host in (2, 0, 1):
        fleet.heard(host, token(host, 1, "fwd_bwd", 1, error="overflow" if host == 1 else ""))
    (event,) = fleet.take()
    assert not event.ok
    assert event.error == "host 1 (b): overflow"


def test_a_failed_ticket_names_its_host_and_its_figures_are_not_compared() -> None:
    fleet = FleetEvents(NAMES[:2], book_of(2))
    fleet.promised([1, 1])
    fleet.heard(0, ticket(0, 1, 1, denominator=8.0))
    fleet.heard(1, ticket(1, 1, 1, error="no space left"))
    (event,) = fleet.take()
    assert (event.ok, event.error) == (False, "host 1 (b): no space left")


def test_denominators_that_differ_name_both_hosts_after_what_came_before() -> None:
    fleet = FleetEvents(NAMES[:2], book_of(2, (1, 0)))
    fleet.promised([1, 1])
    for host in (0, 1):
        fleet.heard(host, token(host, 1, "update", 1))
        fleet.heard(host, ticket(host, 2, 1, denominator=8.0 + host))
        fleet.heard(host, token(host, 3, "staged", 2))
    assert [event.kind for event in fleet.take()] == ["update"]
    for _ in range(2):
        with pytest.raises(TrainerError, match=r"denominator is 8\.0 on host 0 \(a\) and 9\.0 on host 1 \(b\)"):
            fleet.take()


def test_an_event_that_comes_again_is_passed_over() -> None:
    fleet = FleetEvents(NAMES[:2], book_of(2, (1, 0)))
    first = token(0, 1, "fwd_bwd", 1)
    for _ in range(2):
        fleet.heard(0, first)
    fleet.heard(1, token(1, 1, "fwd_bwd", 1))
    assert len(fleet.take()) == 1
    fleet.heard(0, first)
    fleet.heard(1, token(1, 1, "fwd_bwd", 1))
    assert fleet.take() == []
    assert fleet.missing() == []


def test_the_second_event_of_a_kind_belongs_to_the_other_hosts_second() -> None:
    """A micro-batch that was staged, then sent whole, is uploaded twice."""
    fleet = FleetEvents(NAMES[:2], book_of(2, (1, 0)))
    fleet.heard(0, token(0, 1, "staged", 1))
    fleet.heard(0, token(0, 2, "staged", 1, error="late"))
    assert fleet.take() == []
    fleet.heard(1, token(1, 1, "staged", 1))
    assert [event.ok for event in fleet.take()] == [True]
    assert fleet.missing() == ["staged 1.0 from host 1 (b)"]
    fleet.heard(1, token(1, 2, "staged", 1))
    assert [event.ok for event in fleet.take()] == [False]


def test_hosts_that_tell_of_different_microbatches_under_one_number_are_found() -> None:
    book = book_of(2, (1, 0))
    book.put(Handle(0, 777, 1, step=1), [Handle(9, 2 * host + 2, 1, step=1) for host in (0, 1)])
    fleet = FleetEvents(NAMES[:2], book)
    fleet.heard(0, token(0, 1, "fwd_bwd", 1))
    fleet.heard(1, TokenEvent(1, "fwd_bwd", "1.0@9:4", 1, 0, True, "", {}))
    with pytest.raises(TrainerError, match="do not train the same micro-batch"):
        fleet.take()


def test_who_is_waited_for_is_told() -> None:
    fleet = FleetEvents(NAMES, book_of(3, (1, 0)))
    fleet.promised([4, 4, 4])
    fleet.heard(1, token(1, 1, "fwd_bwd", 1))
    fleet.heard(2, ticket(2, 1, 4))
    assert fleet.missing() == [
        "fwd_bwd 1.0 from host 0 (a), host 2 (c)", "metrics of step 1 from host 0 (a), host 1 (b)",
    ]  # fmt: skip


def test_scores_of_several_hosts_have_one_digest_and_the_wholes_name() -> None:
    book = book_of(2, (1, 0))
    fleet = FleetEvents(NAMES[:2], book)
    digests = []
    for round_number, theirs in enumerate(("bb", "cc"), start=1):
        fleet.promised([round_number] * 2)
        for host, digest in ((1, theirs), (0, "aa")):
            name = part(host, 1, 0).request_id
            value = {"request_id": name, "field": "old", "written": host == 0, "digest": digest}
            fleet.heard(host, ticket(host, round_number, round_number, kind="logps", **value))
        (event,) = fleet.take()
        assert isinstance(event, TicketEvent)
        assert event.value["request_id"] == whole(1, 0).request_id
        assert event.value["written"] is False
        digests.append(event.value["digest"])
    assert len(set(digests)) == 2 and "aa" not in digests


def test_an_evaluation_is_forgotten_when_all_hosts_have_evaluated() -> None:
    book = book_of(2, (1, 0), aux=True)
    fleet = FleetEvents(NAMES[:2], book)
    fleet.promised([1, 1], of=whole(1, 0).request_id)
    fleet.heard(0, ticket(0, 1, 1, kind="eval", denominator=2.0))
    assert len(book) == 1
    fleet.heard(1, ticket(1, 1, 1, kind="eval", denominator=2.0))
    assert len(book) == 0


def test_a_restore_forgets_what_was_under_way() -> None:
    fleet = FleetEvents(NAMES[:2], book_of(2, (1, 0)))
    fleet.promised([1, 1])
    fleet.heard(0, token(0, 1, "fwd_bwd", 1))
    fleet.heard(0, ticket(0, 2, 2))  # of a reply that did not come
    fleet.clear()
    fleet.heard(1, token(1, 1, "fwd_bwd", 1))
    fleet.heard(1, ticket(1, 2, 1))
    fleet.promised([2, 2])
    fleet.heard(1, ticket(1, 3, 2))
    assert fleet.take() == []

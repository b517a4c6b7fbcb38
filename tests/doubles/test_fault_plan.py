"""The plan decides by name and count alone; the channels do what it says and nothing else."""

from __future__ import annotations

import pytest

from shmstage.memory.handle import Handle
from shmstage.testing.fault_plan import Effect, Fault, FaultPlan, FaultScript, FrameNames, call_name
from shmstage.testing.faulty_channel import FaultyChannel, FaultyServerChannel
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.wire.codec import encode
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import EventAck, Message, Ping, Reply, Request, TicketEvent, TokenEvent

HANDLE = Handle(0, 2, 1, bytes(16), 2, 3, 1, False, 8, 2)


def request(sequence: int, command: str, **arguments: object) -> Request:
    return Request(1, 1, sequence, command, arguments)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (request(1, "fwd_bwd", handle=handle_to_wire(HANDLE), defer_update=False), "request fwd_bwd 3.1"),
        (request(1, "fwd_bwd_staged", request_id="3.1@0:2", defer_update=True), "request fwd_bwd_staged 3.1"),
        (request(1, "save_checkpoint", step=4, metadata={}), "request save_checkpoint 4"),
        (request(1, "prepare_weight_sync", version=5), "request prepare_weight_sync 5"),
        (request(1, "update"), "request update"),
        (TokenEvent(1, "update", "update.2", 2, 0, True, "", {}), "token update 2.0"),
        (TicketEvent(1, 1, "metrics", 2, True, {}, "", {}), "ticket metrics 2"),
        (EventAck(3), "ack"),
        (Ping(1), "ping"),
        (Reply(0, False, {}, "ProtocolError", "no"), "refusal"),
    ],
)
def test_a_frame_is_named_by_what_it_says(message: Message, name: str) -> None:
    assert FrameNames().of(encode(message)) == name


def test_a_reply_is_named_after_its_request_and_foreign_bytes_are_bytes() -> None:
    names = FrameNames()
    names.of(encode(request(7, "get_metrics", step=2)))
    assert names.of(encode(Reply(7, True, {}, "", ""))) == "reply get_metrics 2"
    assert names.of(encode(Reply(8, True, {}, "", ""))) == "reply ?"
    assert names.of(b"nothing of ours") == "bytes"
    assert call_name("fwd_bwd", {"handle": [1]}) == "fwd_bwd ?"


def test_a_fault_meets_its_nth_match_and_as_many_as_it_says() -> None:
    script = FaultScript(FaultPlan((Fault("reply *", Effect.LOSE, nth=2, times=2), Fault("ack", Effect.DOUBLE))))
    names = ["reply a", "ping", "reply b", "reply a", "reply c"]
    assert [script.decide(name)[0] for name in names] == ["pass", "pass", "lose", "lose", "pass"]
    assert script.done == ["lose reply b", "lose reply a"]
    assert [fault.frame for fault in script.unmet()] == ["ack"]


def test_every_fault_counts_all_frames_that_match_it_and_the_first_one_due_acts() -> None:
    faults = (Fault("reply *", Effect.LOSE), Fault("reply *", Effect.DOUBLE, nth=2), Fault("reply b", Effect.DELAY))
    script = FaultScript(FaultPlan(faults))
    assert [script.decide(name)[0] for name in ("reply a", "reply b", "reply c")] == ["lose", "double", "pass"]
    assert script.unmet() == []


def test_random_faults_depend_on_seed_name_and_count_not_on_order() -> None:
    names = [f"reply {n % 7}" for n in range(70)]
    plan = FaultPlan(seed=3, rate=0.5)
    first, second = FaultScript(plan), FaultScript(plan)
    for name in names:
        first.decide(name)
    for name in sorted(names):
        second.decide(name)
    assert sorted(first.done) == sorted(second.done)
    assert len(first.done) > 10
    other = FaultScript(FaultPlan(seed=4, rate=0.5))
    for name in names:
        other.decide(name)
    assert sorted(other.done) != sorted(first.done)


def test_no_name_meets_more_random_faults_in_a_row_than_allowed() -> None:
    script = FaultScript(FaultPlan(seed=1, rate=1.0, most_in_a_row=2))
    effects = [script.decide("request update")[0] for _ in range(9)]
    assert [effect is Effect.PASS for effect in effects] == [False, False, True] * 3


def lines(*faults: Fault) -> tuple[FaultyChannel, MemoryServerChannel, list[str]]:
    server = MemoryServerChannel()
    told: list[str] = []
    channel = FaultyChannel(server.connect(), FaultPlan(faults), on_fault=lambda name, e: told.append(f"{e} {name}"))
    return channel, server, told


def calls(server: MemoryServerChannel) -> list[str]:
    names, found = FrameNames(), []
    while (received := server.recv(0.0)) is not None:
        found.append(names.of(received[1]).removeprefix("request "))
    return found


def test_frames_are_lost_doubled_and_change_places() -> None:
    channel, server, told = lines(
        Fault("request a", Effect.LOSE), Fault("request b", Effect.DOUBLE), Fault("request c", Effect.DELAY)
    )
    for number, name in enumerate("abcde", start=1):
        assert channel.send(encode(request(number, name)))
    assert calls(server) == ["b", "b", "d", "c", "e"]
    assert told == channel.script.done == ["lose request a", "double request b", "delay request c"]
    channel.close()
    server.close()


def test_a_delay_lasts_until_the_named_frame_has_passed_in_whichever_direction() -> None:
    channel, server, _ = lines(Fault("request a", Effect.DELAY, until="reply b"))
    channel.send(encode(request(1, "a")))
    channel.send(encode(request(2, "b")))
    received = server.recv(0.0)
    assert received is not None and server.recv(0.0) is None
    reply = encode(Reply(2, True, {}, "", ""))
    server.send(received[0], reply)
    assert channel.recv(0.0) == reply
    assert calls(server) == ["a"]
    channel.close()
    server.close()


def test_the_bound_end_does_the_same_to_what_it_receives_and_sends() -> None:
    plan = FaultPlan((Fault("request a", Effect.LOSE), Fault("reply b", Effect.DELAY), Fault("reply c", Effect.DOUBLE)))
    inner = MemoryServerChannel()
    server, channel = FaultyServerChannel(inner, plan), inner.connect()
    for number, name in enumerate("abc", start=1):
        channel.send(encode(request(number, name)))
    received = [server.recv(0.0) for _ in range(3)]
    peers = [each[0] for each in received if each is not None]
    replies = [encode(Reply(number, True, {}, "", "")) for number in (2, 3)]
    for reply in replies:
        server.send(peers[0], reply)
    assert [channel.recv(0.0) for _ in range(4)] == [replies[1], replies[1], replies[0], None]
    assert server.script.done == ["lose request a", "delay reply b", "double reply c"]
    channel.close()
    server.close()

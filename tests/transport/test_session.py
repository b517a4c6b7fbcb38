"""Client and server together, in one thread, by hand: the channel loses what it is told to, the clock is fake."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstage.errors import (
    CancelledError,
    PeerLostError,
    PeerRestartedError,
    ProtocolError,
    ShmstageError,
    StoppedError,
    TransportError,
    UpdateDeferredError,
    WaitTimeoutError,
)
from shmstage.testing.fake_clock import FakeClock
from shmstage.testing.memory_channel import MemoryChannel, MemoryServerChannel
from shmstage.transport.channel import Channel
from shmstage.transport.client import Client
from shmstage.transport.server import Pending, Server
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import (
    PROTOCOL_VERSION,
    EventAck,
    Hello,
    Message,
    Reply,
    Request,
    TicketEvent,
    TokenEvent,
    Welcome,
)

Loses = Callable[[Message], bool]


@final
class LossyChannel(Channel):
    """Loses the messages it is told to, on the way out or in, and remembers what was sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.loses_out: Loses = lambda message: False
        self.loses_in: Loses = lambda message: False
        self.sent: list[Message] = []

    def send(self, frame: bytes) -> bool:
        self.sent.append(decode(frame))
        return True if self.loses_out(self.sent[-1]) else self._channel.send(frame)

    def recv(self, timeout_s: float) -> bytes | None:
        frame = self._channel.recv(timeout_s)
        return None if frame is not None and self.loses_in(decode(frame)) else frame

    def descriptor(self) -> int:
        return self._channel.descriptor()

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._channel.close()


class Watch:
    """Stands in for a PeerWatch."""

    def __init__(self) -> None:
        self.is_dead = False

    def dead(self) -> bool:
        return self.is_dead

    def describe(self) -> str:
        return "trainer 42"


def once(kind: type) -> Loses:
    """Loses the first message of a kind."""
    left = [kind]
    return lambda message: isinstance(message, kind) and bool(left) and left.pop() is kind


def token(step: int = 0) -> TokenEvent:
    return TokenEvent(0, "fwd_bwd", f"{step}.0@0:2", step, 0, True, "", {"ready_ns": 1})


class World:
    """A server whose loops run whenever the client would wait; time passes when there is nothing to do."""

    def __init__(self, incarnation: int = 7) -> None:
        self.clock = FakeClock(100.0)
        self.executes = True
        self.executed: list[str] = []
        self.channel = MemoryServerChannel(idle=lambda timeout_s: None)
        self.server = Server(self.channel, incarnation=incarnation)
        self.clients: list[Client] = []

    def client(self, **options: object) -> tuple[Client, LossyChannel]:
        channel = LossyChannel(self.channel.connect(idle=self.idle))
        client = Client(channel, clock=self.clock, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client, channel

    def raw(self) -> MemoryChannel:
        return self.channel.connect(idle=self.idle)

    def idle(self, timeout_s: float) -> None:
        if not self.turn():
            self.clock.advance(timeout_s)

    def turn(self) -> int:
        done = 0
        while self.server.step():
            done += 1
        if self.executes and (pending := self.server.next_request(0.0)) is not None:
            self.execute(pending)
            done += 1
            while self.server.step():
                pass
        return done

    def execute(self, pending: Pending) -> None:
        self.executed.append(pending.command)
        if pending.hello is not None:
            pending.welcome(Welcome(PROTOCOL_VERSION, 0, 42, 9, "/dev/shm/x.lock", {"platform": "cpu"}))
        elif pending.command == "deferred":
            pending.fail(UpdateDeferredError("step 3 is open; call apply_deferred_update first"))
        elif pending.command == "bug":
            pending.fail(ValueError("\ud800 not ours"))
        elif pending.command == "emit":
            for step in pending.arguments["steps"]:
                self.server.emit(token(step))
            pending.reply({})
        else:
            pending.reply({"echo": pending.arguments})

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


def hello(epoch: int = 1, lock_path: str = "/dev/shm/o.lock") -> Hello:
    return Hello(PROTOCOL_VERSION, "run", epoch, "/shmstage.p", [], [], lock_path, 1, 2)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


# --- the handshake -------------------------------------------------------------------------------------------


def test_hello_fixes_epoch_and_incarnation(world: World) -> None:
    client, channel = world.client()
    welcome = client.hello(hello(epoch=3), 1.0)
    assert (welcome.incarnation, welcome.info) == (7, {"platform": "cpu"})
    client.call("info", {}, timeout_s=1.0)
    request = channel.sent[-1]
    assert isinstance(request, Request) and (request.epoch, request.incarnation, request.sequence) == (3, 7, 1)


def test_hello_repeats_itself_until_the_server_answers(world: World) -> None:
    client, channel = world.client()
    channel.loses_out = once(Hello)
    assert client.hello(hello(), 5.0).incarnation == 7
    channel.loses_in = once(Welcome)
    client.hello(hello(epoch=2), 5.0)
    assert world.executed == ["hello", "hello"]  # a repeated hello is answered from memory


def test_hello_that_nobody_answers_ends_at_its_deadline(world: World) -> None:
    client, channel = world.client()
    channel.loses_out = lambda message: True
    with pytest.raises(WaitTimeoutError, match="no answer to hello from the server within 3 s; it answered no ping"):
        client.hello(hello(), 3.0)
    assert world.clock() == pytest.approx(103.0, abs=0.2)


def test_hello_of_an_older_epoch_is_refused(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(epoch=5), 1.0)
    old, _ = world.client()
    with pytest.raises(PeerRestartedError, match="epoch 4 says hello, but epoch 5 has taken over"):
        old.hello(hello(epoch=4), 1.0)
    assert client.call("info", {}, timeout_s=1.0)


def test_hello_of_another_process_with_the_same_epoch_is_refused(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    twin, _ = world.client()
    with pytest.raises(PeerRestartedError, match="belongs to process 1"):
        twin.hello(hello(lock_path="/dev/shm/twin.lock"), 1.0)


def test_failed_hello_raises_the_servers_error_and_can_be_tried_again(world: World) -> None:
    client, _ = world.client()
    execute = world.execute
    world.execute = lambda pending: pending.fail(ProtocolError("no such pool"))  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="no such pool"):
        client.hello(hello(), 1.0)
    world.execute = execute  # type: ignore[method-assign]
    assert client.hello(hello(), 1.0).incarnation == 7


def test_a_hello_that_fails_leaves_the_living_session_as_it_was(world: World) -> None:
    living, intruder = opened(world), world.raw()
    world.executes = False
    living.send(encode(Request(1, 7, 1, "update", {})))
    intruder.send(encode(hello(epoch=2)))
    world.turn()
    bad = world.server.next_request(0.0)
    assert bad is not None and bad.hello is not None and bad.hello.epoch == 2  # before what came earlier
    world.server.emit(token(5))
    bad.fail(ProtocolError("no such pool"))
    told = decode(intruder.recv(0.0) or b"")
    assert isinstance(told, Reply) and "no such pool" in told.error_text
    world.executes = True
    (reply,) = answers(world, living, Request(1, 7, 2, "info", {}))
    assert (reply.sequence, reply.ok) == (2, True)
    assert world.executed == ["info"]  # the higher sequence cancelled the one that was queued, as always
    (refused,) = answers(world, intruder, Request(2, 7, 1, "update", {}))
    assert (refused.ok, refused.error_kind) == (False, "PeerRestartedError")
    intruder.close()
    living.close()


def test_what_was_queued_runs_after_a_hello_that_failed(world: World) -> None:
    living, intruder = opened(world), world.raw()
    world.executes = False
    living.send(encode(Request(1, 7, 1, "update", {})))
    intruder.send(encode(hello(epoch=2)))
    world.turn()
    bad = world.server.next_request(0.0)
    assert bad is not None
    bad.fail(ProtocolError("no such pool"))
    world.executes = True
    world.turn()
    assert world.executed == ["update"]
    reply = decode(living.recv(0.0) or b"")
    assert isinstance(reply, Reply) and (reply.sequence, reply.ok) == (1, True)
    intruder.close()
    living.close()


def test_events_reach_the_living_session_while_another_hello_waits(world: World) -> None:
    living, intruder = opened(world), world.raw()
    world.executes = False
    intruder.send(encode(hello(epoch=2)))
    world.turn()
    world.server.emit(token(5))
    assert isinstance(decode(living.recv(0.0) or b""), TokenEvent)
    assert intruder.recv(0.0) is None
    intruder.close()
    living.close()


def test_of_two_hellos_that_wait_only_the_later_one_is_executed(world: World) -> None:
    world.executes = False
    first, second = world.raw(), world.raw()
    first.send(encode(hello(epoch=1)))
    second.send(encode(hello(epoch=2)))
    world.turn()
    world.executes = True
    world.turn()
    assert world.executed == ["hello"]
    assert first.recv(0.0) is None
    assert isinstance(decode(second.recv(0.0) or b""), Welcome)
    first.close()
    second.close()


def test_hello_waiting_tells_the_executing_thread_to_end_its_waits(world: World) -> None:
    raw = world.raw()
    assert not world.server.hello_waiting
    raw.send(encode(hello()))
    world.server.step()
    assert world.server.hello_waiting
    world.turn()
    assert not world.server.hello_waiting
    raw.close()


def test_call_before_hello_is_refused(world: World) -> None:
    client, _ = world.client()
    with pytest.raises(ProtocolError, match="before hello"):
        client.call("info", {}, timeout_s=1.0)


# --- epoch, incarnation, sequence ----------------------------------------------------------------------------


def answers(world: World, raw: MemoryChannel, request: Request) -> list[Reply]:
    raw.send(encode(request))
    world.turn()
    found = []
    while (frame := raw.recv(0.0)) is not None:
        message = decode(frame)
        if isinstance(message, Reply):
            found.append(message)
    return found


def opened(world: World, epoch: int = 1) -> MemoryChannel:
    raw = world.raw()
    raw.send(encode(hello(epoch)))
    world.turn()
    assert isinstance(decode(raw.recv(0.0) or b""), Welcome)
    world.executed.clear()
    return raw


@pytest.mark.parametrize(
    ("epoch", "incarnation", "says"),
    [(1, 8, "incarnation 8; this is 7"), (2, 7, "epoch 2; this process serves epoch 1"), (0, 7, "epoch 0")],
)
def test_mismatch_is_peer_restarted_and_nothing_is_done(world: World, epoch: int, incarnation: int, says: str) -> None:
    """S52"""
    raw = opened(world)
    (reply,) = answers(world, raw, Request(epoch, incarnation, 1, "update", {}))
    assert (reply.ok, reply.error_kind) == (False, "PeerRestartedError")
    assert says in reply.error_text
    assert world.executed == []
    raw.close()


def test_request_before_any_hello_is_peer_restarted(world: World) -> None:
    raw = world.raw()
    (reply,) = answers(world, raw, Request(1, 7, 1, "update", {}))
    assert reply.error_kind == "PeerRestartedError" and world.executed == []
    raw.close()


def test_request_of_a_connection_that_was_replaced_is_peer_restarted(world: World) -> None:
    old = opened(world)
    new = opened(world)
    (reply,) = answers(world, old, Request(1, 7, 1, "update", {}))
    assert reply.error_kind == "PeerRestartedError" and "another connection" in reply.error_text
    assert answers(world, new, Request(1, 7, 1, "update", {}))[0].ok
    old.close()
    new.close()


def test_server_that_restarted_refuses_the_old_incarnations_calls(world: World) -> None:
    """S52"""
    client, channel = world.client()
    client.hello(hello(), 1.0)
    other = World(incarnation=8)
    channel._channel = other.raw()
    with pytest.raises(PeerRestartedError, match="incarnation 7; this is 8"):
        client.call("update", {}, timeout_s=1.0)
    assert other.executed == []
    other.close()


def test_new_connection_in_the_same_epoch_starts_its_sequences_afresh(world: World) -> None:
    first, _ = world.client()
    first.hello(hello(), 1.0)
    first.call("a", {}, timeout_s=1.0)
    second, _ = world.client()
    second.hello(hello(), 1.0)
    assert second.call("b", {"x": 1}, timeout_s=1.0) == {"echo": {"x": 1}}
    assert world.executed == ["hello", "a", "hello", "b"]


def test_new_epoch_cancels_what_the_old_one_had_waiting(world: World) -> None:
    raw = opened(world)
    world.executes = False
    raw.send(encode(Request(1, 7, 1, "update", {})))
    world.turn()
    world.executes = True
    client, _ = world.client()
    client.hello(hello(epoch=2), 1.0)
    world.turn()
    assert world.executed == ["hello"]
    raw.close()


def test_answer_of_a_call_that_outlived_its_session_goes_nowhere(world: World) -> None:
    raw = opened(world)
    raw.send(encode(Request(1, 7, 1, "slow", {})))
    world.server.step()
    running = world.server.next_request(0.0)
    assert running is not None
    client, channel = world.client()
    client.hello(hello(epoch=2), 1.0)
    running.reply({})
    world.turn()
    assert raw.recv(0.0) is None and channel.recv(0.0) is None
    raw.close()


# --- retries -------------------------------------------------------------------------------------------------


def test_retry_of_a_finished_call_is_answered_from_memory(world: World) -> None:
    """S83, B4"""
    client, channel = world.client()
    client.hello(hello(), 1.0)
    channel.loses_in = once(Reply)
    assert client.call("update", {"n": 1}, timeout_s=10.0) == {"echo": {"n": 1}}
    assert world.executed == ["hello", "update"]
    requests = [message for message in channel.sent if isinstance(message, Request)]
    assert len(requests) == 2 and requests[0] == requests[1]


def test_retry_of_a_running_call_joins_it(world: World) -> None:
    """S83, B4"""
    raw = opened(world)
    request = encode(Request(1, 7, 1, "slow", {}))
    raw.send(request)
    world.server.step()
    running = world.server.next_request(0.0)
    assert running is not None
    raw.send(request)
    world.turn()
    assert world.executed == [] and raw.recv(0.0) is None
    running.reply({"done": True})
    world.turn()
    assert decode(raw.recv(0.0) or b"") == Reply(1, True, {"done": True}, "", "")
    assert raw.recv(0.0) is None
    raw.close()


def test_lost_request_is_sent_again(world: World) -> None:
    """S83"""
    client, channel = world.client()
    client.hello(hello(), 1.0)
    channel.loses_out = once(Request)
    assert client.call("update", {}, timeout_s=10.0) == {"echo": {}}


def test_higher_sequence_cancels_lower_ones_not_begun(world: World) -> None:
    raw = opened(world)
    world.executes = False
    for sequence, command in ((1, "first"), (2, "second")):
        raw.send(encode(Request(1, 7, sequence, command, {})))
    world.turn()
    world.executes = True
    replies = answers(world, raw, Request(1, 7, 1, "first", {}))
    assert world.executed == ["second"]
    cancelled = next(reply for reply in replies if reply.sequence == 1)
    assert cancelled.error_kind == CancelledError.__name__ and "sequence 2 arrived" in cancelled.error_text
    raw.close()


def test_call_given_up_is_cancelled_by_the_next_one(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    world.executes = False
    with pytest.raises(WaitTimeoutError):
        client.call("stage_fwd_bwd", {}, timeout_s=1.0)
    world.executes = True
    client.call("fwd_bwd", {}, timeout_s=1.0)
    assert world.executed == ["hello", "fwd_bwd"]


# --- errors --------------------------------------------------------------------------------------------------


def test_error_crosses_with_its_class(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    with pytest.raises(UpdateDeferredError, match="step 3 is open"):
        client.call("deferred", {}, timeout_s=1.0)


def test_foreign_error_crosses_as_ours_with_its_name(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    with pytest.raises(ShmstageError, match=r"ValueError: .*not ours") as caught:
        client.call("bug", {}, timeout_s=1.0)
    assert type(caught.value) is ShmstageError


def test_error_class_that_is_not_ours_never_becomes_a_class(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    hostile = encode(Reply(0, False, {}, "SystemExit", "not a class of ours"))
    world.channel.send(world.server._session.peer, hostile)  # type: ignore[union-attr]
    with pytest.raises(ShmstageError, match="not a class of ours"):
        client.call("info", {}, timeout_s=1.0)


def test_result_that_cannot_travel_is_reported_where_it_is_made(world: World) -> None:
    raw = opened(world)
    raw.send(encode(Request(1, 7, 1, "bad", {})))
    world.server.step()
    pending = world.server.next_request(0.0)
    assert pending is not None
    with pytest.raises(ProtocolError, match=r"builtins\.tuple"):
        pending.reply({"x": (1,)})
    pending.fail(ProtocolError("no result"))  # still unanswered
    with pytest.raises(ProtocolError, match="answered already"):
        pending.reply({})
    raw.close()


def test_hostile_frames_are_refused_and_the_server_goes_on(world: World) -> None:
    raw = opened(world)
    for frame in (b"", b"\xc1", b"\xdf\xff\xff\xff\xff", encode(Reply(1, True, {}, "", "")), b"\x81" * 2000):
        raw.send(frame)
        world.turn()
        reply = decode(raw.recv(0.0) or b"")
        assert isinstance(reply, Reply) and (reply.sequence, reply.error_kind) == (0, "ProtocolError")
    assert answers(world, raw, Request(1, 7, 1, "info", {}))[0].ok
    raw.close()


def test_hostile_frames_reach_the_callers_of_a_client_as_protocol_errors(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    world.channel.send(world.server._session.peer, b"\xc1")  # type: ignore[union-attr]
    with pytest.raises(ProtocolError):
        client.events()
    assert client.call("info", {}, timeout_s=1.0) == {"echo": {}}


# --- waits ---------------------------------------------------------------------------------------------------


def test_deadline_says_what_it_waited_for_and_what_the_server_does(world: World) -> None:
    client, _ = world.client(peer=Watch())
    client.hello(hello(), 1.0)
    world.executes = False
    blocker = world.server
    with pytest.raises(WaitTimeoutError, match=r"no answer to slow \(sequence 1\) from trainer 42 within 6 s"):
        client.call("slow", {}, timeout_s=6.0)
    assert blocker.next_request(0.0) is not None  # now it runs
    with pytest.raises(WaitTimeoutError, match=r"it answered a ping \d\.\d s ago, executing slow #1; allow more"):
        client.call("next", {}, timeout_s=6.0)
    assert world.clock() == pytest.approx(112.0, abs=0.5)


def test_dead_peer_ends_a_call(world: World) -> None:
    watch = Watch()
    client, _ = world.client(peer=watch)
    client.hello(hello(), 1.0)
    world.executes = False
    watch.is_dead = True
    with pytest.raises(PeerLostError, match=r"trainer 42 is dead; it left no answer to slow \(sequence 1\)"):
        client.call("slow", {}, timeout_s=60.0)
    assert world.clock() < 101.0


def test_last_words_of_a_dead_peer_are_heard(world: World) -> None:
    watch = Watch()
    client, _ = world.client(peer=watch)
    client.hello(hello(), 1.0)
    watch.is_dead = True
    assert client.call("shutdown", {}, timeout_s=1.0) == {"echo": {}}
    world.server.emit(token(1))
    assert [event.step for event in client.events(1.0)] == [1]
    with pytest.raises(PeerLostError, match="events"):
        client.events(1.0)


@pytest.mark.parametrize(("held", "said"), [("slot 1 generation 4 (micro-batch 2.0)",) * 2, ("", "no slot")])
def test_death_of_the_peer_is_told_with_the_slots_it_held(world: World, held: str, said: str) -> None:
    """S50"""
    watch = Watch()
    client, _ = world.client(peer=watch)
    client.hello(hello(), 1.0)
    client.peer_held = lambda: held
    world.executes = False
    watch.is_dead = True
    with pytest.raises(PeerLostError, match=rf"left no answer to slow \(sequence 1\); it held {re.escape(said)}$"):
        client.call("slow", {}, timeout_s=60.0)


def test_words_still_under_way_when_the_peer_is_found_dead_are_heard(world: World) -> None:
    class Dying(Watch):
        """Answers, and dies before the client looks again."""

        def dead(self) -> bool:
            world.executes = True
            world.turn()
            return True

    client, _ = world.client()
    client.hello(hello(), 1.0)
    client.peer = Dying()  # type: ignore[assignment]
    world.executes = False
    assert client.call("shutdown", {}, timeout_s=5.0) == {"echo": {}}


def test_stop_ends_a_wait(world: World) -> None:
    stopped = [False]
    client, _ = world.client(stop=lambda: stopped[0])
    client.hello(hello(), 1.0)
    world.executes = False
    stopped[0] = True
    with pytest.raises(StoppedError, match="waiting for slow"):
        client.call("slow", {}, timeout_s=60.0)


def test_wake_ends_a_wait_for_events(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    client.wake()
    assert client.events(60.0) == []
    assert world.clock() < 101.0
    assert client.events(1.0) == []
    assert world.clock() >= 101.0


def test_client_in_two_threads_at_once_is_refused(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    refused: list[Exception] = []

    def intrude() -> None:
        try:
            client.events()
        except TransportError as error:
            refused.append(error)

    def execute(pending: Pending) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        pending.reply({})

    world.execute = execute  # type: ignore[method-assign]
    client.call("info", {}, timeout_s=1.0)
    assert len(refused) == 1 and "two threads" in str(refused[0])


# --- events --------------------------------------------------------------------------------------------------


def test_events_come_in_order_also_those_that_arrived_during_calls(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    client.call("emit", {"steps": [1, 2]}, timeout_s=1.0)
    world.server.emit(TicketEvent(0, 5, "metrics", 3, True, {"loss": 0.5}, "", {}))
    world.turn()
    events = client.events()
    assert [(event.number, event.step) for event in events] == [(1, 1), (2, 2), (3, 3)]
    assert client.events() == []


def test_event_that_was_lost_is_sent_again_in_order(world: World) -> None:
    """S82"""
    client, channel = world.client()
    client.hello(hello(), 1.0)
    channel.loses_in = once(TokenEvent)
    client.call("emit", {"steps": [1, 2, 3]}, timeout_s=1.0)
    found = client.events(1.0)
    found += client.events(1.0) if len(found) < 3 else []
    assert [event.step for event in found] == [1, 2, 3]
    asked = [message for message in channel.sent if isinstance(message, EventAck) and message.resend]
    assert len(asked) == 1  # one gap, one question, however many events show it


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_no_event_is_lost_or_doubled_whatever_the_channel_loses(losses: list[bool], bursts: list[int]) -> None:
    """S82"""
    world = World()
    client, channel = world.client()
    client.hello(hello(), 60.0)
    fate = iter(losses)
    channel.loses_in = channel.loses_out = lambda message: next(fate, False)
    sent, found = 0, []
    for burst in bursts:
        steps = list(range(sent + 1, sent + burst + 1))
        sent += burst
        client.call("emit", {"steps": steps}, timeout_s=1000.0)
        found += client.events(0.1)
    while len(found) < sent:
        assert world.clock() < 5000.0, "an event never came"
        found += client.events(10.0)
    assert [event.step for event in found + client.events(3.0)] == list(range(1, sent + 1))
    world.close()


def test_last_event_that_was_lost_is_noticed_by_the_next_ping(world: World) -> None:
    """S82"""
    client, channel = world.client()
    client.hello(hello(), 1.0)
    channel.loses_in = once(TokenEvent)
    client.call("emit", {"steps": [1]}, timeout_s=1.0)
    assert [event.step for event in client.events(5.0)] == [1]


def test_events_are_kept_until_they_are_acknowledged(world: World) -> None:
    client, channel = world.client()
    client.hello(hello(), 1.0)
    client.call("emit", {"steps": [1, 2]}, timeout_s=1.0)
    assert len(world.server._events.frames()) == 2
    client.events()
    world.turn()
    assert len(world.server._events.frames()) == 2  # there was no time: a few are not worth a frame of their own
    channel.loses_out = once(EventAck)
    client.events(0.1)
    world.turn()
    assert len(world.server._events.frames()) == 2
    client.call("emit", {"steps": [3]}, timeout_s=1.0)
    client.events(0.1)
    world.turn()
    assert world.server._events.frames() == []


def test_many_events_are_acknowledged_even_without_time_for_it(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    client.call("emit", {"steps": list(range(40))}, timeout_s=1.0)
    assert len(client.events()) == 40
    world.turn()
    assert world.server._events.frames() == []


def test_events_not_acknowledged_reach_the_next_connection_of_the_epoch(world: World) -> None:
    first, _ = world.client()
    first.hello(hello(), 1.0)
    first.call("emit", {"steps": [1, 2]}, timeout_s=1.0)
    second, _ = world.client()
    assert second.hello(hello(), 1.0).first_event == 1
    assert [event.step for event in second.events(1.0)] == [1, 2]


def test_same_client_that_says_hello_again_gets_every_event_once(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    client.call("emit", {"steps": [1, 2]}, timeout_s=1.0)
    again = Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.p", [], [[0, 2]], "/dev/shm/o.lock", 1, 2)
    client.hello(again, 1.0)
    client.call("emit", {"steps": [3]}, timeout_s=1.0)
    assert [event.step for event in client.events(1.0)] == [1, 2, 3]
    assert client.events(1.0) == []


def test_event_in_hand_when_the_client_says_hello_again_is_not_lost(world: World) -> None:
    client, channel = world.client()
    client.hello(hello(), 1.0)
    lost = [2]
    channel.loses_in = lambda m: isinstance(m, TokenEvent) and m.number in lost and lost.remove(m.number) is None
    client.call("emit", {"steps": [1, 2, 3]}, timeout_s=1.0)  # 1 is in hand, and asking for 2 acknowledged it
    again = Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.p", [], [[0, 2]], "/dev/shm/o.lock", 1, 2)
    client.hello(again, 1.0)
    found = client.events(1.0)
    while len(found) < 3:
        assert world.clock() < 200.0
        found += client.events(1.0)
    assert [event.step for event in found] == [1, 2, 3]


def test_new_epoch_sees_no_event_of_the_old_one(world: World) -> None:
    old, _ = world.client()
    old.hello(hello(), 1.0)
    old.call("emit", {"steps": [1, 2]}, timeout_s=1.0)
    new, _ = world.client()
    assert new.hello(hello(epoch=2), 1.0).first_event == 3
    new.call("emit", {"steps": [9]}, timeout_s=1.0)
    assert [(event.number, event.step) for event in new.events(1.0)] == [(3, 9)]


def test_late_event_of_another_incarnation_is_dropped(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    late = TokenEvent(1, "update", "update.1", 1, 0, True, "", {}, incarnation=6)
    world.channel.send(world.server._session.peer, encode(late))  # type: ignore[union-attr]
    assert client.events(0.5) == []


def test_event_that_cannot_travel_is_refused_where_it_is_made(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 1.0)
    with pytest.raises(ProtocolError, match=r"TicketEvent\.value"):
        world.server.emit(TicketEvent(0, 1, "metrics", 1, True, {"x": (1,)}, "", {}))
    world.server.emit(token(1))
    assert [event.number for event in client.events(1.0)] == [1]  # the refused one left no hole


def test_reply_that_comes_after_its_call_was_given_up_answers_no_other_call(world: World) -> None:
    """S83"""
    client, _ = world.client()
    client.hello(hello(), 1.0)
    world.executes = False
    with pytest.raises(WaitTimeoutError):
        client.call("slow", {"n": 1}, timeout_s=1.0)
    running = world.server.next_request(0.0)
    assert running is not None
    running.reply({"late": True})
    world.executes = True
    assert client.call("next", {"n": 2}, timeout_s=1.0) == {"echo": {"n": 2}}


def test_gap_is_asked_for_again_when_the_question_is_lost_too(world: World) -> None:
    client, channel = world.client()
    client.hello(hello(), 1.0)
    channel.loses_in, channel.loses_out = once(TokenEvent), once(EventAck)
    client.call("emit", {"steps": [1, 2, 3]}, timeout_s=1.0)
    found = client.events(1.0)
    while len(found) < 3:
        assert world.clock() < 110.0, "an event never came"
        found += client.events(1.0)
    assert [event.step for event in found] == [1, 2, 3]

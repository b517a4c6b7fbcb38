"""A call that was begun: ``answer`` looks for it without waiting, as whoever asks several servers at once does."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest
from transport.test_session import Watch, World, hello, once

from shmstage.errors import PeerLostError, ProtocolError, UpdateDeferredError
from shmstage.transport.client import RETRY_S
from shmstage.wire.messages import Pong, Reply, Request


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_nothing_is_there_before_the_server_has_run(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    pending = client.begin("echo", {"x": 1})
    assert client.answer(pending) is None
    assert "echo" not in world.executed
    world.turn()
    assert client.answer(pending) == {"echo": {"x": 1}}


def test_an_error_comes_under_its_own_class(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    pending = client.begin("deferred", {})
    world.turn()
    with pytest.raises(UpdateDeferredError) as caught:
        client.answer(pending)
    assert caught.value.from_peer


def test_what_was_lost_is_sent_again_when_it_is_due_and_runs_once(world: World) -> None:
    client, channel = world.client()
    client.hello(hello(), 5.0)
    channel.loses_in = once(Reply)
    pending = client.begin("echo", {})
    world.turn()
    for _ in range(3):
        assert client.answer(pending) is None
    requests = [message for message in channel.sent if isinstance(message, Request)]
    assert len(requests) == 1, "sent again before it was due"
    world.clock.advance(RETRY_S)
    assert client.answer(pending) is None
    world.turn()
    assert client.answer(pending) == {"echo": {}}
    assert world.executed.count("echo") == 1


def test_events_that_come_with_it_are_kept(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    pending = client.begin("emit", {"steps": [4, 5]})
    world.turn()
    assert client.answer(pending) == {}
    assert [event.step for event in client.events()] == [4, 5]


def test_only_the_newest_call_can_be_asked_for(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    older = client.begin("echo", {})
    client.begin("echo", {})
    with pytest.raises(ProtocolError, match=r"echo \(sequence 1\) was overtaken by sequence 2"):
        client.answer(older)


def test_the_last_frames_of_a_dead_server_are_waited_for_and_then_it_is_lost(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    watch = Watch()
    client.peer = watch  # type: ignore[assignment]
    pending = client.begin("echo", {})
    watch.is_dead = True
    world.clock.advance(0.2)
    assert client.answer(pending) is None
    world.turn()
    assert client.answer(pending) == {"echo": {}}, "it had answered before it died"
    unanswered = client.begin("echo", {})
    for _ in range(4):
        world.clock.advance(0.1)
        try:
            assert client.answer(unanswered) is None
        except PeerLostError as error:
            assert "trainer 42 is dead; it left no answer to echo (sequence 2)" in str(error)
            return
    pytest.fail("its death was never told")


def test_the_descriptor_tells_of_what_came_since_nothing_was_left(world: World) -> None:
    client, _ = world.client()
    client.hello(hello(), 5.0)
    waiting = select.poll()
    waiting.register(client.descriptor(), select.POLLIN)
    pending = client.begin("echo", {})
    assert client.answer(pending) is None
    assert waiting.poll(0) == []
    world.turn()
    assert waiting.poll(0)
    assert client.answer(pending) == {"echo": {}}


def test_a_server_is_silent_from_the_first_ping_that_nothing_follows(world: World) -> None:
    client, channel = world.client()
    client.hello(hello(), 5.0)
    client.events()
    world.turn()
    client.events()
    assert client.silent_s() == 0.0
    world.clock.advance(500.0)
    assert client.silent_s() == 0.0, "nobody had asked it"
    channel.loses_in = lambda message: isinstance(message, Pong)
    for _ in range(5):
        client.events()
        world.turn()
        world.clock.advance(2.0)
    assert client.silent_s() == 10.0
    channel.loses_in = lambda message: False
    client.events()
    world.turn()
    client.events()
    assert client.silent_s() == 0.0

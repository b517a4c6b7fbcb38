"""What every channel promises, run on each implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from forking import exit_code_in_forked_child

from shmstage.errors import ForkedError, PeerLostError, TransportError
from shmstage.testing.memory_channel import QUEUE_LIMIT, MemoryServerChannel
from shmstage.transport.channel import Channel, ServerChannel
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel

WAIT_S = 20.0


@dataclass
class Pair:
    server: ServerChannel
    connect: Callable[[], Channel]

    def joined(self) -> tuple[Channel, bytes]:
        """A channel that has said something, and its name at the server."""
        channel = self.connect()
        assert channel.send(b"here")
        received = self.server.recv(WAIT_S)
        assert received is not None and received[1] == b"here"
        return channel, received[0]


@pytest.fixture(params=["zmq", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened: list[Channel] = []
    server: ServerChannel
    if request.param == "zmq":
        endpoint = endpoint_for("contract", "server")
        server = ZmqServerChannel.bind(endpoint)
        make: Callable[[], Channel] = lambda: ZmqChannel.connect(endpoint)  # noqa: E731
    else:
        memory = server = MemoryServerChannel()
        make = memory.connect

    def connect() -> Channel:
        opened.append(make())
        return opened[-1]

    yield Pair(server, connect)
    for channel in opened:
        channel.close()
    server.close()


def test_frames_arrive_in_order_and_unaltered(pair: Pair) -> None:
    channel, peer = pair.joined()
    frames = [bytes([n]) * (n * 100) for n in range(1, 20)]
    for frame in frames:
        assert channel.send(frame)
    assert [pair.server.recv(WAIT_S) for _ in frames] == [(peer, frame) for frame in frames]


def test_answers_reach_the_peer_that_asked(pair: Pair) -> None:
    first, first_name = pair.joined()
    second, second_name = pair.joined()
    assert first_name != second_name
    pair.server.send(second_name, b"for the second")
    pair.server.send(first_name, b"for the first")
    assert first.recv(WAIT_S) == b"for the first"
    assert second.recv(WAIT_S) == b"for the second"


def test_a_wait_without_frames_ends_with_none(pair: Pair) -> None:
    channel = pair.connect()
    assert channel.recv(0.001) is None
    assert channel.recv(0.0) is None
    assert pair.server.recv(0.001) is None


def test_send_to_a_peer_that_is_not_there_raises(pair: Pair) -> None:
    """S82"""
    with pytest.raises(PeerLostError, match="not connected"):
        pair.server.send(b"nobody", b"frame")


def test_send_to_a_peer_that_left_raises_in_the_end(pair: Pair) -> None:
    channel, peer = pair.joined()
    channel.close()
    with pytest.raises(PeerLostError, match="not connected"):
        for _ in range(1000):  # ZeroMQ learns of it a moment later; until then frames go nowhere
            pair.server.send(peer, b"frame")
            pair.server.recv(0.01)


def test_a_queue_that_nobody_empties_refuses_instead_of_waiting(pair: Pair) -> None:
    """S82"""
    _, peer = pair.joined()
    with pytest.raises(TransportError, match="are queued"):
        for _ in range(QUEUE_LIMIT * 50):
            pair.server.send(peer, b"x" * 1000)


@pytest.mark.parametrize("end", ["server", "client"])
def test_wake_ends_a_wait_in_another_thread(pair: Pair, end: str) -> None:
    waiting: Channel | ServerChannel = pair.server if end == "server" else pair.connect()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(waiting.recv(WAIT_S)))
    thread.start()
    waiting.wake()
    thread.join(WAIT_S / 2)
    assert results == [None]


@pytest.mark.parametrize("end", ["server", "client"])
def test_wake_before_a_wait_ends_it_once(pair: Pair, end: str) -> None:
    waiting: Channel | ServerChannel = pair.server if end == "server" else pair.connect()
    waiting.wake()
    waiting.wake()
    assert waiting.recv(0.0) is None  # does not wait, so it spends no wake
    assert waiting.recv(WAIT_S) is None
    assert waiting.recv(0.001) is None


def test_closed_end_refuses_and_closes_twice(pair: Pair) -> None:
    channel, peer = pair.joined()
    for end in (channel, pair.server):
        end.close()
        end.close()
        with pytest.raises(TransportError, match="is closed"):
            end.recv(0.0)
        with pytest.raises(TransportError, match="is closed"):
            end.wake()
    with pytest.raises(TransportError, match="is closed"):
        channel.send(b"frame")
    with pytest.raises(TransportError, match="is closed"):
        pair.server.send(peer, b"frame")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_is_refused_and_the_parent_goes_on(pair: Pair) -> None:
    """S61"""
    channel, peer = pair.joined()

    def refusals() -> int:
        refused = 0
        for use in (
            lambda: channel.send(b"child"),
            lambda: channel.recv(0.0),
            lambda: channel.wake(),
            lambda: pair.server.recv(0.0),
            lambda: pair.server.send(peer, b"child"),
            lambda: pair.server.wake(),
        ):
            try:
                use()
            except ForkedError:
                refused += 1
        channel.close()
        pair.server.close()
        return refused

    assert exit_code_in_forked_child(refusals) == 6
    assert channel.send(b"parent")
    assert pair.server.recv(WAIT_S) == (peer, b"parent")

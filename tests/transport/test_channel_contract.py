"""What every channel promises, run on each implementation."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from forking import exit_code_in_forked_child

from shmstage.errors import ForkedError, PeerLostError, TransportError
from shmstage.testing.memory_channel import QUEUE_LIMIT, MemoryServerChannel
from shmstage.transport.channel import Channel, ServerChannel
from shmstage.transport.curve import ClientAuth, ServerAuth, new_keys
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

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


KINDS = ["ipc", "tcp", "memory"]


def opened_server(kind: str) -> tuple[ServerChannel, Callable[[], Channel]]:
    """A server's channel of this kind, and what connects to it."""
    if kind == "memory":
        memory = MemoryServerChannel()
        return memory, memory.connect
    if kind == "ipc":
        endpoint = endpoint_for("contract", "server")
        return ZmqServerChannel.bind(endpoint), lambda: ZmqChannel.connect(endpoint)
    keys, client = new_keys(), new_keys()
    server = ZmqServerChannel.bind_tcp("127.0.0.1", ServerAuth(keys, frozenset([client.public])))
    return server, lambda: ZmqChannel.connect_tcp(server.endpoint, ClientAuth(keys.public, client))


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened: list[Channel] = []
    server, make = opened_server(request.param)

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


def test_frame_as_long_as_a_frame_may_be_passes_in_both_directions(pair: Pair) -> None:
    channel, peer = pair.joined()
    frame = os.urandom(FRAME_LIMIT_NBYTES)
    assert channel.send(frame)
    assert pair.server.recv(WAIT_S) == (peer, frame)
    pair.server.send(peer, frame)
    assert channel.recv(WAIT_S) == frame


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


def test_one_wait_on_the_descriptors_of_several_channels_ends_for_the_one_with_a_frame(pair: Pair) -> None:
    first, _ = pair.joined()
    second, second_name = pair.joined()
    for channel in (first, second):
        assert channel.recv(0.0) is None
    waiting = select.poll()
    for channel in (first, second):
        waiting.register(channel.descriptor(), select.POLLIN)
    for number in range(20):
        pair.server.send(second_name, bytes([number]))
        received: list[bytes] = []
        while not received:  # it may become readable for what is no frame, never stay silent where there is one
            ready = {fd for fd, _ in waiting.poll(WAIT_S * 1000)}
            assert ready, f"frame {number} was not told"
            assert first.recv(0.0) is None
            while (frame := second.recv(0.0)) is not None:
                received.append(frame)
        assert received == [bytes([number])]


def test_descriptor_made_after_a_frame_came_tells_it(pair: Pair) -> None:
    channel, name = pair.joined()
    pair.server.send(name, b"one")
    pair.server.send(name, b"two")
    waiting = select.poll()
    waiting.register(channel.descriptor(), select.POLLIN)
    received: list[bytes] = []
    while len(received) < 2:
        while (frame := channel.recv(0.0)) is not None:
            received.append(frame)
        assert len(received) == 2 or waiting.poll(WAIT_S * 1000)
    assert received == [b"one", b"two"]
    while channel.recv(0.0) is not None or waiting.poll(0):
        pass  # it falls silent again: nobody spins
    channel.wake()
    assert channel.descriptor() == channel.descriptor()
    assert waiting.poll(0) == []  # it tells of frames, not of a wake
    assert channel.recv(WAIT_S) is None


def test_bytes_of_the_frames_are_counted_in_both_directions(pair: Pair) -> None:
    channel, name = pair.joined()
    assert (channel.sent_nbytes, channel.received_nbytes) == (4, 0)
    pair.server.send(name, b"x" * 1000)
    assert channel.recv(WAIT_S) == b"x" * 1000
    assert channel.send(b"y" * 100)
    assert (channel.sent_nbytes, channel.received_nbytes) == (104, 1000)


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
        channel.descriptor()
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
            lambda: channel.descriptor(),
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

    assert exit_code_in_forked_child(refusals) == 7
    assert channel.send(b"parent")
    assert pair.server.recv(WAIT_S) == (peer, b"parent")

"""Client and server over real sockets: two threads here, two processes there."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from forking import exit_code_in_forked_child

from shmstage.errors import PeerLostError, TransportError
from shmstage.memory.identity import PeerWatch
from shmstage.transport.client import Client
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.server import Server
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, Message, Ping, Pong, Reply, Request, TokenEvent, Welcome

WAIT_S = 20.0
HELLO = Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.p", [], [], "", 1, 2)
WELCOME = Welcome(PROTOCOL_VERSION, 7, 42, 9, "", {})


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(ZmqServerChannel.bind(endpoint_for("run", "trainer")), incarnation=7)
    server.start()
    yield server
    server.close()


@pytest.fixture
def channel(server: Server) -> Iterator[ZmqChannel]:
    channel = ZmqChannel.connect(endpoint_for("run", "trainer"))
    yield channel
    channel.close()


def send(channel: ZmqChannel, message: Message) -> None:
    assert channel.send(encode(message))


def receive(channel: ZmqChannel) -> Message:
    frame = channel.recv(WAIT_S)
    assert frame is not None
    return decode(frame)


def open_session(server: Server, channel: ZmqChannel) -> None:
    send(channel, HELLO)
    pending = server.next_request(WAIT_S)
    assert pending is not None and pending.hello == HELLO
    pending.welcome(WELCOME)
    assert isinstance(receive(channel), Welcome)


def test_pings_are_answered_while_the_executor_sits_in_a_long_call(server: Server, channel: ZmqChannel) -> None:
    open_session(server, channel)
    send(channel, Request(1, 7, 1, "fwd_bwd", {}))
    running = server.next_request(WAIT_S)
    assert running is not None  # from here on this thread is in the call
    for number in (1, 2):
        send(channel, Ping(number))
        assert receive(channel) == Pong(number, "fwd_bwd #1", 0)
    running.reply({})
    assert receive(channel) == Reply(1, True, {}, "", "")
    send(channel, Ping(3))
    assert receive(channel) == Pong(3, "", 0)


def test_events_are_sent_while_the_executor_sits_in_a_long_call(server: Server, channel: ZmqChannel) -> None:
    open_session(server, channel)
    send(channel, Request(1, 7, 1, "fwd_bwd", {}))
    assert server.next_request(WAIT_S) is not None
    threads = [
        threading.Thread(target=lambda: server.emit(TokenEvent(0, "fwd_bwd", "0.0@0:2", 0, 0, True, "", {})))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    numbers = []
    for _ in threads:
        event = receive(channel)
        assert isinstance(event, TokenEvent)
        numbers.append(event.number)
    for thread in threads:
        thread.join()
    assert numbers == [1, 2, 3, 4]


def test_answer_given_just_before_close_still_arrives(server: Server, channel: ZmqChannel) -> None:
    open_session(server, channel)
    send(channel, Request(1, 7, 1, "shutdown", {}))
    pending = server.next_request(WAIT_S)
    assert pending is not None
    pending.reply({"param_digest": "ab"})
    server.close()
    assert receive(channel) == Reply(1, True, {"param_digest": "ab"}, "", "")


def test_client_and_server_in_two_threads(server: Server) -> None:
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()

    def ask() -> None:
        client = Client(ZmqChannel.connect(endpoint_for("run", "trainer")))
        try:
            answers.put(client.hello(HELLO, WAIT_S))
            answers.put(client.call("echo", {"n": 1}, timeout_s=WAIT_S))
            answers.put([event.number for event in client.events(WAIT_S)])
        finally:
            client.close()

    thread = threading.Thread(target=ask)
    thread.start()
    hello = server.next_request(WAIT_S)
    assert hello is not None
    hello.welcome(WELCOME)
    echo = server.next_request(WAIT_S)
    assert echo is not None
    server.emit(TokenEvent(0, "fwd_bwd", "0.0@0:2", 0, 0, True, "", {}))
    echo.reply(echo.arguments)
    thread.join()
    assert [answers.get() for _ in range(3)][1:] == [{"n": 1}, [1]]


def test_executing_thread_receives_for_itself_while_it_has_nothing_to_do(
    server: Server, channel: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_session(server, channel)
    receiving: list[threading.Thread] = []
    on_request = server._on_request

    def noted(peer: bytes, request: Request) -> None:
        receiving.append(threading.current_thread())
        on_request(peer, request)

    monkeypatch.setattr(server, "_on_request", noted)
    assert server._receiver.borrow()
    send(channel, Request(1, 7, 1, "fwd_bwd", {}))
    while not receiving:
        server._receiver.step_borrowed(WAIT_S)
    assert receiving == [threading.current_thread()]
    server._receiver.give_back(busy=False)
    running = server.next_request(WAIT_S)  # from here on this thread is in the call
    assert running is not None and running.command == "fwd_bwd"
    send(channel, Request(1, 7, 2, "update", {}))
    send(channel, Ping(1))
    assert receive(channel) == Pong(1, "fwd_bwd #1", 0)
    assert receiving[1:] == [server._receiver._thread]


def test_error_while_the_executing_thread_receives_is_reported_to_everybody(
    server: Server, channel: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(peer: bytes, frame: bytes) -> None:
        raise RuntimeError("broken")

    assert server._receiver.borrow()
    monkeypatch.setattr(server._receiver, "_on_frame", broken)
    send(channel, Ping(1))
    with pytest.raises(TransportError, match="has stopped: broken"):
        while True:
            server._receiver.step_borrowed(WAIT_S)
    server._receiver.give_back(busy=False)
    with pytest.raises(TransportError, match="has stopped: broken"):
        server.next_request(0.0)
    with pytest.raises(TransportError, match="has stopped"):
        server.emit(TokenEvent(0, "fwd_bwd", "0.0@0:2", 0, 0, True, "", {}))


def test_close_waits_for_the_executing_thread_to_stop_receiving_and_leaves_no_trace_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def serve() -> None:
        try:
            while True:
                server.next_request(4 * WAIT_S)
        except TransportError as error:
            said.append(str(error))

    receives = threading.Event()
    step = server._receiver.step_borrowed

    def noted(timeout_s: float) -> int:
        if timeout_s > 0:
            receives.set()
        return step(timeout_s)

    monkeypatch.setattr(server._receiver, "step_borrowed", noted)
    waiting = threading.Thread(target=serve)
    waiting.start()
    assert receives.wait(WAIT_S)
    server.close()
    waiting.join(WAIT_S)
    assert said == ["shmstage-server is closed"]
    assert caplog.records == []


def test_two_threads_may_close_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = server._receiver._channel
    closing, go_on, raised = threading.Event(), threading.Event(), []
    shut = channel.close

    def slowly() -> None:
        shut()
        closing.set()
        assert go_on.wait(WAIT_S)

    def close() -> None:
        try:
            server.close()
        except Exception as error:
            raised.append(error)

    monkeypatch.setattr(channel, "close", slowly)
    threads = [threading.Thread(target=close) for _ in range(2)]
    threads[0].start()
    assert closing.wait(WAIT_S)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert raised == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_close_in_a_forked_child_waits_for_no_lock_of_another_thread(server: Server) -> None:
    receiver = server._receiver

    def closes() -> int:
        server.close()
        return 7

    with receiver._closing._cond:  # as the receiving thread may hold it at the fork; the turn it has while it waits
        assert exit_code_in_forked_child(closes) == 7


def test_wake_ends_a_wait_for_events_and_is_kept_for_the_next_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = ZmqChannel.connect(endpoint_for("run", "trainer"))
    client, wakes = Client(channel), []
    wake = channel.wake
    monkeypatch.setattr(channel, "wake", lambda: (wakes.append(1), wake()))
    try:
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.extend([client.events(4 * WAIT_S), "over"]))
        waiting.start()
        while not client._listening:
            os.sched_yield()
        client.wake()
        waiting.join(WAIT_S)
        assert (found, wakes) == ([[], "over"], [1])
        client.wake()
        assert wakes == [1]  # nobody waits: the next to come looks
        assert client.events(4 * WAIT_S) == []
    finally:
        client.close()


def test_receiving_thread_that_died_is_reported_to_everybody(
    server: Server, channel: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(message: Message) -> bytes:
        raise RuntimeError("broken")

    monkeypatch.setattr("shmstage.transport.server.encode", broken)
    send(channel, Ping(1))
    assert server._waiting.get(timeout=WAIT_S) is None  # nobody sits out a timeout for a thread that is gone
    with pytest.raises(TransportError, match="has stopped: broken"):
        server.next_request(0.0)
    with pytest.raises(TransportError, match="has stopped"):
        server.emit(TokenEvent(0, "fwd_bwd", "0.0@0:2", 0, 0, True, "", {}))


@pytest.mark.slow
def test_trainer_killed_in_a_call_is_peer_lost() -> None:
    endpoint = endpoint_for("run", "victim")
    code = f"""
import os, signal
from shmstage.memory.identity import ProcessIdentity
from shmstage.transport.server import Server
from shmstage.transport.zmq import ZmqServerChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Welcome
identity = ProcessIdentity.create("run", "trainer")
print(identity.lock_path, flush=True)
server = Server(ZmqServerChannel.bind({endpoint!r}), incarnation=7)
server.start()
me = identity.pid, identity.start_ticks, identity.lock_path
server.next_request(20).welcome(Welcome(PROTOCOL_VERSION, 7, *me, {{}}))
server.next_request(20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    client = Client(ZmqChannel.connect(endpoint))
    assert process.stdout is not None
    lock_path = process.stdout.readline().strip()
    try:
        welcome = client.hello(HELLO, WAIT_S)
        client.peer = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
        with pytest.raises(PeerLostError, match=rf"trainer {process.pid} .*is dead; it left no answer to fwd_bwd"):
            client.call("fwd_bwd", {}, timeout_s=WAIT_S)
        client.peer.close()
    finally:
        client.close()
        process.kill()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        os.unlink(lock_path)
        ZmqServerChannel.bind(endpoint).close()  # takes the dead one's socket file with it

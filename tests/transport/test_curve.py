"""Between hosts: who gets in, who is told that it does not, and what survives a cut network."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from errno import EAGAIN, ECONNRESET, EPIPE

import pytest
import zmq
from forwarder import Forwarder, hear_out

from shmstage.errors import AuthError, InputError, PeerLostError, TransportError
from shmstage.transport.channel import Channel
from shmstage.transport.client import Client
from shmstage.transport.curve import (
    OVERHEAD_NBYTES,
    REFUSALS,
    ClientAuth,
    CurveKeys,
    HandshakeWatch,
    ServerAuth,
    are_a_pair,
    is_key,
    new_keys,
)
from shmstage.transport.server import Server
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.codec import FRAME_LIMIT_NBYTES
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, TokenEvent, Welcome

WAIT_S = 20.0
SERVER, CLIENT, STRANGER = new_keys(), new_keys(), new_keys()
LOCAL = "127.0.0.1"
HELLO = Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.p", [], [], "", 1, 2)
WELCOME = Welcome(PROTOCOL_VERSION, 7, 42, 9, "", {})
Connect = Callable[..., ZmqChannel]


@pytest.fixture
def server() -> Iterator[ZmqServerChannel]:
    server = ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([CLIENT.public])))
    yield server
    server.close()


@pytest.fixture
def connect(server: ZmqServerChannel) -> Iterator[Connect]:
    opened: list[ZmqChannel] = []

    def connect(endpoint: str = "", *, server_public: str = SERVER.public, keys: CurveKeys = CLIENT) -> ZmqChannel:
        opened.append(ZmqChannel.connect_tcp(endpoint or server.endpoint, ClientAuth(server_public, keys)))
        return opened[-1]

    yield connect
    for channel in opened:
        channel.close()


def error_of(channel: Channel, server: ZmqServerChannel) -> AuthError:
    """What the channel raises, while the server receives, too, as a living one does. The timeout is pytest's."""
    ended = threading.Event()
    arrived: list[object] = []

    def receive() -> None:
        while not ended.is_set():
            received = server.recv(WAIT_S)
            if received is not None:
                arrived.append(received)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        with pytest.raises(AuthError) as raised:
            assert channel.send(b"secret")
            while True:
                channel.recv(WAIT_S)
    finally:
        ended.set()
        server.wake()
        thread.join(WAIT_S)
    assert arrived == []
    for call in (lambda: channel.send(b"again"), lambda: channel.recv(0.0)):
        with pytest.raises(AuthError):  # it stays so
            call()
    return raised.value


def exchange(server: ZmqServerChannel, channel: Channel) -> bytes:
    """One frame there and one back; the client's name."""
    assert channel.send(b"question")
    received = server.recv(WAIT_S)
    assert received is not None and received[1] == b"question"
    server.send(received[0], b"answer")
    assert channel.recv(WAIT_S) == b"answer"
    return received[0]


# --- keys ----------------------------------------------------------------------------------------------------


def test_client_on_the_list_with_the_right_server_key_gets_in(server: ZmqServerChannel, connect: Connect) -> None:
    exchange(server, connect())


def test_client_that_expects_another_server_key_gets_an_auth_error(server: ZmqServerChannel, connect: Connect) -> None:
    """S86: the frames do not reach whoever listens there instead."""
    error = error_of(connect(server_public=STRANGER.public), server)
    assert server.endpoint in str(error) and STRANGER.public in str(error) and "peers files" in str(error)


def test_client_off_the_list_gets_an_auth_error(
    server: ZmqServerChannel, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """S86"""
    error = error_of(connect(keys=STRANGER), server)
    assert STRANGER.public in str(error) and "allow-list" in str(error)
    assert STRANGER.public in caplog.text and "127.0.0.1" in caplog.text  # the other end can be asked, too
    assert STRANGER.secret not in str(error) + caplog.text


def test_secret_key_is_not_shown() -> None:
    assert CLIENT.secret not in repr(CLIENT) + repr(ClientAuth(SERVER.public, CLIENT))


def test_keys_are_known_by_their_spelling() -> None:
    assert is_key(CLIENT.public) and are_a_pair(CLIENT)
    assert not are_a_pair(CurveKeys(CLIENT.public, STRANGER.secret))
    for wrong in ("", CLIENT.public[:39], CLIENT.public + "0", "~" * 40, "#" * 40, CLIENT.public[:39] + "\n"):
        assert not is_key(wrong)
        with pytest.raises(InputError, match="key"):
            ZmqChannel.connect_tcp("tcp://127.0.0.1:9", ClientAuth(wrong, CLIENT))
        with pytest.raises(InputError, match="key"):
            ZmqChannel.connect_tcp("tcp://127.0.0.1:9", ClientAuth(SERVER.public, CurveKeys(wrong, CLIENT.secret)))
        with pytest.raises(InputError, match="key"):
            ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(CurveKeys(SERVER.public, wrong), frozenset()))
        with pytest.raises(InputError, match="key"):
            ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([wrong])))


# --- strangers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_client_without_curve_is_not_let_in(server: ZmqServerChannel, connect: Connect, mechanism: str) -> None:
    """S86: whoever reaches the port of another host without a key reaches nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        if mechanism == "plain":
            stranger.plain_username, stranger.plain_password = b"admin", b"admin"
        refused = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(server.endpoint)
        stranger.send(b"let me in")
        while not refused.poll(0):
            server.recv(0.01)
        exchange(server, connect())  # what it receives is not the stranger's
        assert server.recv(0.0) is None
        stranger.disable_monitor()


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\3\1" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
HELLO_COMMAND = b"\4\xc8\5HELLO\1\0" + b"\0" * 72 + b"key!" * 8 + b"nonce!!!" + b"box!" * 20


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, GREETING[:30], GREETING, GREETING + HELLO_COMMAND],
    ids=["nothing", "http", "zeros", "half a greeting", "a greeting", "a forged hello"],
)
def test_what_is_no_zeromq_is_turned_away(server: ZmqServerChannel, connect: Connect, said: bytes) -> None:
    """S86"""
    hear_out(int(server.endpoint.rsplit(":", 1)[1]), said)
    exchange(server, connect())
    assert server.recv(0.0) is None


def test_server_without_curve_is_an_auth_error(connect: Connect, server: ZmqServerChannel) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        error_of(connect(f"tcp://127.0.0.1:{port}"), server)
        assert stranger.poll(0) == 0


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["ssh", "http", "shut"]
)
def test_another_program_at_the_port_is_an_auth_error(connect: Connect, server: ZmqServerChannel, said: bytes) -> None:
    listening = socket.create_server((LOCAL, 0))
    port = listening.getsockname()[1]

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listening.accept()
                with end:
                    end.sendall(said)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert str(port) in str(error_of(connect(f"tcp://127.0.0.1:{port}"), server))
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
    listening.close()


# --- what is no wrong key ------------------------------------------------------------------------------------


CONNECTED, CLOSED = (int(zmq.EVENT_CONNECTED), 5), (int(zmq.EVENT_CLOSED), 9)
LET_IN, GONE = (int(zmq.EVENT_HANDSHAKE_SUCCEEDED), 0), (int(zmq.EVENT_DISCONNECTED), 5)
SHUT_OUT, RESET, SLOW = ((int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), e) for e in (EPIPE, ECONNRESET, EAGAIN))
REFUSED = [CONNECTED, SHUT_OUT, GONE]


@pytest.mark.parametrize(
    ("told", "hopeless"),
    [
        (REFUSED * (REFUSALS - 1), False),
        (REFUSED * REFUSALS, True),
        ([CONNECTED, RESET, GONE] * REFUSALS, True),
        ([CLOSED] * 100, False),
        ([*REFUSED, CLOSED] * 100, False),
        ([*REFUSED, *REFUSED, CONNECTED, LET_IN, GONE] * 100, False),
        ([CONNECTED, SLOW, GONE] * 100, False),
        ([CONNECTED, LET_IN, GONE] * 100, False),
        ([CONNECTED, GONE], True),
        ([CONNECTED, (int(zmq.EVENT_HANDSHAKE_FAILED_AUTH), 400)], True),
        ([CONNECTED, (int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), 0x11000002)], True),
    ],
    ids=[
        "dies in handshakes", "closes every handshake", "resets every handshake", "is not there", "keeps dying",
        "dies, but let us in", "slow", "lets us in and ends", "gives no greeting", "does not know us", "no curve",
    ],
)  # fmt: skip
def test_what_the_attempts_say_of_the_server(connect: Connect, told: list[tuple[int, int]], hopeless: bool) -> None:
    watch = connect()._socket._attendant
    assert isinstance(watch, HandshakeWatch)
    said = [watch._take(event, value) for event, value in told]
    assert any(said) is hopeless


def test_server_that_is_slow_to_let_anyone_in_is_no_wrong_key(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel takes the connection, nobody answers: stopped, or not receiving yet."""
    monkeypatch.setattr("shmstage.transport.curve.HANDSHAKE_MS", 10)
    with contextlib.ExitStack() as taken:
        silent = taken.enter_context(socket.create_server((LOCAL, 0)))
        channel = connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(2 * REFUSALS):
            taken.enter_context(silent.accept()[0])
            assert channel.recv(0.0) is None
        assert channel.send(b"waits in the queue")


def test_server_that_died_in_a_handshake_is_no_wrong_key(server: ZmqServerChannel, connect: Connect) -> None:
    with Forwarder(int(server.endpoint.rsplit(":", 1)[1])) as network:
        network.refuse_next(REFUSALS - 1)
        channel = connect(network.endpoint)
        name = exchange(server, channel)
        network.refuse_next(REFUSALS - 1)
        network.reset()
        while (received := sent_until_received(server, channel)) is None:
            pass
        assert received[0] == name


# --- limits --------------------------------------------------------------------------------------------------


def test_every_tcp_socket_has_its_limits_set(server: ZmqServerChannel, connect: Connect) -> None:
    """S81, S82"""
    for end in (server, connect()):
        raw = end._socket.raw
        assert raw.getsockopt(zmq.LINGER) == (500 if end is server else 100)
        assert raw.getsockopt(zmq.SNDHWM) == raw.getsockopt(zmq.RCVHWM) == 1000
        assert raw.getsockopt(zmq.MAXMSGSIZE) == FRAME_LIMIT_NBYTES + OVERHEAD_NBYTES
        assert raw.getsockopt(zmq.MECHANISM) == zmq.CURVE
        assert 0 < raw.getsockopt(zmq.HEARTBEAT_IVL) < raw.getsockopt(zmq.HEARTBEAT_TIMEOUT)
        assert raw.getsockopt(zmq.HEARTBEAT_TIMEOUT) == raw.getsockopt(zmq.HEARTBEAT_TTL)
    # a slow server is given up by the client: were it the other way round, it would look like a refusal
    assert raw.getsockopt(zmq.HANDSHAKE_IVL) < server._socket.raw.getsockopt(zmq.HANDSHAKE_IVL)
    assert server._socket.raw.getsockopt(zmq.CURVE_SERVER) == 1


def test_frame_over_the_limit_ends_its_connection_and_the_next_one_serves(
    server: ZmqServerChannel, connect: Connect
) -> None:
    channel = connect()
    name = exchange(server, channel)
    channel.send(b"x" * (FRAME_LIMIT_NBYTES + 1))
    while (received := sent_until_received(server, channel)) is None:
        pass
    assert received == (name, b"again")


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc:///tmp/x", "tcp://0.0.0.0:4000", "tcp://*:4000", "tcp://[::]:4000", "tcp://localhost:4000",
        "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:4000/", "tcp://1.2.3:4000",
        "tcp://127.0.0.1;10.0.0.1:4000", "tcp://224.0.0.1:4000", "tcp://127.0.0.1:4000\n", "tcp://256.0.0.1:1", "",
    ],
)  # fmt: skip
def test_endpoint_of_no_single_host_is_refused(endpoint: str) -> None:
    """S86"""
    with pytest.raises(TransportError, match=r"is refused|no address of one host"):
        ZmqChannel.connect_tcp(endpoint, ClientAuth(SERVER.public, CLIENT))


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "*", "", "localhost", "127.0.0.1:80", "eth0", "fe80::1%eth0"])
def test_address_that_is_open_to_every_network_or_a_name_is_not_bound(address: str) -> None:
    """S86"""
    with pytest.raises(TransportError, match="no address of one host; give a numeric one"):
        ZmqServerChannel.bind_tcp(address, ServerAuth(SERVER, frozenset()))


def test_address_of_another_host_cannot_be_bound() -> None:
    with pytest.raises(TransportError, match=r"cannot listen at tcp://192\.0\.2\.1:0: .*name an address of this host"):
        ZmqServerChannel.bind_tcp("192.0.2.1", ServerAuth(SERVER, frozenset()))


def test_address_of_the_sixth_version_serves_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no ::1 here: {error}")
    server = ZmqServerChannel.bind_tcp("::1", ServerAuth(SERVER, frozenset([CLIENT.public])))
    channel = ZmqChannel.connect_tcp(server.endpoint, ClientAuth(SERVER.public, CLIENT))
    assert server.endpoint.startswith("tcp://[::1]:")
    exchange(server, channel)
    channel.close()
    server.close()


def test_tcp_channels_that_nobody_closed_do_not_hang_the_collector() -> None:
    """S81"""

    def forget() -> None:
        server = ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([CLIENT.public])))
        channel = ZmqChannel.connect_tcp(server.endpoint, ClientAuth(SERVER.public, CLIENT))
        exchange(server, channel)
        channel.descriptor()
        kept: list[object] = [server, channel]
        kept.append(kept)

    before = len(os.listdir("/proc/self/fd"))
    forget()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- a network that fails ------------------------------------------------------------------------------------


def test_connection_that_breaks_is_made_anew_under_the_same_name(server: ZmqServerChannel, connect: Connect) -> None:
    with Forwarder(int(server.endpoint.rsplit(":", 1)[1])) as network:
        channel = connect(network.endpoint)
        name = exchange(server, channel)
        network.reset()
        while (received := sent_until_received(server, channel)) is None:
            pass
        assert received[0] == name
        server.send(name, b"answer")
        assert channel.recv(WAIT_S) == b"answer"


def test_client_that_is_back_before_its_loss_was_noticed_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmstage.transport.curve.HEARTBEAT_TIMEOUT_MS", 3_600_000)
    server = ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([CLIENT.public])))
    with Forwarder(int(server.endpoint.rsplit(":", 1)[1])) as network:
        channel = ZmqChannel.connect_tcp(network.endpoint, ClientAuth(SERVER.public, CLIENT))
        name = exchange(server, channel)
        network.lose()
        while (received := sent_until_received(server, channel)) is None:
            pass
        assert received[0] == name
        server.send(name, b"answer")
        assert channel.recv(WAIT_S) == b"answer"
        channel.close()
        server.close()


@pytest.mark.slow
def test_host_that_is_cut_off_is_noticed_by_both_ends_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of a connection is told that the other one's host is gone: without heartbeats both would wait for ever."""
    monkeypatch.setattr("shmstage.transport.curve.HEARTBEAT_MS", 50)
    monkeypatch.setattr("shmstage.transport.curve.HEARTBEAT_TIMEOUT_MS", 1000)
    server = ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([CLIENT.public])))
    with Forwarder(int(server.endpoint.rsplit(":", 1)[1])) as network:
        channel = ZmqChannel.connect_tcp(network.endpoint, ClientAuth(SERVER.public, CLIENT))
        while (received := sent_until_received(server, channel)) is None:
            pass
        name = received[0]
        network.refuse_next(1 << 30)
        network.cut()
        with pytest.raises(PeerLostError, match="not connected"):
            while True:
                server.send(name, b"into the void")
                server.recv(0.02)
        network.refuse_next(0)
        while (received := sent_until_received(server, channel)) is None:
            pass
        assert received[0] == name
        channel.close()
        server.close()


def sent_until_received(server: ZmqServerChannel, channel: ZmqChannel) -> tuple[bytes, bytes] | None:
    """One try of a client that does not know whether its frame was lost."""
    assert channel.send(b"again")
    channel.recv(0.0)
    return server.recv(0.02)


# --- what is built on it -------------------------------------------------------------------------------------


def test_wait_on_a_descriptor_ends_for_a_wrong_key(server: ZmqServerChannel, connect: Connect) -> None:
    channel = connect(server_public=STRANGER.public)
    waiting = select.poll()
    waiting.register(channel.descriptor(), select.POLLIN)
    with pytest.raises(AuthError):
        while channel.recv(0.0) is None:
            assert waiting.poll(WAIT_S * 1000)


def test_client_says_hello_calls_and_hears_events_over_tcp(server: ZmqServerChannel, connect: Connect) -> None:
    served = Server(server, incarnation=7)
    served.start()

    def serve() -> None:
        hello = served.next_request(WAIT_S)
        assert hello is not None
        hello.welcome(WELCOME)
        call = served.next_request(WAIT_S)
        assert call is not None
        served.emit(TokenEvent(0, "fwd_bwd", "0.0@0:2", 0, 0, True, "", {}))
        call.reply({"done": call.command})

    thread = threading.Thread(target=serve)
    thread.start()
    client = Client(connect())
    assert client.hello(HELLO, WAIT_S).incarnation == 7
    assert client.call("info", {}, timeout_s=WAIT_S) == {"done": "info"}
    assert [event.number for event in client.events(WAIT_S)] == [1]
    thread.join(WAIT_S)
    with pytest.raises(AuthError, match="allow-list"):
        Client(connect(keys=STRANGER)).hello(HELLO, WAIT_S)
    with pytest.raises(AuthError, match="server key"):
        Client(connect(server_public=STRANGER.public)).hello(HELLO, WAIT_S)
    served.close()

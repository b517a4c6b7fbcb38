"""Between hosts: who gets in, who is told that it does not, and what survives a cut network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from shmstage.errors import AuthError, InputError
from shmstage.transport.channel import Channel
from shmstage.transport.curve import ClientAuth, CurveKeys, ServerAuth, are_a_pair, is_key, new_keys
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel

WAIT_S = 20.0
SERVER, CLIENT, STRANGER = new_keys(), new_keys(), new_keys()
LOCAL = "127.0.0.1"
Connect = Callable[..., ZmqChannel]


@pytest.fixture
def server() -> Iterator[ZmqServerChannel]:
    server = ZmqServerChannel.bind_tcp(LOCAL, ServerAuth(SERVER, frozenset([CLIENT.public])))
    yield server
    server.close()


@pytest.fixture
def connect(server: ZmqServerChannel) -> Iterator[Connect]:
    opened: list[ZmqChannel] = []

    def connect(
        endpoint: str = "", *, server_public: str = SERVER.public, keys: CurveKeys = CLIENT
    ) -> ZmqChannel:
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


def test_client_that_expects_another_server_key_gets_an_auth_error(
    server: ZmqServerChannel, connect: Connect
) -> None:
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

"""What only the ZeroMQ channels have: a path, an owner, a size limit, a socket file."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shmstage.errors import EndpointBusyError, TransportError
from shmstage.transport.endpoint_lock import EndpointLock, clear_stale_endpoints
from shmstage.transport.endpoints import PATH_LIMIT_NBYTES, endpoint_for, runtime_dir, socket_path
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.codec import FRAME_LIMIT_NBYTES

WAIT_S = 20.0


@pytest.fixture
def endpoint() -> str:
    return endpoint_for("run", "trainer")


@pytest.fixture
def server(endpoint: str) -> Iterator[ZmqServerChannel]:
    server = ZmqServerChannel.bind(endpoint)
    yield server
    server.close()


# --- paths ---------------------------------------------------------------------------------------------------


def test_both_ends_compute_the_same_short_path() -> None:
    """S79"""
    path = socket_path(endpoint_for("run" * 100, "trainer" * 100))
    assert path == socket_path(endpoint_for("run" * 100, "trainer" * 100))
    assert len(os.fsencode(path)) <= PATH_LIMIT_NBYTES
    assert endpoint_for("a", "bc") != endpoint_for("ab", "c")
    assert endpoint_for("a", "b") != endpoint_for("a", "c")


def test_long_temporary_directory_still_gives_a_path_that_binds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S79"""
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(long))
    endpoint = endpoint_for(f"long {os.getpid()}", "trainer")
    assert len(os.fsencode(socket_path(endpoint))) <= PATH_LIMIT_NBYTES
    ZmqServerChannel.bind(endpoint).close()


def test_longest_base_directory_that_is_used_still_fits_with_its_lock_file() -> None:
    """S79"""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for nbytes in range(40, PATH_LIMIT_NBYTES):
            directory = Path(base) / ("x" * (nbytes - len(base)))
            directory.mkdir()
            path = runtime_dir({"TMPDIR": str(directory)})
            assert len(os.fsencode(path / "12345678-0123456789abcdef.lock")) <= PATH_LIMIT_NBYTES


def test_runtime_directory_is_private_to_the_user(nothing_survives: Path) -> None:
    """S86"""
    environ = {"XDG_RUNTIME_DIR": str(nothing_survives)}
    path = runtime_dir(environ)
    assert path.parent == nothing_survives
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o755)
    assert stat.S_IMODE(runtime_dir(environ).stat().st_mode) == 0o700


def test_runtime_directory_that_is_a_link_is_refused(nothing_survives: Path, tmp_path: Path) -> None:
    (nothing_survives / f"shmstage-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(TransportError, match="not a directory of user"):
        runtime_dir({"XDG_RUNTIME_DIR": str(nothing_survives)})


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "ipc://relative", "/tmp/x", f"ipc:///{'x' * 107}"])
def test_endpoint_that_is_open_to_others_or_too_long_is_refused(endpoint: str) -> None:
    """S79, S86"""
    with pytest.raises(TransportError, match=r"refused|107"):
        ZmqServerChannel.bind(endpoint)
    with pytest.raises(TransportError, match=r"refused|107"):
        ZmqChannel.connect(endpoint)


# --- one owner -----------------------------------------------------------------------------------------------


def test_second_bind_is_refused_and_the_first_keeps_its_clients(server: ZmqServerChannel, endpoint: str) -> None:
    """S80"""
    with pytest.raises(EndpointBusyError, match="owned by a living process"):
        ZmqServerChannel.bind(endpoint)
    channel = ZmqChannel.connect(endpoint)
    channel.send(b"frame")
    received = server.recv(WAIT_S)
    assert received is not None and received[1] == b"frame"
    channel.close()


@pytest.mark.slow
def test_second_bind_of_another_process_is_refused(server: ZmqServerChannel, endpoint: str) -> None:
    """S80"""
    code = f"from shmstage.transport.zmq import ZmqServerChannel; ZmqServerChannel.bind({endpoint!r})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "EndpointBusyError" in found.stderr


def test_close_leaves_neither_socket_nor_lock_file(endpoint: str) -> None:
    ZmqServerChannel.bind(endpoint).close()
    assert list(socket_path(endpoint).parent.iterdir()) == []


@pytest.mark.slow
def test_path_is_free_again_after_its_owner_was_killed(endpoint: str) -> None:
    """S85"""
    code = (
        "import os, signal; from shmstage.transport.zmq import ZmqServerChannel; "
        f"kept = ZmqServerChannel.bind({endpoint!r}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert socket_path(endpoint).is_socket()
    ZmqServerChannel.bind(endpoint).close()
    assert not socket_path(endpoint).exists()


def test_socket_that_somebody_answers_on_is_left_alone(endpoint: str) -> None:
    """S85"""
    path = socket_path(endpoint)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(EndpointBusyError, match="somebody answers"):
            ZmqServerChannel.bind(endpoint)
        assert path.is_socket()
    path.unlink()


def test_file_that_is_no_socket_is_left_alone(endpoint: str) -> None:
    """S85"""
    path = socket_path(endpoint)
    path.write_text("precious")
    with pytest.raises(TransportError, match="is not a socket"):
        ZmqServerChannel.bind(endpoint)
    assert path.read_text() == "precious"
    path.unlink()


def test_socket_of_another_user_is_left_alone(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S39, S85"""
    path = socket_path(endpoint)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(TransportError, match="not 12345"):
        ZmqServerChannel.bind(endpoint)
    assert path.is_socket()
    path.unlink()


def test_forked_child_does_not_keep_the_path_locked(endpoint: str) -> None:
    lock = EndpointLock(socket_path(endpoint))
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os.close(done_write)
        os.write(ready_write, b"1")
        os.read(done_read, 1)  # lives longer than the owner's hold
        os._exit(0)
    os.read(ready_read, 1)
    lock._give_up.detach()
    os.close(lock._fd)  # as the kernel does when the owner is killed
    again = EndpointLock(socket_path(endpoint))
    again.release()
    for fd in (done_write, done_read, ready_read, ready_write):
        os.close(fd)
    assert os.waitpid(child, 0)[1] == 0


# --- sockets -------------------------------------------------------------------------------------------------


def test_every_socket_has_its_limits_set(server: ZmqServerChannel, endpoint: str) -> None:
    """S81, S82, S83"""
    channel = ZmqChannel.connect(endpoint)
    for end in (server, channel):
        raw = end._socket.raw
        assert raw.getsockopt(zmq.LINGER) == (500 if end is server else 100)
        assert raw.getsockopt(zmq.SNDHWM) == raw.getsockopt(zmq.RCVHWM) == 1000
        assert raw.getsockopt(zmq.MAXMSGSIZE) == FRAME_LIMIT_NBYTES
        # never PUB and SUB, which drop at the mark without a word, never REQ, which a lost reply leaves stuck
        assert raw.getsockopt(zmq.TYPE) == (zmq.ROUTER if end is server else zmq.DEALER)
    channel.close()


@pytest.mark.slow
def test_close_with_frames_nobody_takes_ends_by_its_deadline(server: ZmqServerChannel, endpoint: str) -> None:
    """S81"""
    channel = ZmqChannel.connect(endpoint)
    while channel.send(b"x" * 100_000):
        pass  # fills every buffer on the way
    begun = time.monotonic()
    channel.close()
    assert time.monotonic() - begun < 5.0  # the linger is a tenth of a second; without it this never ends


def test_channel_that_nobody_closed_does_not_hang_the_collector(endpoint: str) -> None:
    """S81"""
    def forget() -> None:
        kept = [ZmqServerChannel.bind(endpoint), ZmqChannel.connect(endpoint)]
        kept[1].send(b"frame")  # type: ignore[union-attr, call-arg]
        kept.append(kept)  # type: ignore[arg-type]

    forget()
    gc.collect()  # pyzmq by itself waits here for ever
    ZmqServerChannel.bind(endpoint).close()  # and the path is free again


def test_frame_over_the_limit_never_arrives(server: ZmqServerChannel, endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint)
    channel.send(b"x" * (FRAME_LIMIT_NBYTES + 1))
    assert server.recv(0.1) is None
    channel.close()


def test_sender_that_may_have_spent_the_receivers_signal_wakes_it(server: ZmqServerChannel, endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint)
    channel.send(b"first")
    received = server.recv(WAIT_S)
    assert received is not None
    channel.send(b"second")
    waker = select.poll()
    waker.register(server._socket._waker.fd, select.POLLIN)
    server._socket.raw.poll(WAIT_S * 1000)  # has arrived, and looking has spent the descriptor's signal
    server.send(received[0], b"answer")
    assert waker.poll(0) == []  # nobody waits, and whoever comes looks first
    server._socket._waiting = True  # as a thread that sits in recv has left it
    server.send(received[0], b"answer")
    assert waker.poll(0) != []
    assert server.recv(0.0) == (received[0], b"second")
    channel.close()


def test_message_of_several_parts_arrives_as_an_empty_frame(server: ZmqServerChannel, endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint)
    channel.send(b"first")
    channel._socket.raw.send_multipart([b"a", b"b"])
    assert [server.recv(WAIT_S)[1] for _ in range(2)] == [b"first", b""]  # type: ignore[index]
    channel.close()


def test_channel_opened_before_the_server_connects_once_it_is_up(endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint)
    assert channel.send(b"early")
    server = ZmqServerChannel.bind(endpoint)
    received = server.recv(WAIT_S)
    assert received is not None and received[1] == b"early"
    channel.close()
    server.close()


def test_answer_sent_just_before_the_server_closed_still_arrives(endpoint: str) -> None:
    server, channel = ZmqServerChannel.bind(endpoint), ZmqChannel.connect(endpoint)
    channel.send(b"question")
    received = server.recv(WAIT_S)
    assert received is not None
    server.send(received[0], b"answer")
    server.close()
    assert channel.recv(WAIT_S) == b"answer"
    channel.close()


def test_channel_keeps_its_name_over_a_server_restart(endpoint: str) -> None:
    channel = ZmqChannel.connect(endpoint)
    names = []
    for _ in range(2):
        server = ZmqServerChannel.bind(endpoint)
        received = None
        while received is None:
            channel.send(b"frame")
            received = server.recv(0.01)
        names.append(received[0])
        server.close()
    assert names[0] == names[1]
    channel.close()


def test_only_endpoints_of_the_dead_are_cleared(nothing_survives: Path) -> None:
    """S85"""
    alive, dead, gone = (nothing_survives / name for name in ("alive", "dead", "gone"))
    lock = EndpointLock(alive)
    dead.with_name("dead.lock").touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    paths = [alive, dead, gone]
    assert clear_stale_endpoints(paths, dry_run=True) == [dead]
    assert dead.exists()
    assert clear_stale_endpoints(paths) == [dead]
    assert sorted(p.name for p in nothing_survives.iterdir()) == ["alive.lock"]
    lock.release()

"""Two trainers as a launcher starts them on two hosts: peers files, CURVE over tcp, one pool per host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer.packed_by_seed import packed_layout, packed_microbatch
from trainer.test_distributed import environment, free_port
from trainer.test_main import DEADLINE_S, call, resolved

from shmstage.errors import PeerLostError, SettingsError, WaitTimeoutError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import list_objects, sweep
from shmstage.records import read_failure, read_json
from shmstage.settings import Settings
from shmstage.transport.client import Client
from shmstage.transport.curve import ClientAuth, CurveKeys, new_keys
from shmstage.transport.peers_file import HostFile, write_host_file
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, TokenEvent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = f"distributed-main-test-{os.getpid()}"
START_S = 150.0
ENGINE = {"policy": "fresh", "d_model": 16, "layers": 1, "heads": 2, "d_ff": 32}
WHOLE = packed_layout(8, 24)


class Host:
    """A trainer, and what its agent and the orchestrator have of it."""

    def __init__(self, out: Path, rank: int, port: int, client: CurveKeys, **changes: Any) -> None:
        self.rank = rank
        self.directory = out / "hosts" / str(rank) if rank else out
        self.directory.mkdir(parents=True, exist_ok=True)
        self._client_keys, self._keys = client, new_keys()
        self._endpoint_file = self.directory / "trainer.endpoint.json"
        peers = HostFile(
            rank, 2, f"host {rank} (loopback)", f"127.0.0.1:{port}", "127.0.0.1", self._keys, [client.public],
            str(self.directory), str(self._endpoint_file),
        )  # fmt: skip
        write_host_file(self.directory / "peers.json", peers)
        settings = Settings(
            run=RUN, out=out, engine="shmstage.demo.engine:make_engine", engine_settings=ENGINE, **changes
        )
        with (self.directory / "trainer.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "shmstage.trainer", "--lifeline", "--settings", settings.model_dump_json(),
                    "--peers-file", str(self.directory / "peers.json"),
                ],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment(2),
            )  # fmt: skip
        self.client: Client | None = None
        self.pool: Pool | None = None
        self.local: Layout | None = None

    def connect(self) -> Client:
        deadline = time.monotonic() + START_S
        while not self._endpoint_file.exists():
            assert time.monotonic() < deadline, self.log()
            with pytest.raises(subprocess.TimeoutExpired):
                self.process.wait(0.05)
        record = read_json(self._endpoint_file)
        assert record["pid"] == self.process.pid
        auth = ClientAuth(self._keys.public, self._client_keys)
        self.client = Client(ZmqChannel.connect_tcp(record["endpoint"], auth))
        return self.client

    def log(self) -> str:
        return (self.directory / "trainer.log").read_text()[-3000:]

    def end(self) -> None:
        if self.client is not None:
            self.client.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.pool is not None:
            self.pool.close()


@contextmanager
def hosts(out: Path, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> Iterator[list[Host]]:
    client, port = new_keys(), free_port()
    with ExitStack() as stack:
        stack.callback(sweep, RUN)  # what a killed one cannot remove
        found = []
        for rank in ranks:
            found.append(Host(out, rank, port, client, **changes))
            stack.callback(found[-1].end)
        yield found


def session(stack: ExitStack, members: list[Host]) -> None:
    """As an orchestrator opens one: ranges first, then the pools that hold just those."""
    identity = ProcessIdentity.create(RUN, "test")
    stack.callback(identity.close)
    for host in members:
        client = host.connect()
        client.hello(Hello(PROTOCOL_VERSION, RUN, 1, "", [], [], "", 0, 0), timeout_s=60.0)
        ranges = call(client, "ranges", layout=WHOLE.to_wire())["ranges"]
        assert ranges["completion_ids"] == [[4 * host.rank, 4 * host.rank + 4], [0, 24]]
        host.local = packed_layout(4, 24)
        host.pool = Pool.create(RUN, epoch=1, layouts=[host.local], slots=2, identity=identity)
        hello = Hello(
            PROTOCOL_VERSION, RUN, 1, host.pool.name, [host.local.to_wire()], [], "", 0, 0, [WHOLE.to_wire()]
        )
        client.hello(hello, timeout_s=60.0)
    for host in members:
        assert host.client is not None
        assert call(host.client, "restore_checkpoint")["step"] is None
    for reply in [(host.client, call(host.client, "save_checkpoint", step=0, metadata={})) for host in members]:
        assert resolved(*reply).ok


def begin(host: Host, step: int) -> Any:
    """Send a micro-batch of one step; a program that spans hosts may keep its dispatcher until all have begun it."""
    assert host.pool is not None and host.local is not None and host.client is not None
    slot = host.pool.acquire(host.local, timeout_s=DEADLINE_S)
    for name, values in packed_microbatch(WHOLE, step).items():
        slot.views[name][...] = values[4 * host.rank : 4 * host.rank + 4]
    handle = slot.publish(step=step, index=0, is_final=True)
    return host.client.begin("fwd_bwd", {"handle": handle_to_wire(handle)})


def train(members: list[Host], step: int) -> None:
    for host, begun in [(host, begin(host, step)) for host in members]:
        assert host.client is not None
        assert host.client.finish(begun, timeout_s=START_S)["updated"] is True


def test_two_trainers_train_as_one_and_leave_nothing(tmp_path: Path) -> None:
    with hosts(tmp_path) as members, ExitStack() as stack:
        session(stack, members)
        train(members, 1)
        replies = [(host.client, call(host.client, "get_metrics", step=1)) for host in members]
        first, second = (resolved(*reply).value for reply in replies)
        assert first == second
        assert first["denominator"] > 0
        digests = [call(host.client, "shutdown")["param_digest"] for host in members]
        assert digests[0] == digests[1] != ""
        assert [host.process.wait(DEADLINE_S) for host in members] == [0, 0], [host.log() for host in members]
        for host in members:
            assert host.pool is not None
            host.pool.close()
    assert list_objects(RUN) == []
    assert (tmp_path / "checkpoints" / "0" / "metadata.json").exists()
    for host in members:
        names = {path.name for path in host.directory.iterdir()}
        assert {"trainer.log", "trainer_calls.jsonl", "events"} <= names
    assert not (tmp_path / "hosts" / "1" / "checkpoints").exists()


def test_the_survivor_of_a_killed_peer_trains_nothing_more_and_ends_with_its_lifeline(tmp_path: Path) -> None:
    with hosts(tmp_path) as (survivor, victim), ExitStack() as stack:
        session(stack, [survivor, victim])
        train([survivor, victim], 1)
        resolved(survivor.client, call(survivor.client, "get_metrics", step=1))
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        begin(survivor, 2)
        assert survivor.process.stdin is not None
        survivor.process.stdin.close()
        assert survivor.process.wait(20.0) in (130, -signal.SIGABRT)
        assert survivor.client is not None
        done = [event for event in survivor.client.events(0.0) if isinstance(event, TokenEvent) and event.step == 2]
        assert not [event for event in done if event.ok and event.kind in ("fwd_bwd", "update")]


@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (0, WaitTimeoutError, ["rank 0 of 2", "ranks 1 to 1", "start_timeout_s"]),
        (1, PeerLostError, ["rank 1 of 2", "rank 0 cannot be reached"]),
    ],
)
def test_who_cannot_join_says_at_which_coordinator_and_whom_it_waited_for(
    tmp_path: Path, rank: int, kind: type[Exception], words: list[str]
) -> None:
    with hosts(tmp_path, (rank,), start_timeout_s=1.0) as (host,):
        assert host.process.wait(START_S) == 6, host.log()
        told = read_failure(host.directory, "trainer", host.process.pid)
        assert isinstance(told, kind)
        for word in [*words, "127.0.0.1:"]:
            assert word in str(told)
        assert "Traceback" not in host.log()


def test_a_coordinator_that_cannot_listen_is_an_error_and_no_crash(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host = Host(tmp_path, 0, taken.getsockname()[1], new_keys())
        try:
            assert host.process.wait(START_S) == 2, host.log()
        finally:
            host.end()
            sweep(RUN)
    told = read_failure(tmp_path, "trainer", host.process.pid)
    assert isinstance(told, SettingsError)
    assert "cannot listen at 127.0.0.1:" in str(told)

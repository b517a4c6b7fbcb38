"""The trainer as a process: started, driven over its socket, stopped in each of the ways there are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer.rig import DEADLINE_S, microbatch

from shmstage.errors import PoolError
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import list_objects
from shmstage.records import failure_path
from shmstage.settings import Settings
from shmstage.testing.engines import toy_layout
from shmstage.trainer import __main__ as main
from shmstage.transport.client import Client
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, TicketEvent

pytestmark = pytest.mark.slow

RUN = f"trainer-main-test-{os.getpid()}"  # others may run these tests at the same time
TOY = "shmstage.testing.engines:make_toy_engine"


@contextmanager
def trainer(out: Path, **changes: Any) -> Iterator[subprocess.Popen[bytes]]:
    settings = Settings(run=RUN, out=out, **{"engine": TOY, **changes})
    out.mkdir(exist_ok=True)
    with (out / "trainer.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shmstage.trainer", "--lifeline", "--settings", settings.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def session() -> Iterator[tuple[Client, Pool]]:
    """What an orchestrator has after its handshake."""
    identity = ProcessIdentity.create(RUN, "test")
    layout = toy_layout()
    pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=2, identity=identity)
    client = Client(ZmqChannel.connect(endpoint_for(RUN, "trainer")))
    me = (identity.lock_path, identity.pid, identity.start_ticks)
    try:
        hello = Hello(PROTOCOL_VERSION, RUN, 1, pool.name, [layout.to_wire()], [], *me)
        welcome = client.hello(hello, timeout_s=60.0)
        client.peer = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
        try:
            yield client, pool
        finally:
            client.peer.close()
    finally:
        client.close()
        pool.close()
        identity.close()


def call(client: Client, command: str, **arguments: Any) -> dict[str, Any]:
    return client.call(command, arguments, timeout_s=DEADLINE_S)


def resolved(client: Client, reply: dict[str, Any]) -> TicketEvent:
    while True:
        for event in client.events(DEADLINE_S):
            if isinstance(event, TicketEvent) and event.ticket == reply["ticket"]:
                return event


def test_a_session_from_hello_to_shutdown_leaves_nothing_behind(tmp_path: Path) -> None:
    with trainer(tmp_path) as process, session() as (client, pool):
        assert call(client, "restore_checkpoint") == {"step": None, "metadata": {}}
        assert resolved(client, call(client, "save_checkpoint", step=0, metadata={"step": 0})).ok
        slot = pool.acquire(toy_layout(), timeout_s=1.0)
        for name, values in microbatch(toy_layout(), 1).items():
            slot.views[name][...] = values
        del values
        handle = slot.publish(step=1, index=0, is_final=True)
        del slot
        assert call(client, "fwd_bwd", handle=handle_to_wire(handle))["updated"] is True
        assert resolved(client, call(client, "get_metrics", step=1)).value["denominator"] == 4.0
        assert resolved(client, call(client, "prepare_weight_sync", version=1)).ok
        digest = call(client, "info", param_digest=True)["param_digest"]
        assert call(client, "shutdown") == {"param_digest": digest}
        assert process.wait(DEADLINE_S) == 0
    assert list_objects(RUN) == []
    commands = [json.loads(line)["command"] for line in (tmp_path / "trainer_calls.jsonl").read_text().splitlines()]
    assert commands[:3] == ["hello", "restore_checkpoint", "save_checkpoint"]
    assert (tmp_path / "checkpoints" / "0" / "metadata.json").exists()


def test_a_hello_with_a_bad_pool_does_not_end_the_session_of_the_living_one(tmp_path: Path) -> None:
    with trainer(tmp_path) as process, session() as (client, pool):
        call(client, "restore_checkpoint")
        intruder = ProcessIdentity.create(RUN, "intruder")
        other = Client(ZmqChannel.connect(endpoint_for(RUN, "trainer")))
        me = (intruder.lock_path, intruder.pid, intruder.start_ticks)
        gone = Hello(PROTOCOL_VERSION, RUN, 2, pool.name[:-5] + "zzzzz", [toy_layout().to_wire()], [], *me)
        with pytest.raises(PoolError, match="cannot open pool"):
            other.hello(gone, timeout_s=60.0)
        other.close()
        intruder.close()
        assert call(client, "info")["gate"] == "open"
        assert resolved(client, call(client, "save_checkpoint", step=0, metadata={})).ok
        call(client, "shutdown", discard=True)
        assert process.wait(DEADLINE_S) == 0
    assert list_objects(RUN) == []


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "end of stdin"])
def test_told_to_stop_it_serves_its_living_orchestrator_to_the_end_and_a_dead_one_no_longer(
    tmp_path: Path, how: str
) -> None:
    with trainer(tmp_path) as process:
        with session() as (client, _):
            call(client, "restore_checkpoint")
            if how == "end of stdin":
                assert process.stdin is not None
                process.stdin.close()
            else:
                process.send_signal(getattr(signal, how))
            for _ in range(20):  # a deferred update could still be applied
                assert call(client, "info")["gate"]
        assert process.wait(DEADLINE_S) == 0
    assert list_objects(RUN) == []


@pytest.mark.parametrize(
    ("engine", "kind", "code"),
    [("nowhere:make", "PluginError", 2), ("trainer.broken_engines:refuses", "BudgetError", 2)],
)
def test_an_engine_that_cannot_be_made_is_one_line_and_exit_code_2(
    tmp_path: Path, engine: str, kind: str, code: int
) -> None:
    with trainer(tmp_path, engine=engine) as process:
        assert process.wait(60.0) == code
    told = json.loads(failure_path(tmp_path, "trainer").read_text())
    assert (told["kind"], told["exit_code"]) == (kind, code)
    log = (tmp_path / "trainer.log").read_text()
    assert "Traceback" not in log
    assert len(log.splitlines()) == 1
    assert list_objects(RUN) == []


def test_the_worker_gives_a_wait_up_before_its_client_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MadeError(Exception):
        pass

    given: dict[str, Any] = {}

    def worker(engine: Any, **options: Any) -> None:
        given.update(options)
        raise MadeError

    monkeypatch.setattr(main, "Worker", worker)
    never: Any = SimpleNamespace(stop_requested=lambda: False)
    with pytest.raises(MadeError):
        main.serve(Settings(run=RUN, out=tmp_path, engine=TOY, call_timeout_s=10.0), never, 1, None)
    assert given["timeout_s"] == 9.0

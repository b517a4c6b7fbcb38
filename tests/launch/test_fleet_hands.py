"""The launcher's hands on all hosts, on actors that answer as a test says: who counts as gone, and what is ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmstage.errors import EngineError, PeerLostError
from shmstage.launch.cluster import Died
from shmstage.launch.fleet import HOST_TIMEOUT_S, WAIT_S, Fleet
from shmstage.launch.gang import Ended
from shmstage.launch.supervisor import Ending
from shmstage.settings import Settings

SILENT = object()
ELSEWHERE = -1
"""A namespace that is not this process's."""


def trainer_of(rank: int, **changes: Any) -> dict[str, Any]:
    """As an agent's ``wait`` tells it."""
    told = {
        "door": [f"tcp://10.0.0.{rank + 1}:4001", "key"], "pid": 30 + rank, "start_ticks": 300 + rank,
        "orphaned": False, "exit_code": None, "told": None, "how": "",
    }  # fmt: skip
    return told | changes


class Actor:
    """``answers``: method → what it gives, ``SILENT`` if that does not come. ``asked``: (method, arguments)."""

    def __init__(self, role: str, rank: int, **answers: Any) -> None:
        doors = {name: [f"tcp://10.0.0.{rank + 1}:{port}", "key"] for port, name in enumerate(("feed", "aux", "store"))}
        facts = {
            "name": f"host {rank} (node-{rank})", "address": f"10.0.0.{rank + 1}", "pid": 10 + rank,
            "start_ticks": 100 + rank, "namespace": ELSEWHERE, "node": f"node-{rank}", "doors": doors, "free_port": 9,
        }  # fmt: skip
        self.role, self.rank = role, rank
        self.asked: list[tuple[Any, ...]] = []
        self.answers = {
            "open": facts, "start_trainer": None, "wait": trainer_of(rank), "ping": True, "end": None, "clean_up": [],
            "leaked": [], "close": None, **answers,
        }  # fmt: skip

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.ask(method, arguments))

    def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.asked.append((method, *arguments))
        return SimpleNamespace(answer=lambda: self.answers[method])


class FakeCluster:
    def __init__(self, hosts: int) -> None:
        self.nodes = [f"node-{rank}" for rank in range(hosts)]
        self.agents: list[Actor] = []
        self.stores: list[Actor] = []
        self.killed: list[Any] = []
        self.ray = SimpleNamespace(wait=lambda calls, num_returns=1, timeout=0.0: self.split(calls))

    def split(self, calls: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        late = [call for call in calls if call.answer() is SILENT]
        return [call for call in calls if call not in late], late

    def agent(self, rank: int, actor: type, *arguments: Any) -> Actor:
        self.agents.append(Actor("agent", rank))
        return self.agents[-1]

    def store(self, node: str, actor: type, *arguments: Any) -> Actor:
        self.stores.append(Actor("store", self.nodes.index(node)))
        return self.stores[-1]

    def wait(self, calls: Sequence[Any], timeout_s: float, look: Any) -> list[Any]:
        look()
        return self.split(calls)[1]

    def answer(self, call: Any) -> Any:
        if isinstance(call.answer(), Exception):
            raise call.answer()
        return call.answer()

    def alive_nodes(self) -> list[str]:
        return self.nodes

    def replace_lost_nodes(self) -> None:
        pass

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


class Launch:
    """A fleet of two whose trainers have opened their doors, and a clock."""

    def __init__(self, out: Path) -> None:
        self.now_s = 1000.0
        self.cluster: Any = FakeCluster(2)
        self.fleet = Fleet(
            self.cluster, Settings(run="hands", out=out), 2, client_key="key", nonce=("", ""), given={},
            clock=lambda: self.now_s,
        )  # fmt: skip
        self.begin(1)

    def begin(self, epoch: int) -> None:
        self.fleet.start_agents(epoch, lambda: None)
        self.peers = self.fleet.start_trainers(lambda: None)

    def polled(self) -> list[Ended]:
        """What is told once everybody who answers has."""
        return [*self.fleet.poll(), *self.fleet.poll()]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def test_trainers_are_told_of_all_stores_and_of_one_coordinator(launch: Launch) -> None:
    assert [peers.trainer.endpoint for peers in launch.peers] == ["tcp://10.0.0.1:4001", "tcp://10.0.0.2:4001"]
    for agent in launch.cluster.agents:
        (told,) = [asked for asked in agent.asked if asked[0] == "start_trainer"]
        assert told[1:] == (launch.cluster.stores, ["host 0 (node-0)", "host 1 (node-1)"], "10.0.0.1:9")


def test_a_host_that_answers_nothing_is_lost_after_a_while_and_told_once(launch: Launch) -> None:
    assert launch.polled() == []
    launch.cluster.agents[1].answers["wait"] = launch.cluster.stores[1].answers["ping"] = SILENT
    launch.now_s += HOST_TIMEOUT_S
    assert launch.polled() == []
    launch.now_s += 2 * WAIT_S
    (ended,) = launch.polled()
    assert (ended.role, ended.where, ended.ending) == ("host", "host 1 (node-1)", Ending.DIED)
    assert launch.polled() == []


def test_a_host_whose_store_alone_answers_is_not_lost(launch: Launch) -> None:
    launch.cluster.agents[1].answers["wait"] = SILENT
    for _ in range(5):
        launch.now_s += HOST_TIMEOUT_S
        assert launch.polled() == []


def test_a_dead_agent_is_an_agent_unless_its_store_or_node_is_dead_too(launch: Launch, tmp_path: Path) -> None:
    launch.cluster.agents[1].answers["wait"] = Died("killed")
    (ended,) = launch.polled()
    assert (ended.role, ended.where, ended.pid) == ("agent", "host 1 (node-1)", 11)
    for how in (Died("gone"), SILENT):
        other = Launch(tmp_path)
        other.cluster.agents[1].answers["wait"] = Died("killed")
        other.cluster.stores[1].answers["ping"] = how
        (ended,) = other.polled()
        assert (ended.role, ended.where) == ("host", "host 1 (node-1)")


def test_a_trainer_that_has_ended_is_told_once_with_what_it_said(launch: Launch) -> None:
    launch.cluster.agents[1].answers["wait"] = trainer_of(
        1, exit_code=5, told=["EngineError", "out of device memory"], how="ended with exit code 5"
    )
    ended = [*launch.polled(), *launch.polled()]
    assert [(each.role, each.where, each.pid, each.ending) for each in ended] == [
        ("trainer", "host 1 (node-1)", 31, Ending.FAILED)
    ]
    assert isinstance(ended[0].told, EngineError)


def test_what_a_dead_agent_left_is_ended_on_its_own_host(launch: Launch) -> None:
    """It could not end its trainer, which would hold its device, and its pool, into the next attempt."""
    launch.cluster.agents[1].answers["end"] = Died("killed")
    launch.fleet.end(1.0, 1.0)
    cleaned = [[asked for asked in store.asked if asked[0] == "clean_up"] for store in launch.cluster.stores]
    assert cleaned == [[], [("clean_up", [(11, 101), (31, 301)])]]
    assert launch.cluster.killed == launch.cluster.agents


def test_stores_outlive_an_attempt_but_a_dead_one_is_replaced(launch: Launch) -> None:
    kept, dead = launch.cluster.stores
    dead.answers["ping"] = Died("killed")
    launch.fleet.end(1.0, 1.0)
    launch.begin(2)
    assert len(launch.cluster.stores) == 3
    new = launch.cluster.stores[2]
    assert new.rank == 1 and dead in launch.cluster.killed and kept not in launch.cluster.killed
    (told,) = [asked for asked in launch.cluster.agents[-1].asked if asked[0] == "start_trainer"]
    assert told[1] == [kept, new]


def test_what_is_left_over_on_any_host_is_told(launch: Launch) -> None:
    first, second = launch.cluster.stores
    first.answers["leaked"], second.answers["leaked"] = ["a"], ["a", "b"]
    assert launch.fleet.left_over(sweep=True) == {"a", "b"}
    second.answers["leaked"] = SILENT
    assert launch.fleet.left_over(sweep=True) == {"a"}


def test_who_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FakeCluster, "agent", lambda self, rank, actor, *arguments: Actor("agent", rank, open=SILENT if rank else {
            "name": "host 0 (node-0)", "node": "node-0"})
    )
    with pytest.raises(PeerLostError, match="host 1 has no agent within start_timeout_s"):
        Launch(tmp_path)

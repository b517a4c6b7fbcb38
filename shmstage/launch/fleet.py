"""The launcher's hands on all hosts: starts a gang, hears how it is, ends it, looks what was left. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shmstage.errors import PeerLostError, ShmstageError, by_name
from shmstage.launch.cluster import Cluster, Died, Look
from shmstage.launch.gang import Ended
from shmstage.launch.processes import end_processes
from shmstage.launch.ray_actors import AgentActor, StoreActor
from shmstage.launch.supervisor import Ending, ending_of
from shmstage.memory.identity import namespace_word
from shmstage.settings import Settings
from shmstage.transport.peers_file import Door, HostPeers

#: a host's agent is asked how its trainer is, and has this long until it answers in any case
WAIT_S = 1.0
#: neither agent nor store of a host has answered for so long: it is stopped, cut off or gone
HOST_TIMEOUT_S = 20.0
#: a store is asked this often whether it is there
PING_S = 1.0
#: Ray is asked this often which of its nodes are alive; what runs on a dead one lives a little longer
NODES_S = 2.0
RAYLET_DEAD = "is lost: its raylet is dead"
#: an actor that is asked for the last time
CLOSE_S = 10.0


class GangBrokenError(Exception):
    """Somebody died while the gang was being started; ``ended`` says who."""

    def __init__(self, ended: Sequence[Ended]) -> None:
        super().__init__(ended[0].describe())
        self.ended = ended


@dataclass
class _Call:
    """A question that may still be open."""

    reference: Any = None
    asked_at: float = 0.0


@dataclass
class _Host:
    rank: int
    name: str
    agent: Any = None
    store: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    store_facts: dict[str, Any] = field(default_factory=dict)
    #: as ``AgentActor.wait`` tells it
    trainer: dict[str, Any] = field(default_factory=dict)
    waiting: _Call = field(default_factory=_Call)
    pinging: _Call = field(default_factory=_Call)
    answered_at: float = 0.0
    #: of this attempt: nothing more is to be heard of it
    is_lost: bool = False
    trainer_ended: bool = False

    @property
    def pids(self) -> dict[str, int]:
        told = {"agent": self.facts, "store": self.store_facts, "trainer": self.trainer}
        return {role: facts["pid"] for role, facts in told.items() if "pid" in facts}


@final
class Fleet:
    """All hosts of one launch, attempt after attempt. Stores stay while their host does."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        hosts: int,
        *,
        client_key: str,
        nonce: tuple[str, str],
        given: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``client_key``: the orchestrator's; ``given``: environment for the trainers."""
        self._cluster = cluster
        self._settings = settings
        self._json = settings.model_dump_json()
        self._allowed = [client_key]
        self._nonce = nonce
        self._given = dict(given)
        self._clock = clock
        self._hosts = [_Host(rank, f"host {rank}") for rank in range(hosts)]
        self._nodes_at = 0.0
        #: nodes whose raylet is known to be dead, perhaps before Ray knows
        self._dead_nodes: set[str] = set()

    @property
    def records(self) -> list[dict[str, Any]]:
        """For run.json: every host with its processes."""
        return [
            {"rank": host.rank, "name": host.name, "address": host.facts.get("address"), "pids": host.pids}
            for host in self._hosts
        ]

    def pid_here(self, role: str, namespace: int) -> int | None:
        """Of host 0, if its processes can be seen from a process of ``namespace``."""
        host = self._hosts[0]
        return host.pids.get(role) if host.facts.get("namespace") == namespace else None

    # --- one attempt -------------------------------------------------------------------------------------------

    def start_agents(self, epoch: int, look: Look) -> None:
        """Agents on all hosts and a store beside each.

        Raises ``PeerLostError`` naming who is not there within ``start_timeout_s``, ``GangBrokenError`` if one dies,
        and what an agent or a source refuses with.
        """
        hosts = self._hosts
        self._until_ray_knows(look)
        for host in hosts:
            host.facts, host.trainer, host.is_lost, host.trainer_ended = {}, {}, False, False
            host.waiting, host.pinging = _Call(), _Call()
            host.agent = self._cluster.agent(
                host.rank, AgentActor, self._json, host.rank, len(hosts), epoch, self._allowed, self._nonce, self._given
            )

        def with_nodes() -> None:
            look()
            self._cluster.replace_lost_nodes()

        for host, facts in zip(hosts, self._opened([host.agent for host in hosts], "agent", with_nodes), strict=True):
            host.facts, host.name = facts, facts["name"]
        for host in hosts:
            if host.store is None or host.store_facts["node"] != host.facts["node"] or not self._lives(host.store):
                self._drop_store(host)
                host.store = self._cluster.store(
                    host.facts["node"], StoreActor, self._json, host.rank, len(hosts), self._allowed, self._nonce
                )
        for host, facts in zip(hosts, self._opened([host.store for host in hosts], "store", look), strict=True):
            host.store_facts = facts

    def start_trainers(self, look: Look) -> list[HostPeers]:
        """Trainers on all hosts; returns every host's doors once each trainer has opened its own. Raises as before."""
        hosts = self._hosts
        coordinator = f"{hosts[0].facts['address']}:{hosts[0].facts['free_port']}"
        stores, names = [host.store for host in hosts], [host.name for host in hosts]
        calls = [host.agent.start_trainer.remote(stores, names, coordinator) for host in hosts]
        self._answers(calls, self._settings.start_timeout_s, "agent", "started no trainer", look)
        now = self._clock()
        deadline = now + self._settings.start_timeout_s
        for host in hosts:
            host.answered_at = now
        while not all(host.trainer.get("door") for host in hosts):
            look()
            ended = self.poll()
            if ended:
                raise GangBrokenError(ended)
            if self._clock() > deadline:
                late = ", ".join(host.name for host in hosts if not host.trainer.get("door"))
                raise PeerLostError(
                    f"{late}: no trainer opened its door within start_timeout_s = {self._settings.start_timeout_s:g}; "
                    f"see {self._settings.out_dir}/trainer.log and hosts/*/trainer.log beside it"
                )
            self.wait()
        return [
            HostPeers(
                rank=host.rank, name=host.name, trainer=Door(*host.trainer["door"]),
                feed=Door(*host.facts["doors"]["feed"]), aux=Door(*host.facts["doors"]["aux"]),
                store=Door(*host.store_facts["doors"]["store"]),
            )
            for host in hosts
        ]  # fmt: skip

    def wait(self, timeout_s: float = 0.05) -> None:
        """A moment, or until an agent has something to tell."""
        open_calls = [host.waiting.reference for host in self._hosts if host.waiting.reference is not None]
        if open_calls:
            self._cluster.ray.wait(open_calls, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def poll(self) -> list[Ended]:
        """Who has ended since the last call. Never waits long."""
        ended = self._poll_nodes()
        for host in self._hosts:
            if not host.is_lost:
                ended += self._poll_agent(host)
            if not host.is_lost:
                ended += self._poll_store(host)
            if not host.is_lost and self._clock() > host.answered_at + HOST_TIMEOUT_S + WAIT_S:
                host.is_lost = True
                ended.append(self._died("host", host, f"has not answered for {HOST_TIMEOUT_S:g} s"))
        return ended

    def end(self, patience_s: float, grace_s: float) -> None:
        """End all trainers and agents; trainers may take ``patience_s`` to end by themselves."""
        begun = [host for host in self._hosts if host.agent is not None]
        calls = {host.rank: host.agent.end.remote(patience_s, grace_s) for host in begun}
        late = self._cluster.wait(list(calls.values()), patience_s + grace_s + CLOSE_S, lambda: None)
        for host in begun:
            ended = calls[host.rank] not in late and not isinstance(self._answer_or_died(calls[host.rank]), Died)
            self._cluster.kill(host.agent)
            host.agent = None
            if not ended:  # an agent that is dead could not end its trainer
                self._end_processes(host)

    # --- the end of the launch ---------------------------------------------------------------------------------

    def left_over(self, *, sweep: bool) -> set[str]:
        """What lies in any host's shared memory of this run; ``sweep``: after a sweep."""
        stores = [host.store for host in self._hosts if host.store is not None]
        before = [store.clean_up.remote([]) for store in stores]
        late = self._cluster.wait(before, CLOSE_S, lambda: None)
        calls = [store.leaked.remote() for store in stores] if sweep else before
        late += self._cluster.wait(calls, CLOSE_S, lambda: None)
        found: set[str] = set()
        for call in calls:
            names = self._answer_or_died(call) if call not in late else Died("late")
            found |= set() if isinstance(names, Died) else set(names)
        return found

    def close(self) -> None:
        """Stores too."""
        stores = [host.store for host in self._hosts if host.store is not None]
        self._cluster.wait([store.close.remote() for store in stores], CLOSE_S, lambda: None)
        for store in stores:
            self._cluster.kill(store)

    # --- starting ----------------------------------------------------------------------------------------------

    def _until_ray_knows(self, look: Look) -> None:
        """Until then an agent would be sent to a node that is dead, and that death would count as another one."""
        deadline = self._clock() + self._settings.start_timeout_s
        while self._dead_nodes & set(self._cluster.alive_nodes()) and self._clock() < deadline:
            look()
            time.sleep(WAIT_S)
        self._dead_nodes.clear()

    def _opened(self, actors: Sequence[Any], role: str, look: Look) -> list[dict[str, Any]]:
        calls = [actor.open.remote() for actor in actors]
        return self._answers(calls, self._settings.start_timeout_s, role, f"has no {role}", look)

    def _answers(self, calls: list[Any], timeout_s: float, role: str, lack: str, look: Look) -> list[Any]:
        """The answers of all hosts. Raises as ``start_agents``."""
        late = self._cluster.wait(calls, timeout_s, look)
        answers = [None if call in late else self._cluster.answer(call) for call in calls]
        died = [
            self._died(role, host, f"died while it was being started: {answer.why}")
            for host, answer in zip(self._hosts, answers, strict=True)
            if isinstance(answer, Died)
        ]
        if died:
            raise GangBrokenError(died)
        if late:
            names = ", ".join(host.name for host, call in zip(self._hosts, calls, strict=True) if call in late)
            raise PeerLostError(
                f"{names} {lack} within start_timeout_s = {timeout_s:g} s: it is gone, cut off or without a free CPU; "
                f"the cluster has {len(self._cluster.alive_nodes())} living nodes for {len(self._hosts)} hosts"
            )
        return answers

    def _end_processes(self, host: _Host) -> None:
        """What is left of a host's agent and trainer, by whoever sees its processes."""
        left = [(told["pid"], told["start_ticks"]) for told in (host.facts, host.trainer) if "start_ticks" in told]
        if host.facts.get("namespace") == namespace_word():
            end_processes(left)
        elif host.store is not None:
            self._cluster.wait([host.store.clean_up.remote(left)], CLOSE_S, lambda: None)

    def _lives(self, store: Any) -> bool:
        """False also where its raylet is dead."""
        call = store.ping.remote()
        return not self._cluster.wait([call], WAIT_S, lambda: None) and self._answer_or_died(call) is True

    def _drop_store(self, host: _Host) -> None:
        if host.store is not None:
            self._cluster.kill(host.store)
        host.store, host.store_facts = None, {}

    # --- hearing -----------------------------------------------------------------------------------------------

    def _poll_nodes(self) -> list[Ended]:
        if self._clock() < self._nodes_at + NODES_S:
            return []
        self._nodes_at = self._clock()
        alive = set(self._cluster.alive_nodes())
        dead = [host for host in self._hosts if not host.is_lost and host.facts and host.facts["node"] not in alive]
        for host in dead:
            host.is_lost = True
        return [self._died("host", host, "is lost: its Ray node is dead") for host in dead]

    def _poll_agent(self, host: _Host) -> list[Ended]:
        answer = self._answered(host, host.waiting)
        if isinstance(answer, Died):
            host.is_lost = True
            if self._lives(host.store):
                return [self._died("agent", host, f"died: {answer.why}")]
            return [self._lost_node(host, "is lost: its agent and its store or raylet died together")]
        if host.waiting.reference is None:
            host.waiting = _Call(host.agent.wait.remote(WAIT_S), self._clock())
        if answer is not None:
            host.trainer = answer
            if answer["orphaned"]:
                host.is_lost = True
                return [self._lost_node(host, RAYLET_DEAD)]
            if answer["exit_code"] is not None and not host.trainer_ended:
                host.trainer_ended = True
                told = _told(answer["told"])
                return [
                    Ended(
                        "trainer", host.name, answer["how"], ending_of(answer["exit_code"], told), self._clock(),
                        pid=answer["pid"], told=told, exit_code=answer["exit_code"],
                    )
                ]  # fmt: skip
        return []

    def _poll_store(self, host: _Host) -> list[Ended]:
        answer = self._answered(host, host.pinging)
        if isinstance(answer, Died):
            host.is_lost = True
            return [self._died("store", host, f"died: {answer.why}")]
        if answer is False:
            host.is_lost = True
            return [self._lost_node(host, RAYLET_DEAD)]
        if host.pinging.reference is None and self._clock() >= host.pinging.asked_at + PING_S:
            host.pinging = _Call(host.store.ping.remote(), self._clock())
        return []

    def _answered(self, host: _Host, call: _Call) -> Any:
        """The answer to an open call; ``None`` while there is none."""
        if call.reference is None or not self._cluster.ray.wait([call.reference], timeout=0)[0]:
            return None
        reference, call.reference = call.reference, None
        answer = self._answer_or_died(reference)
        if not isinstance(answer, Died):
            host.answered_at = self._clock()
        return answer

    def _answer_or_died(self, call: Any) -> Any:
        try:
            return self._cluster.answer(call)
        except ShmstageError as error:
            return Died(str(error))

    def _lost_node(self, host: _Host, how: str) -> Ended:
        self._dead_nodes.add(host.facts["node"])
        return self._died("host", host, how)

    def _died(self, role: str, host: _Host, how: str) -> Ended:
        pid = {"agent": host.facts, "store": host.store_facts}.get(role, {}).get("pid", 0)
        return Ended(role, host.name, how, Ending.DIED, self._clock(), pid=pid)


def _told(told: list[str] | None) -> ShmstageError | None:
    return by_name().get(told[0], ShmstageError)(told[1]) if told is not None else None

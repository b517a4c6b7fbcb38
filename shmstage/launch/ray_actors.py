"""The actors: thin hulls around ``HostAgent``, ``HostTrainer`` and ``TrajectoryStore``. They run in Ray's workers.

Everything that crosses is plain values and byte arrays. Ray is imported where a worker calls it, never for ``run``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, final

from shmstage.errors import SettingsError, ShmstageError
from shmstage.launch import source_share, store_commands
from shmstage.launch.door import Door, Speaker
from shmstage.launch.host_agent import HostAgent
from shmstage.launch.host_environment import child_environment, environment_of
from shmstage.launch.host_trainer import HostTrainer, remove_left_files
from shmstage.launch.processes import end_processes
from shmstage.launch.ray_stores import RayStores, answer
from shmstage.launch.trajectory_store import TrajectoryStore
from shmstage.memory.identity import ProcessIdentity, namespace_word, read_start_ticks
from shmstage.memory.names import owned_objects
from shmstage.memory.sweep import sweep
from shmstage.settings import Settings
from shmstage.transport.curve import ServerAuth, new_keys
from shmstage.transport.zmq import ZmqServerChannel

log = logging.getLogger(__name__)

#: an agent that hears nothing from its launcher for so long, and cannot reach the head of the cluster, is cut off
CUT_OFF_S = 30.0
_LOOK_S = 1.0


def check_shared(name: str, out: str, nonce: str, content: str) -> None:
    """Raises ``SettingsError`` unless OUT is here what it is for the launcher."""
    path = Path(out, nonce)
    try:
        found = path.read_text()
    except OSError as error:
        raise SettingsError(
            f"{name}: {path}: {error.strerror}; OUT has to lie on a file system that all hosts share; choose one"
        ) from None
    if found != content:
        raise SettingsError(f"{name}: {path} is another one here; OUT has to lie on a file system that all hosts share")


def _end_with_raylet() -> None:
    """A worker outlives a raylet that was killed, holding what it held, and nobody can call it any more."""
    raylet = os.getppid()
    while os.getppid() == raylet:
        threading.Event().wait(_LOOK_S)
    os._exit(1)


class _Actor:
    """What both know of where they are."""

    def __init__(self, settings_json: str, rank: int, nonce: tuple[str, str]) -> None:
        import ray

        self._settings = Settings.model_validate_json(settings_json)
        self._name = f"host {rank} ({socket.gethostname()})"
        utilities: Any = ray.util
        self._address = str(utilities.get_node_ip_address())
        self._nonce = nonce
        self._raylet = os.getppid()

    def _facts(self) -> dict[str, Any]:
        """Raises ``SettingsError`` if OUT is not shared."""
        import ray

        check_shared(self._name, str(self._settings.out_dir), *self._nonce)
        return {
            "name": self._name, "address": self._address, "pid": os.getpid(),
            "start_ticks": read_start_ticks(os.getpid()), "namespace": namespace_word(),
            "node": ray.get_runtime_context().get_node_id(),
        }  # fmt: skip

    def _bound(self, allowed: list[str]) -> tuple[ZmqServerChannel, list[str]]:
        """A channel with keys of its own: the secret half stays here."""
        keys = new_keys()
        channel = ZmqServerChannel.bind_tcp(self._address, ServerAuth(keys, frozenset(allowed)))
        return channel, [channel.endpoint, keys.public]


@final
class AgentActor(_Actor):
    """One host's agent in one attempt."""

    def __init__(
        self, settings_json: str, rank: int, hosts: int, epoch: int, allowed: list[str], nonce: tuple[str, str],
        given: dict[str, str],
    ) -> None:  # fmt: skip
        super().__init__(settings_json, rank, nonce)
        self._rank, self._hosts, self._epoch, self._allowed, self._given = rank, hosts, epoch, allowed, given
        self._trainer: HostTrainer | None = None
        self._stores = RayStores(self._settings.call_timeout_s)
        self._open: list[Door] = []
        self._heard_at = time.monotonic()

    def open(self) -> dict[str, Any]:
        """Who and where it is, its doors, and a port that was free a moment ago: for the trainers' coordinator."""
        facts = self._facts()
        settings = self._settings
        sweep(settings.run)
        remove_left_files(settings.run, self._rank)
        self._identity = ProcessIdentity.create(settings.run, "agent")
        self._agent = HostAgent(
            settings, rank=self._rank, hosts=self._hosts, name=self._name, epoch=self._epoch, identity=self._identity,
            stores=self._stores, trainer_lost=lambda: self._trainer.lost() if self._trainer is not None else None,
        )  # fmt: skip
        doors: dict[str, list[str]] = {}
        speaker = Speaker(self._identity.pid, self._identity.start_ticks, self._identity.lock_path)
        for name in ("feed", "aux"):
            channel, doors[name] = self._bound(self._allowed)
            self._open.append(Door(f"{self._name} {name}", channel, speaker, self._agent.welcome, self._agent.commands))
        self._heard_at = time.monotonic()
        self._head = _head_address()
        threading.Thread(target=self._watch_launcher, name="orphan watch", daemon=True).start()
        with socket.socket() as free:
            free.bind((self._address, 0))
            port = free.getsockname()[1]
        return {**facts, "doors": doors, "free_port": port}

    def start_trainer(self, stores: list[Any], names: list[str], coordinator: str) -> None:
        """``stores`` by index."""
        self._heard_at = time.monotonic()
        self._stores.know(stores, names)
        out = self._settings.out_dir
        environment = child_environment(os.environ, environment_of(os.getppid()), self._given)
        self._trainer = HostTrainer(
            self._settings.run, out / "run.json", rank=self._rank, hosts=self._hosts, name=self._name,
            epoch=self._epoch, coordinator=coordinator, bind=self._address, allowed=self._allowed,
            directory=out / "hosts" / str(self._rank) if self._rank else out, environment=environment,
        )  # fmt: skip

    def wait(self, seconds: float) -> dict[str, Any]:
        """How the trainer is, after ``seconds`` or as soon as it has ended.

        ``orphaned``: the raylet is dead. Ray ends its workers after a while, and knows the node for dead still later.
        """
        self._heard_at = time.monotonic()
        if self._trainer is None:
            return {}
        self._trainer.ended.wait(seconds)
        state = self._trainer.state()
        door = [state.door.endpoint, state.door.key] if state.door is not None else None
        told = [type(state.told).__name__, str(state.told)] if state.told is not None else None
        return {
            "pid": state.pid, "start_ticks": state.start_ticks, "door": door, "exit_code": state.exit_code,
            "how": state.how_it_ended, "told": told, "orphaned": os.getppid() != self._raylet,
        }  # fmt: skip

    def end(self, patience_s: float, grace_s: float) -> None:
        """End the trainer, give back the pool, close the doors. What is left here afterwards was not ours."""
        self._heard_at = time.monotonic() + patience_s + grace_s
        if self._trainer is not None:
            self._trainer.end(patience_s, grace_s)
        for door in self._open:
            door.close()
        if self._open:
            with contextlib.suppress(ShmstageError):  # the pool is unlinked in any case
                self._agent.close_pool()
            self._identity.close()
        if self._trainer is not None and self._trainer.state().exit_code:
            sweep(self._settings.run)  # who was cut short could not tidy up

    def _watch_launcher(self) -> None:
        """Of a launcher that is dead Ray ends the actors; of one that is cut off it takes minutes to notice.

        Its gang has been given up by then, and this part of it would keep its memory and its devices. So it is when
        the raylet that started this process has died: nobody can call it any more, and it would hold its pool.
        """
        raylet = os.getppid()
        while os.getppid() == raylet and (time.monotonic() - self._heard_at < CUT_OFF_S or _answers(self._head)):
            threading.Event().wait(_LOOK_S)
        log.warning("%s: its raylet is dead, or neither launcher nor head can be reached: ended here", self._name)
        try:
            self.end(0.0, 0.0)
        finally:
            os._exit(1)


@final
class StoreActor(_Actor):
    """One host's store, for as long as the host lives."""

    def __init__(
        self, settings_json: str, rank: int, hosts: int, allowed: list[str], nonce: tuple[str, str]
    ) -> None:  # fmt: skip
        super().__init__(settings_json, rank, nonce)
        self._rank, self._hosts, self._allowed = rank, hosts, allowed
        self._open: Door | None = None

    def open(self) -> dict[str, Any]:
        """Who and where it is, and its door; opened the first time. Raises what its source cannot do."""
        facts = self._facts()  # before anything is journaled in OUT
        if self._open is None:
            settings, rank, hosts = self._settings, self._rank, self._hosts
            share = source_share.share_of(settings, rank, hosts)
            evaluation = source_share.evaluation_share(settings, rank, hosts)
            self._store = TrajectoryStore(settings, share, evaluation, rank, hosts)
            threading.Thread(target=_end_with_raylet, name="orphan watch", daemon=True).start()
            channel, self._door = self._bound(self._allowed)
            self._open = Door(
                f"store of {self._name}", channel, Speaker.of(os.getpid()), store_commands.welcome(self._store),
                store_commands.commands(self._store),
            )  # fmt: skip
        return {**facts, "doors": {"store": self._door}}

    def ping(self) -> bool:
        """False: it is there, but its raylet is dead; Ray ends it after a while."""
        return os.getppid() == self._raylet

    def pieces(self, asked: bytes) -> list[Any]:
        """What ``RayStores`` asks for."""
        return answer(self._store, asked)

    def clean_up(self, processes: list[tuple[int, int]]) -> list[str]:
        """End what a dead agent left here, by pid and start time; returns what is in shared memory before a sweep."""
        end_processes(processes)
        remove_left_files(self._settings.run, self._rank)
        left = owned_objects(self._settings.run)
        sweep(self._settings.run)
        return left

    def leaked(self) -> list[str]:
        """What is in shared memory of this run now."""
        return owned_objects(self._settings.run)

    def close(self) -> None:
        """The journal is closed in order."""
        if self._open is not None:
            self._open.close()
            self._store.close()


def _head_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
    except OSError:
        return False
    return True

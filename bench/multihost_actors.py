"""What ``multihost_rate.py`` places on the hosts: the launcher's own store and agent, without a trainer behind them.

Only Ray's hulls are ours: what is between two stamps is ``TrajectoryStore.pieces``, Ray's object store, ``FetchAhead``,
``fill_window`` and a slot of a real pool; or, for comparison, a plain object of the same size from the same store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmstage.launch.door import Arguments
from shmstage.launch.fetch_ahead import AHEAD
from shmstage.launch.host_agent import HostAgent
from shmstage.launch.ray_stores import RayAnswers, RayStores, answer
from shmstage.launch.source_share import share_of
from shmstage.launch.trajectory_store import TrajectoryStore
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.names import owned_objects
from shmstage.memory.reader import PoolReader
from shmstage.packing.parts import Wanted
from shmstage.settings import Settings
from shmstage.wire.handles import handle_from_wire

WAIT_S = 60.0


class StoreSide:
    """Store ``index`` of ``count``, and a buffer to give plain objects from."""

    def __init__(self, settings_json: str, index: int, count: int) -> None:
        settings = Settings.model_validate_json(settings_json)
        self._store = TrajectoryStore(settings, share_of(settings, index, count), None, index, count)
        self._plain = np.empty(0, np.uint8)

    def read(self) -> list[Any]:
        """All groups of its share, as an orchestrator is told of them."""
        groups: list[Any] = []
        while True:
            answer = self._store.read(1, groups[-1][0] + 1 if groups else 0, 64, WAIT_S)
            groups += answer["groups"]
            if answer["end"]:
                return groups

    def pieces(self, asked: bytes) -> list[Any]:
        return answer(self._store, asked)

    def prepare_plain(self, nbytes: int) -> None:
        self._plain = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def plain(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Any ``nbytes`` bytes that are in memory already; Ray copies them once, as it does with pieces."""
        return self._plain[:nbytes]


@dataclass(eq=False)
class _Counted:
    """Answers, of which each is noted when it has come."""

    answers: RayAnswers
    stores: list[int]
    brought: list[tuple[int, int]]

    def get(self) -> list[list[npt.NDArray[np.uint8]]]:
        found = self.answers.get()
        self.brought += [
            (store, sum(part.nbytes for part in parts)) for store, parts in zip(self.stores, found, strict=True)
        ]
        return found

    def unanswered(self) -> list[str]:
        return self.answers.unanswered()


class _Stores:
    """As the agent of a launch asks them; keeps what each request brought."""

    def __init__(self, actors: list[Any]) -> None:
        self._stores = RayStores(WAIT_S)
        self._stores.know(actors, [f"host {number}" for number in range(len(actors))])
        self.brought: list[tuple[int, int]] = []

    def ask(self, wanted: Sequence[Wanted]) -> _Counted:
        return _Counted(self._stores.ask(wanted), [each.store for each in wanted], self.brought)


class HostSide:
    """A host's agent, and who reads its slots in the trainer's stead."""

    def __init__(self, settings_json: str, rank: int, hosts: int, stores: list[Any]) -> None:
        self._settings = Settings.model_validate_json(settings_json)
        self._actors = stores
        self._stores = _Stores(stores)
        self._reader: PoolReader | None = None
        self._identity = ProcessIdentity.create(self._settings.run, "agent")
        self._agent = HostAgent(
            self._settings, rank=rank, hosts=hosts, name=f"host {rank}", epoch=1, identity=self._identity,
            stores=self._stores,
        )  # fmt: skip

    def open(self, layout: Any, window: list[int], tiles: list[int]) -> int:
        """Bytes of a slot's payload."""
        slots = {"slots": self._settings.slots, "aux_slots": 0}
        opened = self._call("open_pool", layouts=[layout], windows=[window], tiles=tiles, **slots)
        self._reader = PoolReader.attach(opened["pool"], run_id=self._settings.run, epoch=1)
        known = Layout.from_wire(layout)
        self._layout_id = self._reader.register(known)
        return known.payload_nbytes

    def land(self, parts: Sequence[tuple[bytes, bytes]]) -> tuple[float, list[tuple[int, int]], bytes]:
        """Fetch and pack each, wanted ahead as a feeder does: (seconds, bytes by store, the rows' digests)."""
        assert self._reader is not None
        self._stores.brought = []
        digests = b""
        began = time.monotonic()
        for plan, digest in parts:
            self._call("prefetch", plan=plan, digests=digest)
        for index, (plan, digest) in enumerate(parts):
            packed = self._call(
                "pack", step=1, index=index, is_final=False, aux=False, layout_id=self._layout_id, digest=bytes(16),
                loss_tokens=1, segments=1, plan=plan, digests=digest, timeout_s=WAIT_S,
            )  # fmt: skip
            with self._reader.lease(handle_from_wire(packed["handle"])):
                digests += packed["row_digests"]
        return time.monotonic() - began, self._stores.brought, digests

    def plain(self, sizes: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, int]:
        """For each micro-batch (store, bytes) of its requests; as many asked for ahead as the agent does."""
        import ray

        nbytes = 0
        waiting: deque[list[Any]] = deque()
        left = deque(sizes)
        began = time.monotonic()
        while left or waiting:
            while left and len(waiting) < AHEAD:
                waiting.append([self._actors[store].plain.remote(size) for store, size in left.popleft()])
            nbytes += sum(found.nbytes for found in ray.get(waiting.popleft(), timeout=WAIT_S))
        return time.monotonic() - began, nbytes

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._agent.close_pool()
        self._identity.close()

    def left(self) -> list[str]:
        """What is in this host's shared memory of the run."""
        return owned_objects(self._settings.run)

    def _call(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._agent.commands[command](Arguments(command, arguments), lambda: False)

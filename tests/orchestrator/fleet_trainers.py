"""Trainers of a fleet in one process: real workers, each with its own rows; figures are summed over them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from fleet_doubles import DoubleHosts

from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.orchestrator.fleet_site import FleetChannels
from shmstage.packing.trajectory import Group
from shmstage.packing.window import Window
from shmstage.testing.engines import MemoryStore
from shmstage.testing.engines_packed import PackedToyEngine
from shmstage.testing.memory_channel import MemoryChannel, MemoryServerChannel
from shmstage.trainer.worker import Worker
from shmstage.transport.server import Pending, Server
from shmstage.wire.messages import PROTOCOL_VERSION, Welcome

POLL_S = 0.02
WAIT_S = 60.0


class Exchange:
    """What collectives are: every host gives a value and gets the sum."""

    def __init__(self, hosts: int) -> None:
        self._barrier = threading.Barrier(hosts)
        self._values: dict[int, Any] = {}

    def sum(self, host: int, value: Mapping[str, float]) -> dict[str, float]:
        self._values[host] = value
        self._barrier.wait(WAIT_S)
        total = {name: sum(each[name] for each in self._values.values()) for name in value}
        self._barrier.wait(WAIT_S)
        return total


class SummedFigures:
    """Wraps an engine: metrics and evaluations are those of all hosts together. Parameters stay each host's own."""

    def __init__(self, inner: Any, host: int, exchange: Exchange) -> None:
        self._inner, self._host, self._exchange = inner, host, exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def metrics(self) -> dict[str, Any]:
        found = {name: float(np.asarray(value)) for name, value in self._inner.metrics().items()}
        mine = {"denominator": found["denominator"], "loss": found["loss"] * found["denominator"]}
        total = self._exchange.sum(self._host, mine)
        found |= {"denominator": total["denominator"], "loss": total["loss"] / total["denominator"]}
        return {name: jnp.float32(value) for name, value in found.items()}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        found = {name: float(np.asarray(value)) for name, value in self._inner.eval_step(batch).items()}
        return {name: jnp.float32(value) for name, value in self._exchange.sum(self._host, found).items()}


class DoubleHostTrainer:
    """One host's trainer: a worker over the part of a micro-batch that ``window`` is."""

    def __init__(self, run: str, host: int, window: Window, tiles: tuple[int, int], engine: Any) -> None:
        self.received: list[str] = []
        self.hellos: list[str] = []
        self._host = host
        self._window = window
        self._tiles = tiles
        self._channel = MemoryServerChannel()
        self._identity = ProcessIdentity.create(run, "trainer")
        self._server = Server(self._channel, incarnation=host + 1)
        self._worker = Worker(
            engine, emit=self._server.emit, identity=self._identity, incarnation=host + 1, timeout_s=WAIT_S,
            cancelled=lambda: self._server.hello_waiting or self._closing,
        )  # fmt: skip
        self._closing = False
        self._server.start()
        self._thread = threading.Thread(target=self._run, name="host trainer", daemon=True)
        self._thread.start()

    def connect(self) -> MemoryChannel:
        return self._channel.connect()

    def close(self) -> None:
        self._closing = True
        self._thread.join(WAIT_S)
        self._server.close()
        self._worker.close()
        self._identity.close()

    def _run(self) -> None:
        while not self._closing:
            pending = self._server.next_request(POLL_S)
            if pending is not None:
                try:
                    self._answer(pending)
                except Exception as error:
                    pending.fail(error)

    def _answer(self, pending: Pending) -> None:
        if pending.hello is not None:
            self.hellos.append(pending.hello.pool)
            # here a slot's part is all there is: no array spans two hosts
            info = self._worker.attach(replace(pending.hello, global_layouts=[]))
            me = (self._identity.pid, self._identity.start_ticks, self._identity.lock_path)
            pending.welcome(Welcome(PROTOCOL_VERSION, self._server.incarnation, *me, info))
            return
        self.received.append(pending.command)
        if pending.command == "ranges":
            pending.reply(self._ranges(Layout.from_wire(pending.arguments["layout"])))
            return
        result = self._worker.execute(pending.command, pending.arguments)
        if self._host and "param_digest" in result:
            result = {**result, "param_digest": ""}
        pending.reply(result)

    def _ranges(self, layout: Layout) -> dict[str, Any]:
        w = self._window
        own = [[w.row_begin, w.row_end], [w.token_begin, w.token_end]]
        ranges = {f.name: (own + [[0, size] for size in f.shape[2:]])[: len(f.shape)] for f in layout.fields}
        return {"ranges": ranges, "tiles": list(self._tiles)}


class DoubleFleet:
    """Hosts with agents, stores and trainers; ``channels`` for each session anew. Used with ``with``."""

    def __init__(
        self, run: str, groups: Sequence[Group], windows: Sequence[Window], tiles: tuple[int, int], **store: Any
    ) -> None:
        self.hosts = DoubleHosts(run, groups, len(windows), **store)
        self.trainers: list[DoubleHostTrainer] = []
        #: to agents and stores, of the newest session
        self.counted: list[MemoryChannel] = []
        self._run, self._windows, self._tiles = run, windows, tiles
        self._stores = [MemoryStore() for _ in windows]

    def start_trainers(self) -> None:
        """Anew, as a gang that is started again has them; their checkpoints are there."""
        self.end_trainers()
        exchange = Exchange(len(self._windows))
        for host, window in enumerate(self._windows):
            engine = SummedFigures(PackedToyEngine(window.tokens, store=self._stores[host]), host, exchange)
            self.trainers.append(DoubleHostTrainer(self._run, host, window, self._tiles, engine))

    def end_trainers(self) -> None:
        while self.trainers:
            self.trainers.pop().close()

    def channels(self) -> FleetChannels:
        agents, stores = self.hosts.agents, self.hosts.stores
        feeds, auxes = [agent.feed.connect() for agent in agents], [agent.aux.connect() for agent in agents]
        shares = [store.door.connect() for store in stores]
        self.counted = [*feeds, *auxes, *shares]
        return FleetChannels(
            self.hosts.names, [trainer.connect() for trainer in self.trainers], feeds, auxes, shares
        )

    def __enter__(self) -> DoubleFleet:
        return self

    def __exit__(self, *about: object) -> None:
        self.end_trainers()
        self.hosts.__exit__()

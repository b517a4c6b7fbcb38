"""A worker and the producer it would be fed by, in one process: what the trainer's tests drive."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.testing.engines import MemoryStore, ToyEngine, toy_layout
from shmstage.trainer.optax_engine import OptaxEngine
from shmstage.trainer.worker import Worker
from shmstage.wire.codec import FRAME_LIMIT_NBYTES, encode
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, TicketEvent, TokenEvent

RUN = f"trainer-test-{os.getpid()}"
DEADLINE_S = 30.0


class Rig:
    """``worker`` attached to a pool of ``slots`` slots; events land in ``tokens`` and ``tickets``."""

    def __init__(
        self,
        engine: Any,
        *,
        layout: Layout | None = None,
        whole: Layout | None = None,
        slots: int = 4,
        payload_shift: int = 0,
        aux_slots: int = 0,
        frame_limit_nbytes: int = FRAME_LIMIT_NBYTES,
        content: Callable[[Layout, int], dict[str, np.ndarray[Any, Any]]] | None = None,
        identity: ProcessIdentity,
        **worker: Any,
    ) -> None:
        self.engine = engine
        self.layout = layout or toy_layout()
        #: of whole micro-batches, where the slots hold a host's part of them
        self.whole = whole
        self.identity = identity
        self._slots = slots
        self._aux_slots = aux_slots
        self._shift = payload_shift
        self._content = content or microbatch
        self._frame_limit_nbytes = frame_limit_nbytes
        self._events: queue.SimpleQueue[TokenEvent | TicketEvent] = queue.SimpleQueue()
        self.tokens: list[TokenEvent] = []
        self.tickets: dict[int, TicketEvent] = {}
        self.pools: list[Pool] = []
        self.worker = Worker(engine, emit=self._emit, identity=identity, timeout_s=DEADLINE_S, **worker)
        self.epoch = 0

    # --- the producer's side --------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        return self.pools[-1]

    def new_epoch(self) -> dict[str, Any]:
        self.epoch += 1
        pool = Pool.create(
            RUN, epoch=self.epoch, layouts=[self.layout], slots=self._slots, identity=self.identity,
            aux_slots=self._aux_slots, payload_shift=self._shift,
        )  # fmt: skip
        self.pools.append(pool)
        return self.worker.attach(self.hello())

    def hello(self, withdrawn: list[list[int]] | None = None) -> Hello:
        layouts = [self.layout.to_wire()]
        me = (self.identity.lock_path, self.identity.pid, self.identity.start_ticks)
        whole = [] if self.whole is None else [self.whole.to_wire()]
        return Hello(PROTOCOL_VERSION, RUN, self.epoch, self.pool.name, layouts, withdrawn or [], *me, whole)

    def publish(
        self, step: int, index: int, *, final: bool = False, seed: int | None = None, aux: bool = False
    ) -> Handle:
        slot = self.pool.acquire(self.layout, timeout_s=DEADLINE_S, aux=aux)
        for name, values in self._content(self.layout, step * 100 + index if seed is None else seed).items():
            slot.views[name][...] = values
        return slot.publish(step=step, index=index, is_final=final, rows=self.layout.fields[0].shape[0])

    # --- the caller's side ----------------------------------------------------------------------------------

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        if isinstance(arguments.get("handle"), Handle):
            arguments["handle"] = handle_to_wire(arguments["handle"])
        return self.worker.execute(command, arguments)

    def open(self) -> None:
        """Through the gate: restore, then the first checkpoint if there is none."""
        if self.call("restore_checkpoint")["step"] is None:
            self.ticket(self.call("save_checkpoint", step=0, metadata={}))

    def ticket(self, reply: Mapping[str, Any]) -> TicketEvent:
        """The resolved ticket that ``reply`` promised."""
        number = reply["ticket"]
        while number not in self.tickets:
            self._take()
        return self.tickets[number]

    def token(self, kind: str, request_id: str) -> TokenEvent:
        while True:
            for event in self.tokens:
                if (event.kind, event.request_id) == (kind, request_id):
                    return event
            self._take()

    def _emit(self, event: TokenEvent | TicketEvent) -> None:
        encode(replace(event, number=1), limit_nbytes=self._frame_limit_nbytes)  # as a server does
        self._events.put(event)

    def _take(self) -> None:
        event = self._events.get(timeout=DEADLINE_S)
        if isinstance(event, TokenEvent):
            self.tokens.append(event)
        else:
            self.tickets[event.ticket] = event

    def train_step(self, step: int, microbatches: int = 3) -> dict[str, Any]:
        """One serial step; returns its metrics."""
        for index in range(microbatches):
            self.call("fwd_bwd", handle=self.publish(step, index, final=index == microbatches - 1))
        return self.ticket(self.call("get_metrics", step=step)).value

    def reach(self, step: int) -> None:
        """Train until ``step`` is the last update."""
        for following in range(int(self.call("info")["last_step"]) + 1, step + 1):
            self.train_step(following, microbatches=1)

    def digest(self) -> str:
        return str(self.call("info", param_digest=True)["param_digest"])

    def close(self) -> None:
        self.worker.close()
        for pool in self.pools:
            pool.close()


def microbatch(layout: Layout, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Reproducible content for every field."""
    rng = np.random.default_rng(seed)
    return {
        f.name: np.ones(f.shape, f.dtype) if f.name == "mask" else rng.standard_normal(f.shape).astype(f.dtype)
        for f in layout.fields
    }


def toy_engine() -> OptaxEngine:
    return ToyEngine(store=MemoryStore())


@contextmanager
def rigged(
    make_engine: Callable[[], Any] | None = None,
    *,
    opened: bool = True,
    **options: Any,
) -> Iterator[Rig]:
    """A rig, closed at the end. Without ``make_engine`` a toy engine with checkpoints in memory."""
    identity = ProcessIdentity.create(RUN, "test")
    try:
        rig = Rig((make_engine or toy_engine)(), identity=identity, **options)
        try:
            rig.new_epoch()
            if opened:
                rig.open()
            yield rig
        finally:
            rig.close()
    finally:
        identity.close()

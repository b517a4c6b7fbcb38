"""Several hosts in one process: real workers and servers, each with a pool of its own, behind one ``TrainerFleet``.

Every host's slots hold the whole micro-batch, so that each of them trains what one trainer would and no collective is
needed: what is tested is how commands, replies and events of several are made one. The real program drives them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from doubles.rig import NO_FAULTS, STEPS, Case, JumpingClock, TinySource, reference

from shmstage.errors import ShmstageError
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.slots import WritableSlot
from shmstage.orchestrator.assembly import assemble
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.layouts import layouts_of
from shmstage.orchestrator.local_site import local_workplace
from shmstage.orchestrator.resume import ResumeState
from shmstage.orchestrator.step_lines import read_step_lines
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.orchestrator.trainer_fleet import Member, TrainerFleet
from shmstage.records import JsonLines
from shmstage.testing.boundary_table import received_calls
from shmstage.testing.doubles_trainer import DoubleTrainer, Script
from shmstage.testing.engines import MemoryStore
from shmstage.testing.engines_packed import PackedToyEngine
from shmstage.testing.fault_plan import FaultPlan
from shmstage.testing.faulty_channel import FaultyChannel
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.transport.channel import Channel, ServerChannel
from shmstage.transport.client import Client
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

TOKENS = 16
_runs = itertools.count(1)


@dataclass(kw_only=True)
class FleetCase(Case):
    """A case of one trainer, run on ``hosts`` of them. What differs between hosts is given by host."""

    hosts: int = 2
    wire: str = "memory"
    scripts: Mapping[int, Script] = field(default_factory=dict)
    faults: Mapping[int, FaultPlan] = field(default_factory=dict)
    engines: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    grace_s: float = 5.0


@dataclass
class FleetOutcome:
    """``calls`` and ``digest`` by host; ``prepared``: what was prepared there, in words of ``calls``."""

    error: Exception | None
    digest: str
    calls: list[list[str]]
    commands: list[list[str]]
    lines: list[dict[str, Any]]
    saved: list[list[int]]
    free_slots: list[int]
    faults_done: list[str]
    book_left: int


class _FannedSlot:
    """A slot on every host, filled at host 0."""

    def __init__(self, pools: FannedPool, slots: list[WritableSlot], aux: bool) -> None:
        self._pools = pools
        self._slots = slots
        self._aux = aux

    @property
    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._slots[0].views

    def publish(self, **facts: Any) -> Handle:
        for other in self._slots[1:]:
            for name, view in other.views.items():
                np.copyto(view, self._slots[0].views[name])
        parts = [slot.publish(**facts) for slot in self._slots]
        return self._pools.published(parts, aux=self._aux)

    def __enter__(self) -> _FannedSlot:
        return self

    def __exit__(self, *about: object) -> None:
        for slot in self._slots:
            slot.abandon()


class FannedPool:
    """What the feeder and the evaluator ask of a pool, on every host's; handles of the whole go into the book."""

    def __init__(self, pools: list[Pool], book: HandleBook) -> None:
        self._pools = pools
        self._book = book
        self._number = itertools.count(1)
        self._parts: dict[Handle, list[Handle]] = {}

    def acquire(self, layout: Layout, *, aux: bool = False, **options: Any) -> _FannedSlot:
        return _FannedSlot(self, [pool.acquire(layout, aux=aux, **options) for pool in self._pools], aux)

    def published(self, parts: list[Handle], *, aux: bool) -> Handle:
        whole = replace(parts[0], slot=0, generation=next(self._number))
        self._book.put(whole, parts, aux=aux)
        self._parts[whole] = parts
        return whole

    def late_views(self, handle: Handle) -> dict[str, np.ndarray[Any, Any]]:
        return self._pools[0].late_views(self._parts[handle][0])

    def commit_late(self, handle: Handle, name: str) -> None:
        parts = self._parts[handle]
        for pool, part in zip(self._pools, parts, strict=True):
            if part is not parts[0]:
                pool.late_views(part)[name][...] = self._pools[0].late_views(parts[0])[name]
            pool.commit_late(part, name)

    def free_slot_count(self) -> int:
        return min(pool.free_slot_count() for pool in self._pools)

    def heartbeat(self, now_ns: int) -> None:
        for pool in self._pools:
            pool.heartbeat(now_ns)


class FleetWorld:
    """Trainers, pools, clients and the fleet over them. Used with ``with``; leaves nothing."""

    def __init__(self, case: FleetCase) -> None:
        self.case = case
        self.run_id = f"fleet-{os.getpid()}-{next(_runs)}"
        self.out = Path(tempfile.mkdtemp(prefix="fleet"))
        self.settings = case.settings(self.run_id, self.out)
        self.clock = JumpingClock()
        self.source = TinySource(case.source_length)
        self.layouts = layouts_of(self.settings, self.source.first, None)
        self.book = HandleBook(case.hosts)
        self.stores = [MemoryStore() for _ in range(case.hosts)]
        self.trainers: list[DoubleTrainer] = []
        self.pools: list[Pool] = []
        self.members: list[Member] = []
        self.faulty: list[FaultyChannel] = []
        self._closed: list[DoubleTrainer] = []
        self._stack = ExitStack()

    def __enter__(self) -> FleetWorld:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        case = self.case
        self._stack.callback(shutil.rmtree, self.out)
        self.identity = ProcessIdentity.create(self.run_id, "orchestrator")
        self._stack.callback(self.identity.close)
        for host in range(case.hosts):
            self._open_host(host)
        self.fanned: Any = FannedPool(self.pools, self.book)
        self.fleet = TrainerFleet(self.members, self.book, clock=self.clock, grace_s=case.grace_s)
        self._stack.callback(self.fleet.close)
        self.client = TrainerClient(self.fleet, timeout_s=case.call_timeout_s)

    def _open_host(self, host: int) -> None:
        case = self.case
        server, channel = self.channels(host)
        inner = PackedToyEngine(TOKENS, store=self.stores[host])
        trainer = DoubleTrainer(
            self.run_id, case.engines.get(host, case.engine)(inner), server, script=case.scripts.get(host, case.script),
            incarnation=host + 1, device_buffers=case.device_buffers,
        )  # fmt: skip
        self._stack.callback(self._close_trainer, trainer)
        trainer.start()
        self.trainers.append(trainer)
        pool = Pool.create(
            self.run_id, epoch=1, layouts=self.layouts.all, slots=case.slots, aux_slots=self.settings.aux_slots,
            identity=self.identity,
        )  # fmt: skip
        self._stack.callback(pool.close)
        for _ in range(host):  # so that no two hosts publish a micro-batch under the same slot and generation
            pool.acquire(self.layouts.train, timeout_s=1.0).abandon()
        self.pools.append(pool)
        faulty = FaultyChannel(channel, case.faults.get(host, NO_FAULTS), on_fault=self.clock.on_fault)
        self.faulty.append(faulty)
        self.members.append(Member(f"host {host} (node-{host})", Client(faulty, clock=self.clock)))

    def channels(self, host: int) -> tuple[ServerChannel, Channel]:
        server = MemoryServerChannel()
        return server, server.connect()

    def _close_trainer(self, trainer: DoubleTrainer) -> None:
        if trainer not in self._closed:
            self._closed.append(trainer)
            trainer.close()

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    def hello(self) -> None:
        me = (self.identity.lock_path, self.identity.pid, self.identity.start_ticks)
        layouts = [each.to_wire() for each in self.layouts.all]
        hellos = [Hello(PROTOCOL_VERSION, self.run_id, 1, pool.name, layouts, [], *me) for pool in self.pools]
        welcomes = self.fleet.hello(hellos, timeout_s=self.case.call_timeout_s)
        for member, welcome in zip(self.members, welcomes, strict=True):
            member.client.peer = watch = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
            self._stack.callback(watch.close)

    def publish(self, step: int, index: int, *, final: bool = False, aux: bool = False) -> Handle:
        """A micro-batch on every host, without a feeder."""
        slot = self.fanned.acquire(self.layouts.train, timeout_s=10.0, aux=aux)
        for name, view in slot.views.items():
            view[...] = 1 if name in ("segment_ids", "completion_mask") else (step * 10 + index) % 7
        whole: Handle = slot.publish(step=step, index=index, is_final=final, rows=2, digest=bytes([step, index]) * 8)
        return whole

    def open(self) -> None:
        """Hello, restore and checkpoint 0, by hand."""
        self.hello()
        self.client.restore_checkpoint()
        self.ticket(self.client.save_checkpoint(0, {}))

    def ticket(self, number: int) -> Any:
        return next(event for event in self.until(lambda e: getattr(e, "ticket", None) == number)[-1:])

    def until(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """Events up to and with the wanted one."""
        heard: list[Any] = []
        deadline = threading.Event()
        timer = threading.Timer(30.0, deadline.set)
        timer.start()
        try:
            while not deadline.is_set():
                for event in self.fleet.events(0.2):
                    heard.append(event)
                    if wanted(event):
                        return heard
        finally:
            timer.cancel()
        raise TimeoutError(f"never came; heard {heard}; missing {self.fleet.missing()}")

    def run(self) -> FleetOutcome:
        """The real program to whatever end."""
        error: Exception | None = None
        digest = ""
        try:
            digest = self._run()
        except Exception as raised:
            error = raised
            try:
                self.client.shutdown(discard=True, timeout_s=5.0)
            except ShmstageError as untold:
                print(f"not told to stop: {untold}")
        return self.outcome(error, digest)

    def _run(self) -> str:
        self.hello()
        settings, path = self.settings, self.out / STEPS
        restored, _ = self.client.restore_checkpoint()
        assert restored is None
        watch: Any = self.members[0].client.peer
        with ExitStack() as stack:
            lines = JsonLines(path)
            stack.callback(lines.close)
            parts = assemble(
                settings, local_workplace(settings, self.source, None, self.layouts, self.fanned, watch), self.client,
                None, plan={}, start=ResumeState.start(), first_step=1, attempt=1, write_step=lines.write,
                sync_lines=lines.sync, stop_requested=self.case.stop_requested,
            )  # fmt: skip
            stack.callback(parts.feeder.close)
            parts.program.prepare(restored)
            parts.program.run(parts.feeder)
        return self.client.shutdown(discard=False)

    def outcome(self, error: Exception | None, digest: str) -> FleetOutcome:
        free = [pool.free_slot_count() for pool in self.pools]
        for trainer in self.trainers:
            self._close_trainer(trainer)
        told = [[r for r in trainer.received if r["command"] not in ("prepare", "drop_staged")] for trainer in
                self.trainers]  # fmt: skip
        return FleetOutcome(
            error=error,
            digest=digest,
            calls=[received_calls(records) for records in told],
            commands=[[str(record["command"]) for record in trainer.received] for trainer in self.trainers],
            lines=read_step_lines(self.out / STEPS),
            saved=[store.steps() for store in self.stores],
            free_slots=free,
            faults_done=[entry for faulty in self.faulty for entry in faulty.script.done],
            book_left=len(self.book),
        )


@contextmanager
def fleet_of(hosts: int = 2, *, opened: bool = True, **more: Any) -> Iterator[FleetWorld]:
    """A fleet to be called by hand."""
    with FleetWorld(FleetCase(mode="serial", hosts=hosts, **more)) as world:
        if opened:
            world.open()
        yield world


def run(case: FleetCase) -> FleetOutcome:
    with FleetWorld(case) as world:
        return world.run()


def assert_as_one_trainer(case: FleetCase, outcome: FleetOutcome) -> None:
    """Bit for bit what the reference loop, which knows no hosts, makes of the same input; and nothing is left over."""
    if outcome.error is not None:
        raise outcome.error
    wanted = reference(case)
    assert [line["step"] for line in outcome.lines] == list(range(1, len(case.counts) + 1))
    assert [line["denominator"] for line in outcome.lines] == wanted.denominators
    assert [line["loss"] for line in outcome.lines] == wanted.losses
    assert [line["payload_digests"] for line in outcome.lines] == wanted.payload_digests
    assert outcome.digest == wanted.param_digests[-1]
    assert all(calls == outcome.calls[0] for calls in outcome.calls), "hosts heard different commands"
    assert all(free >= case.slots for free in outcome.free_slots), "a lease was not ended"
    assert outcome.book_left == 0, "the book remembers what is over"

"""A whole run in one process: pool, feeder, intake, program and client here, a trainer double on a thread."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shmstage.errors import PoolError, ShmstageError
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import sweep
from shmstage.orchestrator.assembly import assemble, plan_settings
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.layouts import layouts_of
from shmstage.orchestrator.local_site import local_workplace
from shmstage.orchestrator.resume import ResumeState, state_from_metadata
from shmstage.orchestrator.step_lines import last_step, read_step_lines, roll_back
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.packing.source import Group
from shmstage.packing.trajectory import Trajectory
from shmstage.records import JsonLines
from shmstage.settings import Boundary, Settings, WeightSync
from shmstage.testing.boundary_table import expected_calls, received_calls
from shmstage.testing.doubles_device import Device
from shmstage.testing.doubles_trainer import DoubleTrainer, Script
from shmstage.testing.engines import MemoryStore
from shmstage.testing.engines_doubles import SettledInOrder
from shmstage.testing.engines_packed import PackedToyEngine
from shmstage.testing.engines_placing import place_private_copies
from shmstage.testing.fault_plan import Effect, FaultPlan
from shmstage.testing.faulty_channel import FaultyChannel, FaultyServerChannel
from shmstage.testing.memory_channel import MemoryServerChannel
from shmstage.testing.numpy_packer import pack_with_numpy
from shmstage.testing.reference_loop import reference_loop
from shmstage.trainer.digests import param_digest, payload_digest
from shmstage.transport.channel import Channel, ServerChannel
from shmstage.transport.client import RETRY_S, Client
from shmstage.transport.endpoint_lock import clear_stale_endpoints
from shmstage.transport.endpoints import endpoint_for, socket_path
from shmstage.transport.zmq import ZmqChannel, ZmqServerChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

ROWS, TOKENS = 2, 16
DEADLINE_S = 60.0
STEPS = "steps.jsonl"
NO_FAULTS = FaultPlan()
MakeEngine = Callable[[Any], Any]

_runs = itertools.count(1)


class TinySource:
    """``microbatches`` batches, each of which fills exactly one micro-batch."""

    replayable = True
    passes = 1

    def __init__(self, microbatches: int) -> None:
        self._groups = [tiny_group(number) for number in range(microbatches)]
        self.first = self._groups[0].trajectories[0]

    def groups(self, cursor: int) -> Iterator[Group]:
        return iter(self._groups[cursor:])


@functools.lru_cache(maxsize=64)
def tiny_group(number: int) -> Group:
    noise = np.random.default_rng(number)
    made = []
    for row in range(ROWS):
        length = int(noise.integers(TOKENS // 2 + 1, TOKENS + 1))  # two of them never share a row
        made.append(
            Trajectory(
                trajectory_id=f"t{number}.{row}",
                group_id=f"g{number}",
                batch_index=number,
                tokens=noise.integers(0, 1 << 20, length, dtype=np.int32),
                loss_mask=np.ones(length, np.float32),
                advantages=noise.standard_normal(length).astype(np.float32),
                old_logprobs=noise.standard_normal(length).astype(np.float32),
            )
        )
    return Group(f"g{number}", number, tuple(made))


class JumpingClock:
    """The client's clock: real, and ahead by what it was told to jump, so that no test waits for a retry."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        #: 0: it never jumps, where a deadline is to leave the others the time they need
        self.jump_s = RETRY_S
        self.wake: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def on_fault(self, name: str, effect: Effect) -> None:
        if effect in (Effect.LOSE, Effect.DELAY):
            self.ahead_s += self.jump_s
            self.wake()  # else whoever waits looks at the clock a tenth of a second later


@dataclass(kw_only=True)
class Case:
    """One run: what is trained, in which mode, and what goes wrong. Everything has the quiet default."""

    mode: Boundary
    steps: int = 3
    microbatches: int = 2
    #: how many micro-batches the source holds; None: as many as the steps need
    input_length: int | None = None
    bounded: bool = True
    checkpoint_every: int = 0
    weight_sync: WeightSync = "off"
    engine: MakeEngine = lambda inner: inner
    device: Device | None = None
    device_buffers: int = 2
    script: Script = field(default_factory=Script)
    client_faults: FaultPlan = NO_FAULTS
    server_faults: FaultPlan = NO_FAULTS
    wire: str = "zmq"
    call_timeout_s: float = DEADLINE_S
    slots: int = 3
    #: bytes by which slots miss the alignment that JAX aliases
    payload_shift: int = 0
    #: ahead of time and for each engine anew, where the programs would be found in JAX's cache
    compiles: bool = False
    #: further settings by name
    more: dict[str, Any] = field(default_factory=dict)
    stop_requested: Callable[[], bool] = lambda: False
    write_step: Callable[[dict[str, Any]], None] = lambda line: None
    store: MemoryStore = field(default_factory=MemoryStore)

    @property
    def counts(self) -> list[int]:
        """Micro-batches of each step."""
        full, rest = divmod(self.source_length, self.microbatches)
        counts = [self.microbatches] * full + ([rest] if rest else [])
        return counts[: self.steps] if self.bounded else counts

    @property
    def source_length(self) -> int:
        return self.steps * self.microbatches if self.input_length is None else self.input_length

    def settings(self, run_id: str, out: Path) -> Settings:
        """What a run is told; a planned stage waits for its micro-batch, so that nothing depends on speed."""
        return Settings(
            run=run_id, out=out, boundary=self.mode, rows=ROWS, tokens=TOKENS, slots=self.slots, latch=False,
            microbatches_per_step=self.microbatches, steps=self.steps if self.bounded else None, passes=1,
            checkpoint_every=self.checkpoint_every, weight_sync=self.weight_sync, stage_wait_s=DEADLINE_S,
            call_timeout_s=self.call_timeout_s, slot_timeout_s=DEADLINE_S, **self.more,
        )  # fmt: skip


class KilledError(Exception):
    """The orchestrator dies here: it says nothing to anybody any more."""


@dataclass
class Outcome:
    """What there is to see of a run that is over."""

    error: Exception | None
    calls: list[str]
    lines: list[dict[str, Any]]
    saved: list[int]
    param_digest: str
    faults_done: list[str]
    faults_unmet: list[Any]
    free_slots: int

    @property
    def written(self) -> list[int]:
        """The steps that have a line."""
        return [line["step"] for line in self.lines]


class Orchestrator:
    """The orchestrating side in one epoch: made, run once, closed."""

    def __init__(
        self, case: Case, settings: Settings, channel: Channel, clock: JumpingClock, *, epoch: int, attempt: int
    ) -> None:
        self.case = case
        self.first_step = 1
        self._settings = settings
        self._attempt = attempt
        self._source = TinySource(case.source_length)
        self._layouts = layouts_of(settings, self._source.first, None)
        self._stack = ExitStack()
        identity = ProcessIdentity.create(settings.run, "orchestrator")
        self._stack.callback(identity.close)
        self.pool = Pool.create(
            settings.run, epoch=epoch, layouts=self._layouts.all, slots=case.slots, aux_slots=settings.aux_slots,
            identity=identity, payload_shift=case.payload_shift,
        )  # fmt: skip
        self._stack.callback(self._close_pool)
        self.client = Client(channel, clock=clock)
        self._stack.callback(self.client.close)
        self._hello = Hello(
            PROTOCOL_VERSION, settings.run, epoch, self.pool.name, [each.to_wire() for each in self._layouts.all], [],
            identity.lock_path, identity.pid, identity.start_ticks,
        )  # fmt: skip
        self.trainer = TrainerClient(self.client, timeout_s=case.call_timeout_s)

    def run(self) -> str:
        """Connect, restore, train to the end, shut down; returns the parameters' digest."""
        case, settings = self.case, self._settings
        welcome = self.client.hello(self._hello, timeout_s=case.call_timeout_s)
        self.client.peer = watch = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
        self._stack.callback(watch.close)
        path = settings.out_dir / STEPS
        restored, metadata = self.trainer.restore_checkpoint(at_most=last_step(path))
        if case.compiles:
            for layout in self._layouts.all:
                self.trainer.compile(layout.layout_id, ["train"])
        self.first_step = (restored or 0) + 1
        roll_back(path, to_step=restored or 0)
        with ExitStack() as stack:
            self._lines = JsonLines(path)
            stack.callback(self._lines.close)
            parts = assemble(
                settings, local_workplace(settings, self._source, None, self._layouts, self.pool, watch),
                self.trainer, None, plan={},
                start=state_from_metadata(metadata, settings.out_dir) if restored else ResumeState.start(),
                first_step=self.first_step, attempt=self._attempt, write_step=self._write_step,
                sync_lines=self._lines.sync, stop_requested=case.stop_requested,
            )  # fmt: skip
            parts.program.prepare(restored)
            try:
                parts.program.run(parts.feeder)
            finally:
                parts.feeder.close()
        return self.trainer.shutdown(discard=parts.program.ended_by is not None)

    def abandon(self) -> None:
        """Tell a living trainer to drop everything, as a session does after an error."""
        assert self.client.peer is None or isinstance(self.client.peer, PeerWatch)
        if self.client.peer is None or not self.client.peer.dead():
            try:
                self.trainer.shutdown(discard=True, timeout_s=5.0)
            except ShmstageError as error:
                print(f"the trainer could not be told to stop: {error}")

    def close(self) -> None:
        self._stack.close()

    def _write_step(self, line: dict[str, Any]) -> bool:
        self.case.write_step(line)
        return self._lines.write(line)

    def _close_pool(self) -> None:
        try:
            self.pool.close()
        except PoolError as error:
            print(f"on closing the pool: {error}")


class World:
    """A transport and, one after the other, trainers and orchestrators on it. Used with ``with``; leaves nothing."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.run_id = f"double-{os.getpid()}-{next(_runs)}"
        self.clock = JumpingClock()
        self.epoch = 0
        self.incarnation = 0
        self.out = Path(tempfile.mkdtemp(prefix="double"))
        self.trainer: DoubleTrainer | None = None
        self.orchestrator: Orchestrator | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.first_step = 1
        self.free_slots = 0
        self.ended_well = False
        self.scripts: list[Any] = []
        self._server: ServerChannel | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *about: object) -> None:
        try:
            self.end_orchestrator()
        finally:
            try:
                self.end_trainer()
            finally:
                shutil.rmtree(self.out)

    def start_trainer(self, case: Case | None = None) -> DoubleTrainer:
        case = case or self.case
        self.end_trainer()
        self.incarnation += 1
        memory = case.wire == "memory"
        self._server = MemoryServerChannel() if memory else ZmqServerChannel.bind(endpoint_for(self.run_id, "trainer"))
        faulty = FaultyServerChannel(self._server, case.server_faults, on_fault=self.clock.on_fault)
        self.scripts.append(faulty.script)
        self.trainer = DoubleTrainer(
            self.run_id, case.engine(PackedToyEngine(TOKENS, store=case.store)), faulty, script=case.script,
            device=case.device, incarnation=self.incarnation, device_buffers=case.device_buffers,
        )  # fmt: skip
        self.trainer.start()
        return self.trainer

    def start_process(self, *dies: str) -> subprocess.Popen[bytes]:
        """A trainer in a process of its own, its checkpoints in OUT; ``dies``: arguments of ``doubles_trainer``."""
        self.end_trainer()
        self.incarnation += 1
        command = [sys.executable, "-m", "shmstage.testing.doubles_trainer", self.run_id]
        more = ["--checkpoints", str(self.out / "checkpoints"), "--incarnation", str(self.incarnation), *dies]
        with (self.out / "trainer.log").open("ab") as log:
            process = subprocess.Popen([*command, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.process = process
        return process

    def start_orchestrator(self, case: Case | None = None) -> Orchestrator:
        case = case or self.case
        self.end_orchestrator()
        self.epoch += 1
        if case.wire == "memory":
            assert isinstance(self._server, MemoryServerChannel)
            channel: Channel = self._server.connect()
        else:
            channel = ZmqChannel.connect(endpoint_for(self.run_id, "trainer"))
        faulty = FaultyChannel(channel, case.client_faults, on_fault=self.clock.on_fault)
        self.clock.wake = faulty.wake
        self.scripts.append(faulty.script)
        settings = case.settings(self.run_id, self.out)
        self.orchestrator = Orchestrator(case, settings, faulty, self.clock, epoch=self.epoch, attempt=self.epoch)
        return self.orchestrator

    def run(self) -> Outcome:
        """One trainer, one orchestrator, to whatever end."""
        trainer = self.start_trainer()
        error, digest = self.session()
        return self.outcome(trainer, error, digest)

    def session(self, case: Case | None = None) -> tuple[Exception | None, str]:
        """One orchestrator with the trainer that is there, in a new epoch; (what ended it, the parameters' digest)."""
        orchestrator = self.start_orchestrator(case)
        error: Exception | None = None
        digest = ""
        try:
            digest = orchestrator.run()
        except KilledError as killed:
            error = killed
        except Exception as raised:
            error = raised
            orchestrator.abandon()
        self.free_slots = orchestrator.pool.free_slot_count()
        self.first_step = orchestrator.first_step
        self.end_orchestrator()
        self.ended_well = error is None
        return error, digest

    def outcome(self, trainer: DoubleTrainer, error: Exception | None, digest: str) -> Outcome:
        """Ends the trainer: what it still writes is written then."""
        self.end_trainer()
        return Outcome(
            error=error,
            calls=received_calls(trainer.received),
            lines=read_step_lines(self.out / STEPS),
            saved=self.case.store.steps(),
            param_digest=digest,
            faults_done=[entry for script in self.scripts for entry in script.done],
            faults_unmet=[fault for script in self.scripts for fault in script.unmet()],
            free_slots=self.free_slots,
        )

    def end_orchestrator(self) -> None:
        self.clock.wake = lambda: None
        if self.orchestrator is not None:
            orchestrator, self.orchestrator = self.orchestrator, None
            orchestrator.close()

    def end_trainer(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            try:
                process.wait(DEADLINE_S if self.ended_well else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            sweep(self.run_id)
            clear_stale_endpoints([socket_path(endpoint_for(self.run_id, "trainer"))])
        if self.trainer is not None:
            trainer, self.trainer = self.trainer, None
            trainer.close()


def run(case: Case) -> Outcome:
    with World(case) as world:
        return world.run()


# --- the oracle -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """What the reference loop makes of the same input; digests by step."""

    param_digests: list[str]
    losses: list[float]
    denominators: list[float]
    payload_digests: list[list[str]]


def reference(case: Case, engine: MakeEngine | None = None) -> Reference:
    """The reference loop over the case's input. ``engine`` is for one that replays: its settling is part of it."""
    if engine is not None:
        return _reference(tuple(case.counts), lambda inner: SettledInOrder(engine(inner)))
    return _plain_reference(tuple(case.counts))


@functools.lru_cache(maxsize=32)
def _plain_reference(counts: tuple[int, ...]) -> Reference:
    return _reference(counts, lambda inner: inner)


def _reference(counts: tuple[int, ...], make: MakeEngine) -> Reference:
    engine = make(PackedToyEngine(TOKENS, store=MemoryStore()))
    settings = Case(mode="serial").settings("reference", Path("nowhere"))
    source = TinySource(sum(counts))
    layout = layouts_of(settings, source.first, None).train
    names, shardings = [field.name for field in layout.fields], engine.shardings(layout)
    planned = iter(Intake(source, plan_settings(settings), passes=1))
    found = Reference([], [], [], [])

    def steps() -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
        for number, count in enumerate(counts, start=1):
            batches = []
            for each in itertools.islice(planned, count):
                trajectories = {key: arrival.trajectory for key, arrival in each.arrivals.items()}
                batches.append(pack_with_numpy(each.plan, trajectories, TOKENS))
            found.payload_digests.append([payload_digest({name: b[name] for name in names}) for b in batches])
            yield number, batches

    def record(number: int, metrics: Mapping[str, Any]) -> None:
        found.losses.append(float(np.asarray(metrics["loss"])))
        found.denominators.append(float(np.asarray(metrics["denominator"])))
        found.param_digests.append(param_digest(engine))

    reference_loop(engine, steps(), lambda arrays: place_private_copies(arrays, shardings), record)
    return found


# --- what every completed run owes ----------------------------------------------------------------------


def assert_as_the_reference(case: Case, outcome: Outcome, wanted: Reference | None = None) -> None:
    """Invariants 1, 2 and 8: the same micro-batches, one update per step, bit-identical losses and parameters."""
    if outcome.error is not None:
        raise outcome.error
    wanted = wanted or reference(case)
    assert outcome.written == list(range(1, len(case.counts) + 1))
    assert [line["payload_digests"] for line in outcome.lines] == wanted.payload_digests
    assert [line["denominator"] for line in outcome.lines] == wanted.denominators
    assert [line["loss"] for line in outcome.lines] == wanted.losses
    assert outcome.param_digest == wanted.param_digests[-1]
    assert outcome.faults_unmet == []
    assert outcome.free_slots >= case.slots, "a lease was not ended"


def assert_contracts_calls(case: Case, outcome: Outcome) -> None:
    """The commands of BOUNDARY.md's table for an undisturbed run in this mode, in its order."""
    variants = [
        expected_calls(
            case.mode, microbatches=case.counts, microbatches_per_step=case.microbatches,
            checkpoint_every=case.checkpoint_every, weight_sync=case.weight_sync != "off", end_came_late=late,
        )
        for late in ((False,) if case.bounded else (False, True))
    ]  # fmt: skip
    if outcome.calls not in variants:
        assert outcome.calls == variants[0]

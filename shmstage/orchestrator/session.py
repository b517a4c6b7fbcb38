"""One orchestrator from its first byte to its last: pool, handshake, program, clean-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shmstage.errors import PoolError, SettingsError, ShmstageError
from shmstage.events import JsonLines, read_json_lines, write_json
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import sweep
from shmstage.orchestrator.feeder import Feeder
from shmstage.orchestrator.input import Input, load_input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.program import Program
from shmstage.orchestrator.schedule import Config
from shmstage.orchestrator.summary import summarise
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.packing.fields import microbatch_layout, optional_fields
from shmstage.packing.plan import PlanSettings
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings
from shmstage.transport.client import Client
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.messages import PROTOCOL_VERSION, Hello

#: how long a trainer may take to answer that it drops everything
ABANDON_S = 10.0


@dataclass
class _Interrupt:
    """Ends a wait for the trainer when a stop is asked for; disarmed while the program stops in its own good order."""

    requested: Callable[[], bool]
    armed: bool = True

    def __call__(self) -> bool:
        return self.armed and self.requested()


@dataclass
class _Trainer:
    client: TrainerClient
    watch: PeerWatch
    interrupt: _Interrupt


def train(settings: Settings, *, epoch: int, stop_requested: Callable[[], bool]) -> dict[str, Any]:
    """Run the orchestrator to its end; returns what ``summary.json`` holds, less what only the launcher can know.

    Raises what ended the run; pool, sockets and lock file are gone either way.
    """
    source = load_input(settings)
    layout = layout_of(source.first, settings)
    with ExitStack() as stack:
        identity = ProcessIdentity.create(settings.run, "orchestrator")
        stack.callback(identity.close)
        sweep(settings.run)
        pool = Pool.create(
            settings.run, epoch=epoch, layouts=[layout], slots=settings.slots, aux_slots=settings.aux_slots,
            identity=identity,
        )  # fmt: skip
        stack.callback(_close_pool, pool)
        try:
            trainer = _connect(settings, pool, identity, stack, stop_requested)
            return _train(settings, source, layout, pool, trainer, stack, stop_requested)
        except Exception as error:
            pool.record_error(f"{type(error).__name__}: {error}")
            raise


def layout_of(first: Trajectory, settings: Settings) -> Layout:
    """The layout of every micro-batch of the run, taken from its first trajectory: all carry the same fields."""
    layers, top_k = first.routing.shape[1:] if first.routing is not None else (0, 0)
    return microbatch_layout(
        settings.rows, settings.tokens, optional=optional_fields(first), layers=int(layers), top_k=int(top_k)
    )


def _close_pool(pool: Pool) -> None:
    """The pool is unlinked in any case; that somebody still looks at it must not hide why the run ends."""
    try:
        pool.close()
    except PoolError as error:
        print(f"on closing the pool: {error}", flush=True)


def _connect(
    settings: Settings, pool: Pool, identity: ProcessIdentity, stack: ExitStack, stop_requested: Callable[[], bool]
) -> _Trainer:
    channel = ZmqChannel.connect(endpoint_for(settings.run, "trainer"))
    interrupt = _Interrupt(stop_requested)
    client = Client(channel, stop=interrupt)
    stack.callback(client.close)
    hello = Hello(
        version=PROTOCOL_VERSION, run_id=settings.run, epoch=pool.epoch, pool=pool.name,
        layouts=[layout.to_wire() for layout in pool.layouts.values()], withdrawn=[],
        lock_path=identity.lock_path, pid=identity.pid, start_ticks=identity.start_ticks,
    )  # fmt: skip
    welcome = client.hello(hello, timeout_s=settings.start_timeout_s)
    watch = PeerWatch(welcome.lock_path, welcome.pid, welcome.start_ticks)
    stack.callback(watch.close)
    client.peer = watch
    return _Trainer(TrainerClient(client, timeout_s=settings.call_timeout_s), watch, interrupt)


def _train(
    settings: Settings,
    source: Input,
    layout: Layout,
    pool: Pool,
    trainer: _Trainer,
    stack: ExitStack,
    stop_requested: Callable[[], bool],
) -> dict[str, Any]:
    client = trainer.client
    try:
        restored, metadata = client.restore_checkpoint()
        first_step = (restored or 0) + 1
        plan = plan_facts(settings, source.first)
        if restored:
            _check_same_plan(metadata.get("plan", {}), plan)
        initial_digest = client.info(param_digest=True)["param_digest"]
        compile_s = client.compile(layout.layout_id)
        attempt = _roll_back(settings.out_dir / "steps.jsonl", to_step=restored or 0)
        steps = JsonLines(settings.out_dir / "steps.jsonl")
        stack.callback(steps.close)
        ledger = Ledger(
            mode=settings.boundary, tokens_per_microbatch=settings.rows * settings.tokens, rows=settings.rows,
            slot_nbytes=layout.payload_nbytes,
        )  # fmt: skip
        program = Program(
            schedule_config(settings, first_step), client, ledger, write_step=steps.write,
            stop_requested=stop_requested, call_timeout_s=settings.call_timeout_s, stage_wait_s=settings.stage_wait_s,
            attempt=attempt, plan=plan, heartbeat=pool.heartbeat,
        )  # fmt: skip
        intake = Intake(source, plan_settings(settings), passes=source.passes)
        feeder = Feeder(
            intake, pool, layout, microbatches_per_step=settings.microbatches_per_step, first_step=first_step,
            last_step=settings.step_cap, slot_timeout_s=settings.slot_timeout_s, peers=[trainer.watch],
            deliver=program.deliver,
        )  # fmt: skip
        program.prepare(restored)
        trainer.interrupt.armed = False
        try:
            program.run(feeder)
        finally:
            feeder.close()
        final_digest = client.shutdown(discard=False)
    except BaseException:
        trainer.interrupt.armed = False
        _abandon(client)
        raise
    summary = summarise(read_json_lines(settings.out_dir / "steps.jsonl"))
    dropped, empty = intake.planner.dropped, intake.planner.skipped_empty
    if dropped or empty:
        summary["warnings"].append(f"not trained: {dropped} over-long and {empty} empty trajectories")
    return {
        **summary,
        "run": settings.run,
        "first_step": first_step,
        "initial_param_digest": initial_digest,
        "param_digest": final_digest,
        "microbatches_per_step": settings.microbatches_per_step,
        "dropped_trajectories": dropped,
        "empty_trajectories": empty,
        "compile_s": compile_s,
        "pool_nbytes": pool.nbytes,
    }


def plan_facts(settings: Settings, first: Trajectory) -> dict[str, Any]:
    """What decides which trajectory is trained in which micro-batch: kept in each checkpoint, compared on resume."""
    names = ("microbatches_per_step", *(field.name for field in fields(PlanSettings)))
    return {**{name: getattr(settings, name) for name in names}, "first_trajectory": first.digest.hex()}


def _check_same_plan(then: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if then.get(name) != value:
            raise SettingsError(
                f"resume: {name} was {then.get(name)!r} when the checkpoint was written and is {value!r} now; "
                "trajectories would be trained twice or never; use the old value, or another --out"
            )


def _roll_back(path: Path, *, to_step: int) -> int:
    """Drop the lines of steps that no checkpoint covers: they are trained again. Returns this attempt's number."""
    lines = read_json_lines(path)  # a torn last line, left by a kill, is dropped with the rest
    kept = [line for line in lines if line["step"] <= to_step]
    if path.exists():
        # in one piece: somebody may be following the file
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
    return 1 + max((line["attempt"] for line in lines), default=0)


def _abandon(client: TrainerClient) -> None:
    """Tell a living trainer to drop deferral, stage and gradients; the error that got us here matters more."""
    try:
        client.shutdown(discard=True, timeout_s=ABANDON_S)
    except ShmstageError as error:
        print(f"the trainer could not be told to stop: {error}", flush=True)


def plan_settings(settings: Settings) -> PlanSettings:
    """What the planner needs of the settings."""
    return PlanSettings(
        rows=settings.rows, tokens=settings.tokens, max_segments_per_row=settings.max_segments_per_row,
        segment_align=settings.segment_align, max_real_tokens=settings.max_real_tokens,
        on_overlong=settings.on_overlong,
    )  # fmt: skip


def schedule_config(settings: Settings, first_step: int = 1) -> Config:
    """What the schedule needs of the settings."""
    return Config(
        mode=settings.boundary, microbatches_per_step=settings.microbatches_per_step, last_step=settings.step_cap,
        checkpoint_every=settings.checkpoint_every, weight_sync=settings.weight_sync != "off", first_step=first_step,
        stage_waits_for_deadline=settings.stage_wait_s is not None,
    )  # fmt: skip


def write_summary(settings: Settings, summary: dict[str, Any]) -> None:
    write_json(settings.out_dir / "summary.json", summary)

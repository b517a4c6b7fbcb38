"""Runs made up event by event: a device, a trainer's thread, a feeder and a caller act out a boundary mode in integers.

What the device waited is known exactly, so the estimators and the legs have a truth to be held against. Nothing here
shares code with what reads it but the names of the events.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmstage.events import LANES, SCHEMA
from shmstage.orchestrator.summary import summarise
from shmstage.timeline.reading import Event, ProcessEvents

MS = 1_000_000
TRAINER, ORCHESTRATOR = "trainer", "orchestrator"
OF_ORCHESTRATOR = frozenset(
    ("group_arrived", "data_wait", "slot_acquired", "packed", "published", "called", "bookkept", "gauged")
)


@dataclass(frozen=True)
class Plan:
    """Durations in ns. ``jitter`` is the relative spread of everything but the micro-batches."""

    mode: str = "serial"
    steps: int = 6
    microbatches: int = 3
    microbatch: int = 60 * MS
    update: int = 12 * MS
    upload: int = 25 * MS
    pack: int = 6 * MS
    slot_wait: int = MS // 2
    data_wait: int = 0
    bookkeeping: int = 18 * MS
    snapshot_call: int = MS
    copy: int = 8 * MS
    trip: int = MS // 10
    scoring: int = 0
    patch: int = 0
    jitter: float = 0.0
    seed: int = 1
    #: (step, index) of micro-batches that are run again
    replays: frozenset[tuple[int, int]] = frozenset()
    checkpoint_every: int = 0
    first_step: int = 1
    begin: int = 1_000 * MS


@dataclass
class Made:
    """``truth``: step k → what the device waited between its last micro-batch and the first of k+1, in ns."""

    plan: Plan
    events: list[Event] = field(default_factory=list)
    truth: dict[int, int] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0

    def processes(self, start: int = 1) -> list[ProcessEvents]:
        found = [ProcessEvents(role, 100 + start, start, "made", 7 * 10**18) for role in (ORCHESTRATOR, TRAINER)]
        for event in sorted(self.events, key=lambda event: event.t):
            found[event.event not in OF_ORCHESTRATOR].events.append(event)
        return found


class _Machine:
    """Clocks of the three threads and the device's two queues."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.made = plan, Made(plan)
        self.caller = self.feeder = self.trainer = self.device = self.uploads = plan.begin
        self.random = random.Random(plan.seed)
        self.sequence = 0
        #: (begin, end, kind, step, index) in the device's order
        self.work: list[tuple[int, int, str, int, int]] = []
        self.stamps: dict[tuple[int, int], dict[str, int]] = {}
        self.busy: list[tuple[int, int]] = []

    def note(self, event: str, t: int, end: int = 0, step: int = -1, index: int = -1, **figures: Any) -> None:
        identity = f"{step}.{index}@0:2" if index >= 0 else ""
        self.made.events.append(Event(t, end, event, LANES[event], step, index, identity, figures))

    def took(self, duration: int) -> int:
        return round(duration * (1 + self.plan.jitter * self.random.random())) if self.plan.jitter else duration

    # --- packing and calls

    def pack(self, step: int, index: int, not_before: int) -> None:
        plan = self.plan
        slot = (step * plan.microbatches + index) % 3
        begin = max(self.feeder, not_before)
        if plan.data_wait and index == 0:
            self.note("data_wait", begin, begin + plan.data_wait)
            begin += plan.data_wait
        got = begin + self.took(plan.slot_wait)
        packed = got + self.took(plan.pack)
        self.note("slot_acquired", begin, got, step, index, slot=slot)
        self.note("packed", got, packed, step, index, slot=slot, nbytes=1 << 20, tokens=1000)
        self.note("published", packed + 1000, 0, step, index, slot=slot, generation=2)
        self.feeder = packed + 1000
        self.stamps.setdefault((step, index), {})["packed"] = packed

    def called(self, command: str, step: int, index: int, not_before: int = 0) -> int:
        """Sends a call; returns when the trainer's thread begins it. ``answered`` closes it."""
        self.sent = max(self.caller, not_before)
        self.received = max(self.sent + self.plan.trip, self.trainer)
        self.command, self.about = command, (step, index)
        self.sequence += 1
        self.note("received", self.received, 0, step, index, command=command, sequence=self.sequence)
        return self.received

    def answered(self, end: int) -> None:
        step, index = self.about
        self.note("executed", self.received, end, step, index, command=self.command, sequence=self.sequence)
        answer = end + self.plan.trip
        self.note("called", self.sent, answer, step, index, command=self.command, sequence=self.sequence)
        self.trainer, self.caller = end, answer

    # --- the device

    def upload(self, step: int, index: int, at: int) -> int:
        begin = max(at, self.uploads)
        self.uploads = begin + self.took(self.plan.upload)
        self.note("staged", begin, self.uploads, step, index, nbytes=1 << 20)
        self.note("lease_ended", self.uploads + 500, 0, step, index, slot=0, generation=2)
        self.stamps[step, index] |= {"upload_begin": begin, "staged_ready": self.uploads}
        return self.uploads

    def forward(self, step: int, index: int, at: int) -> int:
        stamps = self.stamps[step, index]
        needed = max(stamps["staged_ready"], stamps.get("patch_ready", 0))
        self.note("dispatched", at, at + MS // 5, step, index, kind="fwd_bwd")
        ready = self._run("fwd_bwd", step, index, max(at, needed), self.plan.microbatch)
        self.note("ready", ready, 0, step, index, kind="fwd_bwd")
        self.stamps[step, index] |= {"dispatched": at, "ready": ready}
        if (step, index) in self.plan.replays:
            self.note("dispatched", at + MS // 4, at + MS // 3, step, index, kind="replay")
            ready = self._run("replay", step, index, at, self.plan.microbatch)
            self.note("ready", ready, 0, step, index, kind="replay")
            self.stamps[step, index]["ready"] = ready
        self.note("settled", ready, 0, step, index)
        self.note("retired", ready + 100, 0, step, index, buffer=index % 2)
        return ready

    def update(self, step: int, at: int) -> int:
        self.note("dispatched", at, at + MS // 5, step, kind="update")
        landed = self._run("update", step, -1, at, self.took(self.plan.update))
        self.note("landed", landed, 0, step)
        self.stamps[step, -1] = {"dispatched": at, "landed": landed}
        return landed

    def score(self, step: int, index: int, not_before: int) -> None:
        at = self.called("per_token_logps", step, index, not_before)
        end = self._run("scored", step, index, at + MS // 2, self.plan.scoring)
        self.note("scored", end - self.plan.scoring, end, step, index, kind="actor")
        self.busy.append((end - self.plan.scoring, end))
        self.answered(end + MS // 2)
        if self.plan.patch and "staged_ready" in self.stamps[step, index]:
            at = self.called("patch_staged", step, index)
            self.note("patched", at, at + self.plan.patch, step, index)
            self.stamps[step, index]["patch_ready"] = at + self.plan.patch
            self.answered(at + MS // 10)

    def _run(self, kind: str, step: int, index: int, at: int, duration: int) -> int:
        begin = max(at, self.device)
        self.device = begin + duration
        self.work.append((begin, self.device, kind, step, index))
        return self.device

    # --- between two steps

    def snapshots(self, step: int, landed: int) -> None:
        saved = self.plan.checkpoint_every and step % self.plan.checkpoint_every == 0
        asked = ["get_metrics", *(["save_checkpoint"] if saved else []), "prepare_weight_sync"]
        for command in asked:
            at = self.called(command, step, -1)
            kind = {"get_metrics": "metrics", "save_checkpoint": "checkpoint"}.get(command, "weights")
            copied = max(at, landed) + (self.plan.copy if kind != "metrics" else MS // 2)
            self.note("ticketed", at, copied, step, kind=kind)
            if kind == "weights":
                self.note("weights_published", copied, 0, step, version=step)
            if kind == "checkpoint":
                self.note("checkpoint_durable", copied + 5 * MS, 0, step)
            self.answered(at + self.took(self.plan.snapshot_call))

    def published(self, step: int, index: int) -> int:
        return self.stamps[step, index]["packed"] + 1000

    def bookkeep(self, step: int) -> None:
        """Its step line says when the update landed, so it waits for that."""
        begin = max(self.caller, self.stamps[step, -1]["landed"])
        self.caller = begin + self.took(self.plan.bookkeeping)
        self.note("bookkept", begin, self.caller, step)

    def gauge(self, at: int, number: int) -> None:
        self.note("gauged", at, 0, free_slots=number % 3, held_nbytes=(number % 7) << 20, queued=number % 5)
        self.note("memory", at, 0, rss_nbytes=(600 + number % 9) << 20, shared_nbytes=3 << 20)


def made(plan: Plan) -> Made:
    """Acts the plan out."""
    machine = _Machine(plan)
    machine.note("executed", plan.begin, plan.begin + MS, command="restore_checkpoint", sequence=0)
    numbers = range(plan.first_step, plan.first_step + plan.steps)
    machine.pack(plan.first_step, 0, plan.begin + MS)
    for step in numbers:
        (_unstaged if plan.mode in ("serial", "pipelined") else _staged)(machine, step, step == numbers[-1])
        machine.gauge(machine.device, step)
    _finish(machine)
    return machine.made


def _unstaged(machine: _Machine, step: int, over: bool) -> None:
    """The trainer's calls block until the device is done, as the reference's do."""
    plan, count = machine.plan, machine.plan.microbatches
    ahead = plan.mode == "pipelined" and not over
    for key in [(step, index) for index in range(1, count)] + ([(step + 1, 0)] if ahead else []):
        machine.pack(*key, machine.feeder)
    if plan.scoring and step > plan.first_step:
        machine.score(step, 0, machine.published(step, 0))
    ready = 0
    for index in range(count):
        begin = machine.called("fwd_bwd", step, index, machine.published(step, index))
        placed = machine.upload(step, index, begin + 20_000)
        ready = machine.forward(step, index, placed)
        if index == count - 1:
            ready = machine.update(step, placed + MS // 2)
        machine.answered(ready)
        if index == 0 and plan.mode == "pipelined" and step > plan.first_step:
            machine.bookkeep(step - 1)
    machine.snapshots(step, ready)
    if plan.mode == "serial":
        machine.bookkeep(step)
        if not over:
            machine.pack(step + 1, 0, machine.caller)


def _staged(machine: _Machine, step: int, over: bool) -> None:
    """Calls return when they have dispatched; two device buffers."""
    plan, count = machine.plan, machine.plan.microbatches
    defers = plan.mode == "staged_before_update" and not over
    for key in [(step, index) for index in range(1, count)] + ([] if over else [(step + 1, 0)]):
        machine.pack(*key, machine.feeder)
    for index in range(count):
        first = step == plan.first_step and index == 0
        begin = machine.called("fwd_bwd" if first else "fwd_bwd_staged", step, index, machine.published(step, index))
        at = machine.upload(step, 0, begin) if first else begin + 20_000
        machine.forward(step, index, at)
        if index == count - 1 and not defers:
            machine.update(step, at + MS // 2)
        machine.answered(at + MS)
        if index == 0 and not first:
            machine.bookkeep(step - 1)
        following = (step, index + 1) if index < count - 1 else (step + 1, 0)
        if following[0] == step or not over:
            begin = machine.called("stage_fwd_bwd", *following, machine.published(*following))
            earlier = machine.stamps.get((step, index - 1) if index else (step - 1, count - 1), {})
            free = max(begin, earlier.get("ready", 0))
            machine.upload(*following, free)
            machine.answered(free + MS // 10)
    if defers:
        begin = machine.called("apply_deferred_update", step, -1)
        machine.update(step, begin + MS // 10)
        machine.answered(begin + MS // 4)
    machine.snapshots(step, machine.stamps[step, -1]["landed"])
    if plan.scoring and not over:
        machine.score(step + 1, 0, 0)


def _finish(machine: _Machine) -> None:
    made, plan = machine.made, machine.plan
    made.end = max(machine.device, machine.caller)
    order = machine.work
    for step in range(plan.first_step, plan.first_step + plan.steps - 1):
        of_step = [w for w in order if w[3] == step and w[2] in ("fwd_bwd", "replay", "update")]
        first = next(w for w in order if w[2] == "fwd_bwd" and w[3] == step + 1)
        finished = max(w[1] for w in of_step if w[2] != "update")
        update = next(w for w in of_step if w[2] == "update")
        scored = sum(min(e, first[0]) - max(b, finished) for b, e in machine.busy if b >= finished and e <= first[0])
        made.truth[step] = first[0] - finished - (update[1] - update[0]) - scored
    previous = 0
    for step in range(plan.first_step, plan.first_step + plan.steps):
        made.lines.append(_line(machine, step, previous))
        previous = machine.stamps[step, -1]["landed"]


def _line(machine: _Machine, step: int, previous: int) -> dict[str, Any]:
    plan, stamps = machine.plan, machine.stamps
    micros = [stamps[step, index] for index in range(plan.microbatches)]
    landed = stamps[step, -1]["landed"]
    idle = machine.made.truth.get(step - 1)
    staged = plan.mode.startswith("staged") and idle is not None
    return {
        "step": step, "attempt": 1, "mode": plan.mode, "policy_version": step,
        "loss": 1 / step, "grad_norm": 0.5, "denominator": 2000.0, "metrics": {},
        "microbatches": plan.microbatches, "tokens": 3000, "loss_tokens": 2000, "segments": 9,
        "row_efficiency": 0.98, "microbatch_efficiency": 0.97, "bytes": plan.microbatches << 20,
        "step_s": (landed - (previous or micros[0]["dispatched"])) / 1e9,
        "boundary_idle_s": None if idle is None else idle / 1e9,
        "pack_s": plan.pack / 1e9, "slot_wait_s": plan.slot_wait / 1e9, "data_wait_s": plan.data_wait / 1e9,
        "upload_s": plan.microbatches * plan.upload / 1e9, "exposed_s": 0.0 if staged else None,
        "snapshot_wait_s": 0.0, "staged": staged,
        "not_staged_because": None if staged else f"mode {plan.mode}" if idle is not None else "first step of the run",
        "latch": {"level": "on", "reason": "staging pays until shown otherwise"}, "eval": None,
        "late_digests": [{} for _ in micros], "digests": ["00"] * len(micros), "payload_digests": ["" for _ in micros],
        "trajectory_ids": [f"g{step}-{n}" for n in range(4)], "trajectory_passes": [1] * 4,
        "instants_ns": {
            **{name: [m.get(name, 0) for m in micros]
               for name in ("packed", "dispatched", "upload_begin", "staged_ready", "patch_ready", "ready")},
            "update_dispatched": stamps[step, -1]["dispatched"], "update_landed": landed,
        },
    }  # fmt: skip


# --- as files -----------------------------------------------------------------------------------------------


def write_run(
    out: Path, *mades: Made, run: str = "made", events: bool = True, finished: bool = True, **facts: Any
) -> Path:
    """An OUT as a run leaves it; several ``mades`` are attempts, later ones in new starts of both processes."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[int, dict[str, Any]] = {}
    for number, one in enumerate(mades, 1):
        lines = {step: line for step, line in lines.items() if step < one.plan.first_step}
        lines |= {line["step"]: {**line, "attempt": number} for line in one.lines}
    ordered = [lines[step] for step in sorted(lines)]
    (out / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ordered))
    restarts = {"trainer": len(mades) - 1, "orchestrator": 0}
    mode = mades[0].plan.mode
    settings = {"run": run, "out": str(out), "boundary": mode, "steps": mades[-1].plan.steps, **facts}
    (out / "run.json").write_text(
        json.dumps({"run": run, "epoch": 1, "pids": {}, "restarts": restarts, "settings": settings})
    )
    if finished:
        summary = {**summarise(ordered), "run": run, "ended_by": None, "wall_s": 12.5, "restarts": restarts}
        (out / "summary.json").write_text(json.dumps(summary))
    if events:
        (out / "events").mkdir(exist_ok=True)
        for role in (ORCHESTRATOR, TRAINER):
            with (out / "events" / f"{role}.jsonl").open("w") as file:
                for number, one in enumerate(mades, 1):
                    process = next(p for p in one.processes(number) if p.process == role)
                    file.write(_head(process, run))
                    file.writelines(_encoded(event) for event in process.events)
    return out


def _head(process: ProcessEvents, run: str) -> str:
    head = {"schema": SCHEMA, "process": process.process, "pid": process.pid, "start": process.start, "run": run}
    return json.dumps({**head, "monotonic_ns": 0, "wall_s": process.wall_offset_ns / 1e9}) + "\n"


def _encoded(event: Event) -> str:
    record: dict[str, Any] = {"t": event.t, "event": event.event, "lane": event.lane}
    if event.end:
        record["end"] = event.end
    if event.step >= 0:
        record["step"] = event.step
    if event.index >= 0:
        record |= {"index": event.index, "id": event.id}
    return json.dumps({**record, **event.figures}) + "\n"

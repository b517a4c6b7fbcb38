"""Events of a run whose truth is known: a schedule of steps, as the orchestrator and the trainer would note it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmstage.events import FOLDER, LANES
from shmstage.timeline.reading import Event, ProcessEvents

MS = 1_000_000
MICROBATCH, UPDATE, UPLOAD, PACK = 10 * MS, 2 * MS, 4 * MS, 3 * MS
SLOTS = 3


@dataclass
class Truth:
    """What the schedule says: the micro-batches' identities, the begin and end of each device work, idle per step."""

    identities: list[str] = field(default_factory=list)
    device: list[tuple[str, int, int]] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    idle: dict[int, int] = field(default_factory=dict)


def event(name: str, t: int, end: int = 0, step: int = -1, index: int = -1, id: str = "", **figures: Any) -> Event:
    return Event(t, end, name, LANES.get(name, "other"), step, index, id, figures)


def schedule(
    steps: int = 3, microbatches: int = 3, *, late_update: int = 0, late_first: int = 1 * MS, begin: int = 50 * MS
) -> tuple[ProcessEvents, ProcessEvents, Truth]:
    """A staged run. `late_update`: how long each update's dispatch comes after the step's last micro-batch;
    `late_first`: how long the upload of each step's first micro-batch outlasts the update before it."""
    orchestrator, trainer, truth = [], [], Truth()
    now = begin  # when the device has nothing more to do
    count = 0
    orchestrator.append(event("group_arrived", begin - 40 * MS, trajectories=8, nbytes=4096))
    orchestrator.append(event("data_wait", begin - 45 * MS, begin - 40 * MS))
    for step in range(steps):
        for index in range(microbatches):
            slot, generation = count % SLOTS, 2 * (count // SLOTS) + 2
            identity = f"{step}.{index}@{slot}:{generation}"
            of = {"step": step, "index": index, "id": identity}
            first_of_later = index == 0 and step > 0
            start = now + late_first if first_of_later else now
            staged = start if index == 0 else start - 2 * MS
            issued = staged - UPLOAD
            published = issued - 2 * MS
            packing = published - PACK
            where = {"slot": slot, "generation": generation}
            orchestrator += [
                event("slot_acquired", packing - 1 * MS, packing, slot=slot),
                event("packed", packing, published - 100, slot=slot, nbytes=1 << 20, tokens=999),  # no identity yet
                event("published", published, **of, **where, digest=f"{count:032x}"),
                event("called", issued - 1 * MS, issued + 1 * MS, **of, command="stage_fwd_bwd", sequence=2 * count),
                event("called", staged - 1000, staged + 1 * MS, **of, command="fwd_bwd_staged", sequence=2 * count + 1),
                event("gauged", published, free_slots=SLOTS - 1 - count % SLOTS, held_nbytes=5 * count, queued=1),
            ]
            trainer += [
                event("received", issued - 500_000, **of, command="stage_fwd_bwd", sequence=2 * count),
                event("executed", issued - 400_000, issued + 500_000, **of, command="stage_fwd_bwd"),
                event("staged", issued, staged, **of, nbytes=1 << 20),
                event("lease_ended", staged + 1000, **of, **where),
                event("dispatched", staged - 500_000, staged - 400_000, **of, kind="fwd_bwd"),
                event("ready", start + MICROBATCH, **of, kind="fwd_bwd"),
                event("settled", start + MICROBATCH + 1000, **of),
                event("retired", start + MICROBATCH + 2000, **of, buffer=count % 2),
                event("memory", start, rss_nbytes=10_000 + count, shared_nbytes=77),
            ]
            truth.identities.append(identity)
            truth.device.append((identity, start, start + MICROBATCH))
            if first_of_later:
                truth.idle[step - 1] = truth.idle.get(step - 1, 0) + late_first
            now = start + MICROBATCH
            count += 1
        dispatch = now + late_update if late_update else now - 1 * MS
        update_begin = max(now, dispatch)
        truth.idle[step] = late_update
        now = update_begin + UPDATE
        truth.updates.append((update_begin, now))
        trainer += [
            event("dispatched", dispatch, dispatch + 50_000, step=step, kind="update"),
            event("landed", now, step=step, kind="update"),
            event("ticketed", dispatch + 60_000, now + 1 * MS, step=step, kind="metrics"),
            event("ticketed", dispatch + 70_000, now + 3 * MS, step=step, kind="checkpoint"),
            event("checkpoint_durable", now + 3 * MS, step=step),
            event("weights_published", now + 2 * MS, step=step, version=step),
        ]
        orchestrator.append(event("bookkept", now, now + 5 * MS, step=step))
    del truth.idle[steps - 1]  # no boundary follows
    return process("orchestrator", orchestrator), process("trainer", trainer), truth


def process(name: str, events: Sequence[Event], *, start: int = 1, wall_offset_ns: int = 10**18) -> ProcessEvents:
    noted = sorted(events, key=lambda e: e.end or e.t)
    return ProcessEvents(name, {"orchestrator": 101}.get(name, 202) + start, start, "r", wall_offset_ns, list(noted))


def kept(out: Path, processes: Sequence[ProcessEvents]) -> None:
    """Writes the files that ``read_events`` reads."""
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    for one in processes:
        head = {"schema": 1, "process": one.process, "pid": one.pid, "start": one.start, "run": one.run}
        lines = [{**head, "monotonic_ns": 0, "wall_s": one.wall_offset_ns / 1e9}]
        for e in one.events:
            times = {"t": e.t, **({"end": e.end} if e.end else {})}
            of = {"step": e.step, "index": e.index, "id": e.id}
            lines.append({**times, "event": e.event, "lane": e.lane, **of, **e.figures})
        with (out / FOLDER / f"{one.process}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

"""What events cost: those that a real step notes, noted again, encoded and written; and steps with and without them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import spread

from shmstage.events import WRITE_EVERY_S, EventWriter
from shmstage.memory.usage import own_use
from shmstage.timeline.reading import Event, ProcessEvents

#: of which events may take one hundredth
STEP_S = 0.010
#: a device that needs so long, and micro-batches of which a step of ``STEP_S`` consists
MICROBATCHES = 3
ENGINE = {"microbatch_s": 0.003, "update_s": 0.001}
#: steps noted between two looks of the writer, as at the full rate, and how often
STEPS_AT_ONCE = round(WRITE_EVERY_S / STEP_S)
BURSTS, REPEATS = 4, 5


def events_of_a_step(process: ProcessEvents, skipped: int) -> list[Event]:
    """Of the step that notes as many as most do, without the first ``skipped``."""
    by_step: dict[int, list[Event]] = {}
    ends = sorted(e.t for e in process.events if e.event in ("landed", "bookkept"))
    for event in process.events:
        by_step.setdefault(sum(end < event.t for end in ends), []).append(event)
    whole = [events for step, events in sorted(by_step.items()) if skipped < step < len(ends)]
    return sorted(whole, key=len)[len(whole) // 2]


def calls_of(events: Sequence[Event]) -> Callable[[Callable[..., None]], None]:
    """A function that notes them as the code does, with the figures as keywords."""
    calls = [
        f"note({e.event!r}, {e.t}, {e.end}, step={e.step}, index={e.index}, request_id={e.id!r}, "
        f"{', '.join(f'{name}={value!r}' for name, value in e.figures.items())})"
        for e in events
    ]
    names: dict[str, Any] = {}
    exec("\n    ".join(["def note_a_step(note):", *calls]), names)
    made: Callable[[Callable[..., None]], None] = names["note_a_step"]
    return made


def cost_of(events: Sequence[Event], path: Path) -> dict[str, float]:
    """Seconds per event: of noting it, on the thread that does; of processor time, the writer's thread included."""
    note_a_step = calls_of(events)
    writer = EventWriter(path, process="bench", run="bench", start=1, limit_nbytes=1 << 30, sample=own_use)
    noted = 0.0
    began = time.process_time()
    for _ in range(BURSTS):
        began_thread = time.thread_time()
        for _ in range(STEPS_AT_ONCE):
            note_a_step(writer.note)
        noted += time.thread_time() - began_thread
        time.sleep(WRITE_EVERY_S)
    writer.close()
    took = time.process_time() - began
    path.unlink()
    count = BURSTS * STEPS_AT_ONCE * len(events)
    return {"note_s": noted / count, "all_s": took / count}


def costs(processes: Sequence[ProcessEvents], skipped: int, work: Path) -> dict[str, Any]:
    """Per process: how many events a step notes, what one costs, and the share of a step of ``STEP_S``."""
    found: dict[str, Any] = {}
    for process in processes:
        events = events_of_a_step(process, skipped)
        samples = [cost_of(events, work / f"{process.process}.jsonl") for _ in range(REPEATS)]
        each = {name: median(sample[name] for sample in samples) for name in samples[0]}
        found[process.process] = {
            "events_per_step": len(events),
            "by_name": dict(Counter(event.event for event in events)),
            **{name: spread([sample[name] for sample in samples]) for name in each},
            "note_share": each["note_s"] * len(events) / STEP_S,
            "share": each["all_s"] * len(events) / STEP_S,
        }
    return found


def alternating(step_seconds: Callable[[str, int], Sequence[float]], rounds: int) -> Mapping[str, Any]:
    """``step_seconds(on or off, round)``, in turn; medians of both and what they differ by."""
    samples: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds):
        for events in ("on", "off") if number % 2 == 0 else ("off", "on"):
            samples[events] += step_seconds(events, number)
    on, off = spread(samples["on"]), spread(samples["off"])
    return {"on": on, "off": off, "of_off": on["median"] / off["median"] - 1}

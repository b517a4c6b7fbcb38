"""The events of a run as Chrome trace JSON, which Perfetto opens.

Every start of a process is a process of the trace, every lane of its tracks a thread; arrows follow a micro-batch.
Times are microseconds from a little before the first event, exact to the nanosecond. Source of the format: "Trace Event
Format" of the Chromium project.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shmstage.errors import SettingsError
from shmstage.events import FOLDER
from shmstage.timeline.clocks import on_one_axis
from shmstage.timeline.reading import ProcessEvents, read_events
from shmstage.timeline.trace_drawing import Drawing, drawn
from shmstage.timeline.trace_flows import Stop, flows
from shmstage.timeline.trace_tracks import Mark, assign_lanes, lane_name, plain_text, track_position

Json = dict[str, Any]
_CATEGORY: Final = "shmstage"


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What was written. `slices` have a length in time, also of 0; `arrows` are the pieces of which `flows` are made.

    `left_out`: events of a damaged clock.
    """

    slices: int
    instants: int
    flows: int
    arrows: int
    counters: int
    tracks: int
    left_out: int


def write_trace(out: Path, path: Path) -> TraceFigures:
    """Writes the trace of the run in `out` to `path`, in one piece.

    Raises ``SettingsError`` if the run has no events, if they cannot be read, or if `path` cannot be written.
    """
    read = read_events(out)
    processes = on_one_axis(read)
    left_out = sum(len(process.events) for process in read) - sum(len(process.events) for process in processes)
    if not any(process.events for process in processes):
        raise SettingsError(f"no events in {out / FOLDER}; a trace needs a run that wrote them")
    events = list(trace_events(processes))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ns","traceEvents":[')
            for position, event in enumerate(events):
                file.write(",\n" if position else "\n")
                file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
            file.write("\n]}\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise SettingsError(f"{path} cannot be written: {error.strerror}; choose another --trace") from None
    return _figures(events, left_out)


def trace_events(processes: Sequence[ProcessEvents]) -> Iterator[Json]:
    """Chrome trace events of `processes` on one axis: the names first, then everything in order of time."""
    drawing = drawn(processes)
    lanes = assign_lanes(drawing.marks)
    threads: dict[tuple[int, str, int], int] = {}
    for process, track in sorted(lanes, key=lambda key: (key[0], track_position(key[1]))):
        for lane in lanes[process, track]:
            # after the processes, which count from 1: a thread with its process's number would be its main thread
            threads[process, track, lane] = len(processes) + 1 + len(threads)
    shown = sorted({process for process, _, _ in threads} | {counter[0] for counter in drawing.counters})
    for process in shown:
        yield from _process_names(process, processes[process])
    for (process, track, lane), thread in threads.items():
        yield _metadata("thread_name", process, {"name": lane_name(track, lane)}, thread)
        yield _metadata("thread_sort_index", process, {"sort_index": thread}, thread)
    for _, _, event in sorted(_timed(drawing, threads), key=lambda one: one[:2]):
        yield event


def _timed(drawing: Drawing, threads: dict[tuple[int, str, int], int]) -> Iterator[tuple[int, tuple[int, int], Json]]:
    """(time, order at one time, event): an arrow comes after the slice it is tied to, and stops in their order."""
    for mark in drawing.marks:
        end = mark.begin if mark.end is None else mark.end
        yield mark.begin, (0, end), _mark_event(mark, threads)
    for process, at, name, value in drawing.counters:
        group, _, series = name.partition(" ")  # Perfetto shows both
        event = {"ph": "C", "pid": process + 1, "ts": at / 1000, "name": group, "args": {series or "value": value}}
        yield at, (1, 0), event
    for number, chain in enumerate(flows(drawing.produced, drawing.consumed), 1):
        for position, one in enumerate(chain):
            phase = "s" if position == 0 else "f" if position == len(chain) - 1 else "t"
            yield one.at, (2, position), _flow_event(number, phase, one, threads)


def _mark_event(mark: Mark, threads: dict[tuple[int, str, int], int]) -> Json:
    thread = threads[mark.process, mark.track, mark.lane]
    event = {"pid": mark.process + 1, "tid": thread, "ts": mark.begin / 1000, "name": mark.name, "cat": _CATEGORY}
    if mark.end is None:
        return {"ph": "i", "s": "t", **event, "args": mark.args}
    return {"ph": "X", **event, "dur": (mark.end - mark.begin) / 1000, "args": mark.args}


def _flow_event(number: int, phase: str, one: Stop, threads: dict[tuple[int, str, int], int]) -> Json:
    mark = one.mark
    thread = threads[mark.process, mark.track, mark.lane]
    event = {"ph": phase, "pid": mark.process + 1, "tid": thread, "ts": one.at / 1000, "id": number}
    event |= {"name": "micro-batch", "cat": _CATEGORY}
    return {**event, "bp": "e"} if phase == "f" else event  # "e": tied to the slice around it, not to the next


def _process_names(number: int, process: ProcessEvents) -> Iterator[Json]:
    name = f"{plain_text(process.process)} start {process.start} (pid {process.pid})"
    yield _metadata("process_name", number, {"name": name})
    yield _metadata("process_sort_index", number, {"sort_index": number})
    lost = [
        text
        for text, amount in (
            ("the beginning made room for newer events", process.beginning_lost),
            (f"{process.dropped} events dropped", process.dropped),
            (f"{process.unread} lines unread", process.unread),
        )
        if amount
    ]
    if lost:
        yield _metadata("process_labels", number, {"labels": ", ".join(lost)})


def _metadata(name: str, process: int, args: Json, thread: int | None = None) -> Json:
    event = {"ph": "M", "pid": process + 1, "name": name, "args": args}
    return event if thread is None else {**event, "tid": thread}


def _figures(events: Sequence[Json], left_out: int) -> TraceFigures:
    phases = {phase: sum(event["ph"] == phase for event in events) for phase in "XiCstf"}
    return TraceFigures(
        slices=phases["X"],
        instants=phases["i"],
        flows=phases["s"],
        arrows=phases["t"] + phases["f"],
        counters=phases["C"],
        tracks=sum(event["name"] == "thread_name" for event in events),
        left_out=left_out,
    )

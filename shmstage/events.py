"""What happened in one process, as raw instants: a bounded append-only file of JSON lines, written off the hot path.

Every line after the head is one event, on the process's monotonic clock in nanoseconds:

    {"t": …, "end": …, "event": "staged", "lane": "uploads", "step": 3, "index": 0, "id": "…", …figures}

`t` is the instant, or the beginning of a span that `end` closes. `step`, `index` and `id` come from the handle and are
left out where an event is of no micro-batch. The head says whose clock it is and what the wall clock showed:
`{"schema": 1, "process": "trainer", "pid": …, "start": 2, "run": "…", "monotonic_ns": …, "wall_s": …}`; a process that
is started again begins with a head of its own in the same file.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, final

from shmstage import _native
from shmstage.errors import shown
from shmstage.records import JsonLines
from shmstage.settings import Settings

log = logging.getLogger(__name__)

SCHEMA: Final = 1
#: of OUT
FOLDER: Final = "events"

#: event → its lane. A span's name says what was over at its end.
LANES: Final[dict[str, str]] = {
    # the orchestrator's
    "group_arrived": "source",  # before it waits for room; trajectories, nbytes
    "data_wait": "source",  # span: the feeder had nothing to pack
    "slot_acquired": "packer",  # span: asked for → got; slot
    "packed": "packer",  # span: fill began → filled; slot, nbytes, tokens
    "published": "packer",  # slot, generation, digest
    "called": "control",  # span: sent → answered; command, sequence
    "bookkept": "bookkeeping",  # span: step metrics, step line, hooks
    "gauged": "counters",  # free_slots, held_nbytes, queued
    # the trainer's
    "received": "trainer",  # the executing thread took the request; command, sequence
    "executed": "trainer",  # span: begun → answered; command, sequence
    "staged": "uploads",  # span: upload issued → on the device; nbytes
    "patched": "uploads",  # span: late fields issued → on the device
    "lease_ended": "slots",  # slot, generation; of evaluated micro-batches nothing else
    "dispatched": "dispatch",  # span: dispatch began → call returned; kind = fwd_bwd, replay or update
    "ready": "device",  # kind = fwd_bwd or replay; error, if it failed
    "settled": "device",
    "scored": "device",  # span: asked for → in host memory; kind = actor, reference or eval
    "retired": "device",  # buffer
    "landed": "update",  # error, if it failed
    "ticketed": "snapshots",  # span: asked for → resolved; kind = metrics, checkpoint or weights; error, if it failed
    "checkpoint_durable": "snapshots",
    "weights_published": "snapshots",  # version
    # both
    "memory": "counters",  # rss_nbytes, shared_nbytes
}

_NAMED: Final = {event: f'"event":"{event}","lane":"{lane}"' for event, lane in LANES.items()}

#: lines that wait to be written; more events are dropped and counted
CAPACITY_NBYTES: Final = 16 << 20
WRITE_EVERY_S: Final = 0.25
SAMPLE_EVERY_S: Final = 1.0

Figure = int | float | str


class Note(Protocol):
    """Notes an event. ``t`` 0 is now; ``end`` 0: an instant."""

    def __call__(
        self,
        event: str,
        t: int = 0,
        end: int = 0,
        *,
        step: int = -1,
        index: int = -1,
        request_id: str = "",
        **figures: Figure,
    ) -> None: ...


class Events(Protocol):
    """Where events are noted: from any thread, at the cost of an append."""

    @property
    def note(self) -> Note: ...
    def close(self) -> None: ...


@final
class EventWriter:
    """Notes events from any thread and writes them from one of its own, four times a second.

    An event becomes its line at once, in native code: to keep it as objects and encode it later costs more than that.
    Nothing here raises into the caller or waits for a disk. A killed process loses what it noted in the last quarter
    of a second; a torn last line is cut off by the next start and left out by readers. At half of `limit_nbytes` the
    file is renamed to `NAME.old.jsonl`, over the one before it: the newest events are kept, at least half of the
    limit's worth.
    """

    def __init__(
        self,
        path: Path,
        *,
        process: str,
        run: str,
        start: int,
        limit_nbytes: int,
        sample: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`start`: the epoch or incarnation. `sample`: figures of a `memory` event, read by the writing thread."""
        self._path = path
        self._head = {"schema": SCHEMA, "process": process, "pid": os.getpid(), "start": start, "run": run}
        self._limit_nbytes = limit_nbytes
        self._sample = sample
        self._log = _native.EventLog(_NAMED, json.dumps, CAPACITY_NBYTES)
        self.note: Note = self._log.note
        self._dropped = 0
        self._said = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shmstage-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what is noted and ends the thread, within seconds."""
        self._over.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._write()
        except Exception:
            log.exception("%s: no more events are written; the run goes on", self._path)
            self._log.close()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file, written = self._begun()
        next_sample = 0.0
        over = False
        while not over:
            over = self._over.wait(WRITE_EVERY_S)
            now = time.monotonic()
            if self._sample is not None and (over or now >= next_sample):
                next_sample = now + SAMPLE_EVERY_S
                self.note("memory", **self._sample())
            text = self._taken(over)
            if not text:
                continue
            if written > self._limit_nbytes // 2:
                file.close()
                self._path.replace(self._path.with_suffix(".old.jsonl"))
                file, written = self._begun()
            if not file.write_lines(text):
                self._log.close()  # a full disk; said by the file, and not to be waited for
                break
            written += len(text)
        file.close()

    def _begun(self) -> tuple[JsonLines, int]:
        file = JsonLines(self._path)
        file.write({**self._head, "monotonic_ns": time.monotonic_ns(), "wall_s": time.time()})
        return file, self._path.stat().st_size

    def _taken(self, over: bool) -> str:
        lines, dropped, fault = self._log.take()
        self._dropped += dropped
        if fault and not self._said:
            self._said = True
            log.error("%s: an event is left out, and others like it: %s", self._path, shown(fault, 200))
        if self._dropped and (over or lines):
            lines += f'{{"t":{time.monotonic_ns()},"event":"dropped","lane":"counters","events":{self._dropped}}}\n'
            self._dropped = 0
        return lines


@final
class NoEvents:
    """Stands where events are switched off."""

    def note(self, event: str, t: int = 0, end: int = 0, **identity_and_figures: Figure) -> None:
        return

    def close(self) -> None:
        return


NO_EVENTS: Final = NoEvents()


def open_events(
    settings: Settings,
    process: str,
    start: int,
    sample: Callable[[], Mapping[str, Any]],
    directory: Path | None = None,
) -> Events:
    """The writer of ``events/PROCESS.jsonl`` in OUT or ``directory``, or nothing where events are off."""
    if settings.events == "off":
        return NO_EVENTS
    return EventWriter(
        (directory or settings.out_dir) / FOLDER / f"{process}.jsonl", process=process, run=settings.run, start=start,
        limit_nbytes=settings.events_limit, sample=sample,
    )  # fmt: skip

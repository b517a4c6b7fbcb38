"""Events → instants: what happened to each micro-batch and update, and the spans around them, per attempt.

Pure, and made for runs that were killed: an instant that nobody wrote is 0, and a boundary that lacks one it needs is
left out. Instants are in ns on the trainer's monotonic clock (``clocks``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, final

from shmstage.timeline.clocks import shifts_ns
from shmstage.timeline.reading import Event, ProcessEvents

#: (event, its kind) → the fields of a micro-batch that its beginning and its end are; "" for none
_FIELDS: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("slot_acquired", ""): ("slot_asked", "slot_acquired"),
    ("packed", ""): ("pack_begun", "packed"),
    ("published", ""): ("published", ""),
    ("staged", ""): ("upload_begun", "staged_ready"),
    ("patched", ""): ("patch_begun", "patch_ready"),
    ("lease_ended", ""): ("lease_ended", ""),
    ("dispatched", "fwd_bwd"): ("dispatch_begun", "dispatch_returned"),
    ("dispatched", "replay"): ("replay_dispatched", ""),
    ("ready", "fwd_bwd"): ("ready", ""),
    ("ready", "replay"): ("replay_ready", ""),
    ("settled", ""): ("settled", ""),
    ("retired", ""): ("retired", ""),
}
#: spans that are looked up by time: what threads and devices did besides
SPANS: Final = ("data_wait", "called", "executed", "bookkept", "ticketed", "scored", "dispatched")
#: commands that carry a micro-batch to the trainer
CARRIERS: Final = frozenset({"fwd_bwd", "stage_fwd_bwd"})


@dataclass(slots=True)
class MicrobatchInstants:
    """One micro-batch in one attempt; 0: not known. ``sent`` and ``received``: the first call that carries it."""

    step: int
    index: int
    id: str = ""
    slot: int = -1
    nbytes: int = 0
    tokens: int = 0
    slot_asked: int = 0
    slot_acquired: int = 0
    pack_begun: int = 0
    packed: int = 0
    published: int = 0
    sent: int = 0
    received: int = 0
    upload_begun: int = 0
    staged_ready: int = 0
    patch_begun: int = 0
    patch_ready: int = 0
    lease_ended: int = 0
    dispatch_begun: int = 0
    dispatch_returned: int = 0
    ready: int = 0
    replay_dispatched: int = 0
    replay_ready: int = 0
    settled: int = 0
    retired: int = 0

    @property
    def finished(self) -> int:
        return max(self.ready, self.replay_ready)


@dataclass(slots=True)
class StepInstants:
    """One step in one attempt. ``microbatches`` by index."""

    step: int
    microbatches: dict[int, MicrobatchInstants] = field(default_factory=dict)
    update_dispatched: int = 0
    update_returned: int = 0
    update_landed: int = 0
    checkpoint_durable: int = 0
    weights_published: int = 0

    @property
    def first(self) -> MicrobatchInstants | None:
        return self.microbatches.get(0)

    @property
    def last(self) -> MicrobatchInstants | None:
        """``None`` too if one before it is missing: then nobody knows whether it was the last."""
        return self.microbatches.get(len(self.microbatches) - 1)


@final
class Spans:
    """Spans of one name, found by time; they may overlap. Sorted once, a look costs O(log n + found)."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = sorted(events, key=attrgetter("t"))
        self._begins = [event.t for event in self._events]
        self._latest_end: list[int] = []  # of all up to this one: where a look back can stop
        for event in self._events:
            self._latest_end.append(max(event.end, self._latest_end[-1] if self._latest_end else 0))

    def __len__(self) -> int:
        return len(self._events)

    def between(self, begin: int, end: int) -> list[Event]:
        """Those that share time with [begin, end), in order of their beginning."""
        found = []
        position = bisect_right(self._begins, end - 1)
        while position and self._latest_end[position - 1] > begin:
            position -= 1
            if self._events[position].end > begin:
                found.append(self._events[position])
        return found[::-1]


@dataclass(slots=True)
class Attempt:
    """From one restore to the next. ``spans`` by event name, all of ``SPANS``."""

    number: int
    steps: dict[int, StepInstants] = field(default_factory=dict)
    spans: dict[str, Spans] = field(default_factory=dict)


def attempts_of(processes: Sequence[ProcessEvents]) -> list[Attempt]:
    """All attempts of a run in order, those left out in which no micro-batch was seen."""
    events = aligned(processes)
    cuts = sorted(e.t for e in events if e.event == "executed" and e.figures.get("command") == "restore_checkpoint")
    parts: list[list[Event]] = [[] for _ in range(len(cuts) + 1)]
    for event in events:
        parts[bisect_right(cuts, event.t)].append(event)
    found: list[Attempt] = []
    for part in parts:
        attempt = _attempt(len(found) + 1, part)
        if any(step.microbatches for step in attempt.steps.values()):
            found.append(attempt)
    return found


def aligned(processes: Sequence[ProcessEvents]) -> list[Event]:
    """Events of all processes on the clock of the first trainer, in order of time."""
    ordered = sorted(processes, key=lambda process: process.process != "trainer")
    shifts = shifts_ns([process.wall_offset_ns for process in ordered])
    events = [
        event if not shift else _shifted(event, shift)
        for process, shift in zip(ordered, shifts, strict=True)
        for event in process.events
    ]
    return sorted(events, key=attrgetter("t"))


def _shifted(event: Event, shift: int) -> Event:
    end = event.end + shift if event.end else 0
    return Event(event.t + shift, end, event.event, event.lane, event.step, event.index, event.id, event.figures)


def _attempt(number: int, events: Iterable[Event]) -> Attempt:
    attempt = Attempt(number)
    spans: dict[str, list[Event]] = {name: [] for name in SPANS}
    slots: dict[int, Event] = {}
    for event in events:
        if event.event in spans and event.end:
            spans[event.event].append(event)
        if event.event == "slot_acquired" and event.step < 0:  # asked for before it was known for what
            slots[_whole(event, "slot")] = event
        elif event.step >= 0 and event.index >= 0:
            _of_microbatch(attempt, event, slots)
        elif event.step >= 0:
            _of_step(attempt, event)
    attempt.spans = {name: Spans(found) for name, found in spans.items()}
    return attempt


def _of_microbatch(attempt: Attempt, event: Event, slots: dict[int, Event]) -> None:
    kind = str(event.figures.get("kind", "")) if event.event in ("dispatched", "ready") else ""
    begin, end = _FIELDS.get((event.event, kind), ("", ""))
    if event.event in ("called", "received") and str(event.figures.get("command")) in CARRIERS:
        begin = "sent" if event.event == "called" else "received"
    elif not begin:
        return
    step = attempt.steps.setdefault(event.step, StepInstants(event.step))
    micro = step.microbatches.setdefault(event.index, MicrobatchInstants(event.step, event.index))
    if begin in ("sent", "received"):
        setattr(micro, begin, getattr(micro, begin) or event.t)
        return
    setattr(micro, begin, event.t)
    if end and event.end:
        setattr(micro, end, event.end)
    micro.id = event.id or micro.id
    for name in ("slot", "nbytes", "tokens"):
        if name in event.figures:
            setattr(micro, name, _whole(event, name))
    asked = slots.pop(micro.slot, None) if event.event == "packed" else None
    if asked is not None:
        micro.slot_asked, micro.slot_acquired = asked.t, asked.end


def _of_step(attempt: Attempt, event: Event) -> None:
    is_update = event.event == "dispatched" and event.figures.get("kind") == "update"
    if not is_update and event.event not in ("landed", "checkpoint_durable", "weights_published"):
        return
    step = attempt.steps.setdefault(event.step, StepInstants(event.step))
    if is_update:
        step.update_dispatched, step.update_returned = event.t, event.end
    elif event.event == "landed":
        step.update_landed = event.t
    else:
        setattr(step, event.event, event.t)


def _whole(event: Event, name: str) -> int:
    """A damaged file may hold anything."""
    value = event.figures.get(name)
    return value if type(value) is int else -1

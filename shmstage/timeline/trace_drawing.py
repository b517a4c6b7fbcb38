"""Which mark an event becomes on which track, what counts, and where arrows may stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shmstage.timeline.boundaries import boundaries_of
from shmstage.timeline.microbatches import attempts_of
from shmstage.timeline.reading import Event, ProcessEvents
from shmstage.timeline.trace_device import UPDATE, device_works
from shmstage.timeline.trace_flows import DISPATCHED, PACKED, PUBLISHED, READY, STAGED, Stop, stop
from shmstage.timeline.trace_slots import Occupation, close_open, occupations
from shmstage.timeline.trace_tracks import Mark, arguments, is_number, plain_text, slot_track

_TRACK_OF_LANE: Final = {"control": "control calls", "trainer": "trainer host"}
#: these are drawn together with others: as ends of what was on the device, of what was in a slot
_DRAWN_TOGETHER: Final = frozenset({"ready", "landed", "lease_ended"})
_COUNTERS: Final = {
    "free_slots": "free slots", "held_nbytes": "bytes held", "queued": "queue depth",
    "rss_nbytes": "memory resident", "shared_nbytes": "memory shared",
}  # fmt: skip
_VERBS: Final = {
    "group_arrived": "group", "data_wait": "wait for data", "slot_acquired": "wait for slot", "packed": "pack",
    "published": "publish", "bookkept": "bookkeeping", "staged": "stage", "patched": "patch",
    "scored": "score",
}  # fmt: skip
#: the figure that says what a span was about
_NAMED_BY: Final = {
    "called": "command", "received": "command", "executed": "command", "dispatched": "kind", "ticketed": "kind",
}  # fmt: skip


@dataclass(slots=True)
class Drawing:
    """`counters`: (process, time in ns, name, value). `produced`, `consumed`: stops of orchestrators, of trainers."""

    marks: list[Mark] = field(default_factory=list)
    counters: list[tuple[int, int, str, int | float]] = field(default_factory=list)
    produced: list[Stop] = field(default_factory=list)
    consumed: list[Stop] = field(default_factory=list)


def drawn(processes: Sequence[ProcessEvents]) -> Drawing:
    """`processes` on one axis (``clocks.on_one_axis``)."""
    return _Hand(processes).draw()


class _Hand:
    def __init__(self, processes: Sequence[ProcessEvents]) -> None:
        self._processes = processes
        self._drawing = Drawing()
        self._digests = _digests(processes)
        #: what was packed has its identity from the publication that followed
        self._owners: dict[int, Event] = {}

    def draw(self) -> Drawing:
        self._slots()
        for number, process in enumerate(self._processes):
            self._device(number, process)
            for event in process.events:
                if event.lane == "counters":
                    self._count(number, event)
                elif event.event not in _DRAWN_TOGETHER:
                    self._event(number, event)
        return self._drawing

    def _event(self, number: int, event: Event) -> None:
        owner = self._owners.get(id(event), event)
        about = event.figures.get(_NAMED_BY.get(event.event, ""), None)
        verb = about if type(about) is str else _VERBS.get(event.event, event.event)
        track = _TRACK_OF_LANE.get(event.lane, event.lane)
        mark = self._mark(number, track, event.t, event.end or None, verb, owner, event.figures)
        if event.event == "packed":
            self._drawing.produced += stop(owner.id, PACKED, event.end, mark)
        elif event.event == "staged":
            self._drawing.consumed += stop(owner.id, STAGED, event.t, mark)
        elif event.event == "dispatched" and about != UPDATE:
            self._drawing.consumed += stop(owner.id, DISPATCHED, event.t, mark)

    def _slots(self) -> None:
        taken = occupations((number, event) for number, p in enumerate(self._processes) for event in p.events)
        close_open(taken, [max((e.end or e.t for e in p.events), default=0) for p in self._processes])
        for one in taken:
            self._slot(one)

    def _slot(self, one: Occupation) -> None:
        named = next((event for event in one.events if event.id), one.events[0])
        self._owners.update((id(event), named) for event in one.events if not event.id)
        figures: dict[str, Any] = {}
        for event in one.events:
            figures = {**event.figures, **figures}
        seen = {"leases_ended": len(one.lease_ends)}
        mark = self._mark(one.process, slot_track(one.slot), one.begin, one.end, "", named, {**figures, **seen})
        if one.published >= 0:
            self._drawing.produced += stop(named.id, PUBLISHED, one.published, mark)

    def _device(self, number: int, process: ProcessEvents) -> None:
        for work in device_works(process.events):
            track = "update" if work.kind == UPDATE else "device"
            # without its dispatch only the end is known
            begin, end = (work.end, None) if work.begin is None else (work.begin, work.end)
            mark = self._mark(number, track, begin, end, work.kind, work.event, work.event.figures)
            if work.kind != UPDATE:
                self._drawing.consumed += stop(work.event.id, READY, work.end, mark)
        # of this trainer alone: every one waits for itself
        for boundary in (found for attempt in attempts_of([process]) for found in boundaries_of(attempt)):
            step, idle = boundary.before.step, boundary.idle
            for begin, end in (*idle.before_update, *idle.after_update):
                args = {"step": step, "boundary_idle_s": idle.idle_ns / 1e9}
                self._drawing.marks.append(Mark(number, "idle", begin, end, f"idle after step {step}", args))

    def _mark(self, number: int, track: str, begin: int, end: int | None, verb: str, of: Event, figures: Any) -> Mark:
        digest = self._digests.get(of.id, "")
        more = {"digest": digest} if digest else {}
        args = arguments(of.step, of.index, of.id, {**more, **figures})
        name = plain_text(f"{verb} {microbatch_name(of)}".strip() or "taken")
        mark = Mark(number, plain_text(track), begin, end, name, args)
        self._drawing.marks.append(mark)
        return mark

    def _count(self, number: int, event: Event) -> None:
        for key, value in event.figures.items():
            if is_number(value):
                self._drawing.counters.append((number, event.t, _COUNTERS.get(key, plain_text(key)), value))


def microbatch_name(event: Event) -> str:
    """Of a micro-batch "3.0", of a step "3", else nothing."""
    if event.step < 0:
        return ""
    return f"{event.step}.{event.index}" if event.index >= 0 else str(event.step)


def _digests(processes: Sequence[ProcessEvents]) -> dict[str, str]:
    """The digest of each identity; an identity that a later epoch used for something else has none."""
    found: dict[str, set[str]] = {}
    for process in processes:
        for event in process.events:
            digest = event.figures.get("digest")
            if event.id and type(digest) is str:
                found.setdefault(event.id, set()).add(digest)
    return {identity: digests.pop() for identity, digests in found.items() if len(digests) == 1}

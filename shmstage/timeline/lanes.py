"""The lanes of one boundary, to be drawn to scale: spans relative to the end of step k's last micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from shmstage.timeline.boundaries import Boundary
from shmstage.timeline.legs import LEGS, legs_of
from shmstage.timeline.microbatches import MicrobatchInstants, StepInstants

#: lane → what it is called on the page, in the order they are drawn
LANE_NAMES: Final = {
    "source": "input",
    "packer": "packer",
    "control": "calls",
    "bookkeeping": "bookkeeping",
    "trainer": "trainer",
    "uploads": "uploads",
    "device": "device",
    "idle": "idle, by cause",
    "snapshots": "snapshots",
}
#: the boundary view goes back so many times the boundary's own length, to where F's upload began
BEFORE: Final = 6
#: a lane with more spans than this in one boundary is cut; no step of a real run has so many
SPANS_PER_LANE: Final = 500


@dataclass(frozen=True, slots=True)
class Drawn:
    """A span in ns; ``kind`` chooses the colour, ``label`` is what it is."""

    begin: int
    end: int
    kind: str
    label: str


@dataclass(slots=True)
class _Lanes:
    zero: int
    begin: int
    end: int
    spans: dict[str, list[Drawn]] = field(default_factory=dict)

    def add(self, lane: str, begin: int, end: int, kind: str, label: str) -> None:
        begin, end = max(begin, self.begin), min(end, self.end)
        if begin < end:
            self.spans.setdefault(lane, []).append(Drawn(begin - self.zero, end - self.zero, kind, label))


def lanes_of(boundary: Boundary) -> dict[str, Any]:
    """As plain values: ``window`` (the boundary), ``range`` (both steps), lanes, idle segments, legs; all in ns."""
    at, idle = boundary.at, boundary.idle
    device = list(_device(boundary))
    begin = min([at.last_finished, *(span.begin for span in device)])
    end = max([idle.first_started, at.first_ready, *(span.end for span in device)])
    lanes = _Lanes(at.last_finished, begin, end)
    for span in device:
        lanes.add("device", span.begin, span.end, span.kind, span.label)
    for step in (boundary.before, boundary.after):
        for micro in _in_order(step):
            _of_microbatch(lanes, micro, _kind(step, boundary))
    _of_threads(lanes, boundary)
    legs = legs_of(boundary)
    for segment in legs.segments:
        lanes.add("idle", segment.begin, segment.end, f"leg-{segment.leg}", segment.leg)
    idle_ns = legs.idle_ns
    return {
        "step": boundary.after.step,
        "idle": idle.idle_ns,
        "estimates": [idle.by_stamps_ns, idle.by_calibration_ns],
        "window": [t - at.last_finished for t in _window(boundary, device)],
        "range": [begin - at.last_finished, end - at.last_finished],
        "legs": [idle_ns[leg] for leg in LEGS],
        "whole": [legs.whole_ns[leg] for leg in LEGS],
        "lanes": {lane: _rows(spans) for lane in LANE_NAMES if (spans := lanes.spans.get(lane))},
        "marks": [[at.update_landed - at.last_finished, "update landed"]],
    }


def _window(boundary: Boundary, device: Iterable[Drawn]) -> tuple[int, int]:
    """What the boundary view shows: what was done for F, the end of L, the idle, and the beginning of F."""
    at, first = boundary.at, boundary.first
    last_begin = max((s.begin for s in device if s.end == at.last_finished), default=at.last_finished)
    known = [t for t in (first.upload_begun, first.pack_begun, at.update_dispatched, at.last_finished) if t]
    end = max(boundary.idle.first_started, at.update_landed)
    # a long last micro-batch must not shrink the boundary to a line
    begin = max(last_begin, min(known), at.last_finished - BEFORE * (end - at.last_finished))
    margin = max((end - begin) // 12, (at.update_landed - at.last_finished) // 4, 1000)
    return max(begin - margin, min(last_begin, begin)), min(end + margin, max(at.first_ready, end))


def _kind(step: StepInstants, boundary: Boundary) -> str:
    return "before" if step is boundary.before else "after"


def _in_order(step: StepInstants) -> list[MicrobatchInstants]:
    return [step.microbatches[index] for index in sorted(step.microbatches)]


def _device(boundary: Boundary) -> Iterator[Drawn]:
    """What the device did: it begins with one thing when the one before is over and all that it needs is there."""
    work: list[tuple[int, int, str, str]] = []  # (end, earliest beginning, kind, label)
    for step in (boundary.before, boundary.after):
        for micro in _in_order(step):
            kind, label = _kind(step, boundary), f"{micro.step}.{micro.index}"
            needed = max(micro.dispatch_begun, micro.staged_ready, micro.patch_ready)
            if micro is boundary.first:
                needed = max(needed, boundary.idle.first_started)
            # a step line has one readiness for both runs of a replayed micro-batch
            work.append((micro.ready, needed, kind, label))
            work.append((micro.replay_ready, micro.replay_dispatched, kind, f"{label} again"))
        work.append((step.update_landed, step.update_dispatched, "update", f"update {step.step}"))
    known = [w for w in work if w[0] and w[1]]
    if known:
        begin, end = min(w[1] for w in known), max(w[0] for w in known)
        for event in boundary.attempt.spans["scored"].between(begin, end):
            name = "evaluation" if event.figures.get("kind") == "eval" else "log-probs"
            known.append((event.end, event.t, "scored", name))
    reached = 0
    for end, needed, kind, label in sorted(known)[:SPANS_PER_LANE]:
        begin = min(max(reached, needed), end)
        yield Drawn(begin, end, kind, label)
        reached = end


def _of_microbatch(lanes: _Lanes, micro: MicrobatchInstants, kind: str) -> None:
    name = f"{micro.step}.{micro.index}"
    if micro.slot_acquired:
        lanes.add("packer", micro.slot_asked, micro.slot_acquired, "wait", f"{name} waits for a slot")
    if micro.pack_begun:
        lanes.add("packer", micro.pack_begun, micro.packed, kind, f"{name} packed")
    if micro.upload_begun and micro.staged_ready:
        lanes.add("uploads", micro.upload_begun, micro.staged_ready, kind, f"{name} uploaded")
    if micro.patch_begun and micro.patch_ready:
        lanes.add("uploads", micro.patch_begun, micro.patch_ready, "patch", f"{name} late fields")


#: event → (lane, figure that names it, kind)
_THREADS: Final = {
    "data_wait": ("source", "", "wait"),
    "called": ("control", "command", "call"),
    "bookkept": ("bookkeeping", "", "bookkeeping"),
    "executed": ("trainer", "command", "call"),
    "ticketed": ("snapshots", "kind", "snapshot"),
}


def _of_threads(lanes: _Lanes, boundary: Boundary) -> None:
    for event_name, (lane, figure, kind) in _THREADS.items():
        for event in boundary.attempt.spans[event_name].between(lanes.begin, lanes.end)[:SPANS_PER_LANE]:
            text = str(event.figures.get(figure, event_name))[:80] if figure else _WORDS[event_name]
            where = f"{event.step}.{event.index}" if event.index >= 0 else str(event.step) if event.step >= 0 else ""
            lanes.add(lane, event.t, event.end, kind, f"{text} {where}".strip())


_WORDS: Final = {"data_wait": "waits for input", "bookkept": "bookkeeping"}


def _rows(spans: Iterable[Drawn]) -> list[list[list[Any]]]:
    """Rows of a lane, so that no two spans of one row overlap: [begin, end, kind, label]."""
    rows: list[list[list[Any]]] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        row = next((row for row in rows if row[-1][1] <= span.begin), None)
        if row is None:
            rows.append(row := [])
        row.append([span.begin, span.end, span.kind, span.label])
    return rows

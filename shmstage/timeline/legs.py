"""Where each second of a boundary went: its idle, cut into legs that add up to it exactly, and each leg's whole length.

At every nanosecond of the idle one leg is to blame: the first in the table below of what was under way just then. What
is further down was waited for only because of what is further up, or only went on beside it. Where nothing is under way
the control path is.

| leg | under way while | before the update | after it |
|---|---|---|---|
| device | everything F needs was there: F took longer than a micro-batch does (the second estimator) | no | yes |
| update | the call that runs update k had begun and not dispatched it (a copy it waits for: snapshots) | yes | yes |
| placement | F was on its way to the device, or its late fields were | the staging call only | yes |
| snapshots | a call took metrics, checkpoint or weights, or update k waited for an earlier copy | yes | the call |
| scoring | a call that scores or evaluates ran, and the devices did not (when they do, it is no idle) | yes | yes |
| transfer | F's handle was on its way: from the call that carries it to the trainer's executing thread | no | yes |
| packing | F waited for a free slot or was filled | no | yes |
| input | the feeder had nothing to pack | no | yes |
| bookkeeping | step metrics, step line or hooks ran | yes | yes |
| control | none of these: calls, replies, deciding | yes | yes |

"No": before the update nothing of F holds the devices up but the staging call, which has the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from shmstage.timeline.boundaries import Boundary
from shmstage.timeline.intervals import Interval, difference, intersection, length_ns, union
from shmstage.timeline.reading import Event

Leg = Literal[
    "device", "update", "placement", "snapshots", "scoring", "transfer", "packing", "input", "bookkeeping", "control"
]
#: in order of priority: who is further up is to blame
LEGS: Final[tuple[Leg, ...]] = get_args(Leg)

_SNAPSHOTS = frozenset({"get_metrics", "save_checkpoint", "prepare_weight_sync"})
_SCORES = frozenset({"per_token_logps", "eval_step"})
_UPDATES = frozenset({"apply_deferred_update", "update"})
_FORWARDS = frozenset({"fwd_bwd", "fwd_bwd_staged"})


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the idle and the leg that is to blame for it."""

    begin: int
    end: int
    leg: Leg


@dataclass(frozen=True, slots=True)
class Legs:
    """``segments`` partition the idle, in order of time. ``whole_ns``: how long each leg took, hidden or not."""

    segments: tuple[Segment, ...]
    whole_ns: Mapping[Leg, int]

    @property
    def idle_ns(self) -> dict[Leg, int]:
        """Of every leg, 0 included; they sum to the boundary's idle."""
        found = dict.fromkeys(LEGS, 0)
        for segment in self.segments:
            found[segment.leg] += segment.end - segment.begin
        return found


def partition(idle: Sequence[Interval], causes: Sequence[tuple[Leg, Iterable[Interval]]]) -> list[Segment]:
    """Gives each piece of ``idle`` to the first of ``causes`` that covers it, what is left to "control"."""
    left = union(idle)
    segments = []
    for leg, intervals in causes:
        if not left:
            break
        covering = union(intervals)
        segments += [Segment(begin, end, leg) for begin, end in intersection(left, covering)]
        left = difference(left, covering)
    segments += [Segment(begin, end, "control") for begin, end in left]
    return sorted(segments, key=lambda segment: segment.begin)


def legs_of(boundary: Boundary) -> Legs:
    """The decomposition of one boundary."""
    seen = _Seen(boundary)
    before = partition(boundary.idle.before_update, [
        ("snapshots", seen.copies_in_the_way),
        ("update", seen.updating),
        ("placement", seen.staging_call),
        ("snapshots", seen.snapshot_calls),
        ("scoring", seen.scoring_calls),
        ("bookkeeping", seen.bookkeeping),
    ])  # fmt: skip
    after = partition(boundary.idle.after_update, [
        ("device", seen.slow_first),
        ("update", seen.updating),
        ("placement", seen.placement),
        ("snapshots", seen.snapshot_calls),
        ("scoring", seen.scoring_calls),
        ("transfer", seen.transfer),
        ("packing", seen.packing),
        ("input", seen.input),
        ("bookkeeping", seen.bookkeeping),
    ])  # fmt: skip
    segments = (*before, *after)
    whole: dict[Leg, Iterable[Interval]] = {
        "device": seen.slow_first,
        "update": seen.update_itself,
        "placement": seen.placement,
        "snapshots": [*seen.snapshot_calls, *seen.tickets],
        "scoring": [*seen.scoring_calls, *seen.scored],
        "transfer": seen.transfer,
        "packing": seen.packing,
        "input": seen.input,
        "bookkeeping": seen.bookkeeping,
        "control": [(s.begin, s.end) for s in segments if s.leg == "control"],
    }
    return Legs(segments, {leg: length_ns(union(whole[leg])) for leg in LEGS})


class _Seen:
    """What was under way at one boundary, by cause, as intervals that may overlap and reach beyond it."""

    def __init__(self, boundary: Boundary) -> None:
        before, first, at, idle = boundary.before, boundary.first, boundary.at, boundary.idle
        spans = boundary.attempt.spans
        begin = min(at.last_finished, at.update_dispatched)
        end = max(idle.first_started, at.update_landed)
        executed = spans["executed"].between(begin, end)
        staging = [e for e in executed if _command(e) == "stage_fwd_bwd" and (e.step, e.index) == (first.step, 0)]

        self.update_itself = [(max(at.last_finished, at.update_dispatched), at.update_landed)]
        self.updating = _update_calls(boundary, executed)
        self.placement = _known((first.upload_begun, first.staged_ready), (first.patch_begun, first.patch_ready))
        # without events nobody knows when the call was over: the upload stands for it
        self.staging_call = _intervals(staging) if len(spans["executed"]) else self.placement
        self.snapshot_calls = _intervals(e for e in executed if _command(e) in _SNAPSHOTS)
        self.scoring_calls = _intervals(e for e in executed if _command(e) in _SCORES)
        self.scored = _intervals(spans["scored"].between(begin, end))
        tickets = spans["ticketed"].between(begin, end)
        self.tickets = _intervals(e for e in tickets if e.step == before.step)
        earlier = _intervals(e for e in tickets if 0 <= e.step < before.step)
        self.copies_in_the_way = intersection(union(earlier), union(self.updating))
        self.transfer = _known((max(first.published, first.sent), first.received))
        self.packing = _known((first.slot_asked, first.slot_acquired), (first.pack_begun, first.packed))
        waits = spans["data_wait"].between(begin, end)
        self.input = _intervals(e for e in waits if e.step in (-1, first.step))
        self.bookkeeping = _intervals(spans["bookkept"].between(begin, end))
        self.slow_first = [(idle.explained_until, max(idle.explained_until, idle.first_started))]


def _update_calls(boundary: Boundary, executed: Iterable[Event]) -> list[Interval]:
    """From when the trainer had the call that runs this update until it was dispatched, and while it was dispatched."""
    before, at, last = boundary.before, boundary.at, boundary.last
    found = [(at.update_dispatched, before.update_returned)] if before.update_returned else []
    for call in executed:
        if call.t >= at.update_dispatched or call.end < at.update_dispatched:
            continue
        if _command(call) in _UPDATES:
            found.append((call.t, at.update_dispatched))
        elif _command(call) in _FORWARDS and (call.step, call.index) == (last.step, last.index):
            # the same call dispatched L first
            found.append((max(call.t, last.dispatch_returned), at.update_dispatched))
    return found


def _command(event: Event) -> str:
    return str(event.figures.get("command", ""))


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [(event.t, event.end) for event in events]


def _known(*intervals: Interval) -> list[Interval]:
    """Those of which both ends were written."""
    return [(begin, end) for begin, end in intervals if begin and end]

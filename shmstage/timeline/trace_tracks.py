"""What a trace is made of: marks on tracks, and tracks cut into lanes in which nothing overlaps."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: the tracks of a process from top to bottom; slots and lanes that are not known here come where the comments say
ORDER = [
    "source", "packer",  # slots
    "control calls", "bookkeeping", "trainer host", "uploads", "dispatch", "device", "update", "idle", "snapshots",
]  # fmt: skip
_SLOTS_AFTER = ORDER.index("packer") + 1
_LONGEST_TEXT = 200
INSTANTS = -1


@dataclass(slots=True)
class Mark:
    """One slice, or an instant (`end` None), on a track of a process. Times in ns on the trace's axis.

    `lane` counts from 0 and is given by ``assign_lanes``; instants have one of their own, ``INSTANTS``.
    """

    process: int
    track: str
    begin: int
    end: int | None
    name: str
    args: dict[str, Any] = field(default_factory=dict)
    lane: int = 0


def assign_lanes(marks: Iterable[Mark]) -> dict[tuple[int, str], list[int]]:
    """Gives each slice the first lane of its track that is free at its begin; returns the lanes of every track.

    Within a lane no two slices share an instant, and instants lie elsewhere: an arrow that stops there has one slice to
    be tied to. (Perfetto ties it to what began last, also to an instant that is long over.)
    """
    of_track: dict[tuple[int, str], list[Mark]] = {}
    for mark in marks:
        of_track.setdefault((mark.process, mark.track), []).append(mark)
    return {track: _assign(found) for track, found in of_track.items()}


def _assign(marks: list[Mark]) -> list[int]:
    slices = [(mark.begin, mark.end, mark) for mark in marks if mark.end is not None]
    for mark in marks:
        mark.lane = INSTANTS
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    lanes = 0
    for begin, end, mark in sorted(slices, key=lambda one: one[:2]):
        while taken and taken[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            heapq.heappush(free, lanes)
            lanes += 1
        mark.lane = heapq.heappop(free)
        # one without length takes its nanosecond: Perfetto would nest in it what begins there
        heapq.heappush(taken, (max(end, begin + 1), mark.lane))
    return [*range(lanes), *([INSTANTS] if len(slices) < len(marks) else [])]


def slot_track(slot: int) -> str:
    return f"slot {slot}"


def track_position(track: str) -> tuple[int, int, str]:
    """Sorts the tracks of one process."""
    if track in ORDER:
        position = ORDER.index(track)
        return (position + (position >= _SLOTS_AFTER), 0, track)
    slot = track.removeprefix("slot ")
    if slot != track and slot.isdecimal():
        return (_SLOTS_AFTER, int(slot), track)
    return (len(ORDER) + 1, 0, track)


def lane_name(track: str, lane: int) -> str:
    """Of the second lane "uploads 2", or "slot 0 (2)"."""
    if lane == INSTANTS:
        return f"{track} instants"
    if lane == 0:
        return track
    return f"{track} ({lane + 1})" if track[-1:].isdigit() else f"{track} {lane + 1}"


def arguments(step: int, index: int, identity: str, figures: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The `args` of a mark: identity first, then the figures as far as every JSON reader takes them."""
    args: dict[str, Any] = {}
    if step >= 0:
        args["step"] = step
    if index >= 0:
        args["index"] = index
    if identity:
        args["id"] = plain_text(identity)
    for key, value in {**figures, **more}.items():
        args.setdefault(plain_text(key), _plain(value))
    return args


def is_number(value: Any) -> bool:
    """Finite, and of a size that stays a number in every reader."""
    return type(value) in (int, float) and abs(value) < 1 << 63  # false of inf and nan, too


def plain_text(value: object) -> str:
    """Text that is valid UTF-8, of bounded length and never empty."""
    if type(value) is str and value.isascii() and value.isprintable() and 0 < len(value) <= _LONGEST_TEXT:
        return value  # nearly all are
    text = str(value)[:_LONGEST_TEXT].encode("utf-8", "replace").decode().replace("\0", "?")
    return text or "?"


def _plain(value: Any) -> Any:
    return value if type(value) is bool or is_number(value) else plain_text(value)

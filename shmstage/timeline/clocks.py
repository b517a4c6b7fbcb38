"""One time axis for the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Final

from shmstage.timeline.reading import Event, ProcessEvents

#: Two processes of one machine read one CLOCK_MONOTONIC. Their wall offsets differ by the time between the two readings
#: of a head, and by more only if somebody set the wall clock; those of two machines differ by when they were booted.
ONE_CLOCK_NS: Final = 50_000_000
#: 26 days: twice that is what a double holds in nanoseconds. What is further from the others is of a damaged clock.
REACH_NS: Final = 1 << 51
#: the axis begins a little before the first event: an end of 0 says "an instant"
FIRST_NS: Final = 1000


def shifts_ns(wall_offsets_ns: Sequence[int]) -> list[int]:
    """What to add to the instants of each process, so that all are on the first one's clock."""
    clocks: list[int] = []
    shifts = []
    for offset in wall_offsets_ns:
        clock = next((seen for seen in clocks if abs(seen - offset) <= ONE_CLOCK_NS), None)
        if clock is None:
            clocks.append(clock := offset)
        shifts.append(clock - clocks[0])
    return shifts


def on_one_axis(processes: Sequence[ProcessEvents]) -> list[ProcessEvents]:
    """All times on one clock, the first at ``FIRST_NS``; events whose times cannot be true are left out."""
    shifts = shifts_ns([process.wall_offset_ns for process in processes])
    times = [e.t + shift for process, shift in zip(processes, shifts, strict=True) for e in process.events]
    if not times:
        return [replace(process) for process in processes]
    low, high = median_low(times) - REACH_NS, median_low(times) + REACH_NS
    origin = min(time for time in times if low < time) - FIRST_NS
    moved = []
    for process, shift in zip(processes, shifts, strict=True):
        kept = [event for event in process.events if _within(event, low - shift, high - shift)]
        moved.append(replace(process, events=[_moved(event, shift - origin) for event in kept]))
    return moved


def _within(event: Event, low: int, high: int) -> bool:
    return low < event.t < high and (not event.end or event.t <= event.end < high)


def _moved(event: Event, by: int) -> Event:
    return replace(event, t=event.t + by, end=event.end + by if event.end else 0)

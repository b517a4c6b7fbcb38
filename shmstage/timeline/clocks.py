"""One time axis for the processes of a run."""

from __future__ import annotations

from collections.abc import Sequence

#: Two processes of one machine read one CLOCK_MONOTONIC. Their wall offsets differ by the time between the two readings
#: of a head, and by more only if somebody set the wall clock; those of two machines differ by when they were booted.
ONE_CLOCK_NS = 50_000_000


def shifts_ns(wall_offsets_ns: Sequence[int]) -> list[int]:
    """What to add to the instants of each process, so that all are on the first one's clock."""
    first_of_clock: list[int] = []
    shifts = []
    for offset in wall_offsets_ns:
        clock = next((seen for seen in first_of_clock if abs(seen - offset) <= ONE_CLOCK_NS), None)
        if clock is None:
            first_of_clock.append(offset)
            clock = offset
        shifts.append(clock - first_of_clock[0])
    return shifts

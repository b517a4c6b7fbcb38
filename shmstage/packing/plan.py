"""Which trajectory goes to which row: streaming first-fit-decreasing, pure and deterministic.

A window is what was added since the last `Planner.close_window` plus the leftovers of earlier windows. It is
planned longest first, arrival order breaking ties, each trajectory into the first row that takes it. Only
complete micro-batches leave; the trajectories of the last one, while it still has empty rows, wait as
leftovers for the next window.

Resuming rests on a property of first-fit: what is in a later micro-batch found no room in an earlier one, so
planning again without the first k micro-batches gives exactly the others. The planner therefore needs no state
beyond the trajectories that are not trained yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from shmstage.errors import SettingsError, TrajectoryError
from shmstage.packing.max_tree import MaxTree


@final
@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The shape of a micro-batch and the limits that close a row or a micro-batch.

    A limit of 0 does not exist. `max_segments_per_row` is hard, for segments without a loss token too.
    `segment_align`: a segment starts at a multiple of it. `max_real_tokens` caps the real tokens of one
    micro-batch (padding and alignment gaps are not real). They are the same for every encoding and host count,
    so that a plan never depends on those. Raises `SettingsError`.
    """

    rows: int
    tokens: int
    max_segments_per_row: int = 0
    segment_align: int = 1
    max_real_tokens: int = 0
    on_overlong: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        for name, least in (
            ("rows", 1),
            ("tokens", 1),
            ("max_segments_per_row", 0),
            ("segment_align", 1),
            ("max_real_tokens", 0),
        ):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise SettingsError(f"{name} = {value!r}; give an integer of at least {least}")
        if self.on_overlong not in ("error", "drop"):
            raise SettingsError(f'on_overlong = {self.on_overlong!r}; give "error" or "drop"')

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory that can be planned."""
        return min(self.tokens, self.max_real_tokens or self.tokens)


@final
class PlannedSegment(NamedTuple):
    """Trajectory number `arrival` takes tokens `start` to `start + length` of its row."""

    arrival: int
    start: int
    length: int


@final
@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The segments of one row in order of `start`; a padding row has none."""

    segments: tuple[PlannedSegment, ...]


@final
@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """Exactly `PlanSettings.rows` rows, padding rows last."""

    rows: tuple[PlannedRow, ...]

    def segments(self) -> Iterator[PlannedSegment]:
        """All segments, row by row."""
        for row in self.rows:
            yield from row.segments

    @property
    def arrivals(self) -> tuple[int, ...]:
        """Arrival numbers of the trajectories in it, row by row."""
        return tuple(segment.arrival for segment in self.segments())

    @property
    def real_tokens(self) -> int:
        """Tokens that belong to a trajectory."""
        return sum(segment.length for segment in self.segments())


@final
class Planner:
    """Collects (arrival, length) and hands out micro-batches. Not thread-safe; holds no arrays.

    Attributes: `dropped` (over-long trajectories under `on_overlong = "drop"`) and `skipped_empty` count what
    was added and will not be planned.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.dropped = 0
        self.skipped_empty = 0
        self._lengths: dict[int, int] = {}

    def add(self, arrival: int, length: int, name: str = "") -> bool:
        """Take a trajectory of `length` tokens into the window; False if it was dropped or is empty.

        `arrival` decides between equal lengths and names the trajectory in the plan; `name` is for errors.
        Raises `TrajectoryError` if it is over-long (`on_overlong = "error"`) or held already.
        """
        who = f"trajectory {name!r}" if name else f"trajectory number {arrival}"
        if length < 0:
            raise TrajectoryError(f"{who} has {length} tokens; a length is at least 0")
        if arrival in self._lengths:
            raise TrajectoryError(f"{who}: arrival number {arrival} is held already; give each its own")
        if length == 0:
            self.skipped_empty += 1
            return False
        if length > self.settings.longest:
            if self.settings.on_overlong == "drop":
                self.dropped += 1
                return False
            limit = "tokens" if self.settings.longest == self.settings.tokens else "max_real_tokens"
            raise TrajectoryError(
                f"{who} has {length} tokens, more than {limit} = {self.settings.longest}; "
                f'raise {limit} or set on_overlong = "drop"'
            )
        self._lengths[arrival] = length
        return True

    @property
    def leftovers(self) -> tuple[int, ...]:
        """Arrival numbers held and not handed out, in arrival order."""
        return tuple(sorted(self._lengths))

    def close_window(self) -> list[PlannedMicrobatch]:
        """Plan leftovers and window together; returns the complete micro-batches, keeps the rest."""
        return self._take(complete_only=True)

    def flush(self) -> list[PlannedMicrobatch]:
        """End of input: plan everything held; the last micro-batch is filled up with padding rows."""
        return self._take(complete_only=False)

    def _take(self, *, complete_only: bool) -> list[PlannedMicrobatch]:
        order = sorted(self._lengths.items(), key=lambda item: (-item[1], item[0]))
        filling = _Filling(self.settings)
        for arrival, length in order:
            filling.place(arrival, length)
        taken = []
        for bin_ in filling.bins:
            if complete_only and bin_ is filling.bins[-1] and not bin_.complete:
                break
            microbatch = bin_.planned()
            for segment in microbatch.segments():
                del self._lengths[segment.arrival]
            taken.append(microbatch)
        return taken


class _Bin:
    """One micro-batch being filled."""

    __slots__ = ("real_left", "room", "rows", "settings")

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.rows: list[list[PlannedSegment]] = []
        self.room = MaxTree(settings.rows, settings.tokens)
        self.real_left = settings.max_real_tokens or settings.rows * settings.tokens

    @property
    def complete(self) -> bool:
        """Nothing but small change could still be added: no row is empty, or no real token is left."""
        return len(self.rows) == self.settings.rows or self.real_left == 0

    @property
    def largest_fit(self) -> int:
        return min(self.room.largest, self.real_left)

    def place(self, arrival: int, length: int) -> None:
        settings = self.settings
        index = self.room.first_at_least(length)
        if index == len(self.rows):
            self.rows.append([])
        row = self.rows[index]
        align = settings.segment_align
        used = row[-1].start + row[-1].length if row else 0
        start = -(-used // align) * align
        row.append(PlannedSegment(arrival, start, length))
        self.real_left -= length
        next_start = -(-(start + length) // align) * align
        full = len(row) == settings.max_segments_per_row
        self.room.set(index, 0 if full else settings.tokens - next_start)

    def planned(self) -> PlannedMicrobatch:
        rows = [PlannedRow(tuple(row)) for row in self.rows]
        rows += [PlannedRow(())] * (self.settings.rows - len(rows))
        return PlannedMicrobatch(tuple(rows))


class _Filling:
    """First fit over the rows of all micro-batches in order.

    Two levels, so that `max_real_tokens` closes a whole micro-batch in one step however many rows it has.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.bins: list[_Bin] = []
        self.fits = MaxTree(1, -1)

    def place(self, arrival: int, length: int) -> None:
        index = self.fits.first_at_least(length)
        if index < 0:
            index = len(self.bins)
            self.bins.append(_Bin(self.settings))
            if index == self.fits.leaves:
                self.fits = self.fits.doubled()
        bin_ = self.bins[index]
        bin_.place(arrival, length)
        self.fits.set(index, bin_.largest_fit)

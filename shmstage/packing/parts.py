"""One host's part of a planned micro-batch: what travels to it instead of bytes, and what it has to fetch for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import numpy.typing as npt
import xxhash

from shmstage.errors import ProtocolError
from shmstage.packing.fill import planned
from shmstage.packing.pieces import Piece
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.reference import TrajectoryReference
from shmstage.packing.window import Window

Int64 = npt.NDArray[np.int64]

DIGEST_NBYTES = 16
#: row, start, length, store, number
COLUMNS = 5
_ROW, _START, _LENGTH, _STORE, _NUMBER = range(COLUMNS)
#: positions are int32 where they are packed
_MAX_TOKENS = (1 << 31) - 1


@final
@dataclass(frozen=True, slots=True)
class Part:
    """The segments of a window's rows, by (row, start), as they travel.

    `plan`: int64 `[n, 5]` of (row, start, length, store, number); rows and starts are those of the whole micro-batch,
    the last two say where the trajectory lies. `digests`: 16 bytes of each trajectory. All segments of a row are in it,
    also those beyond the window's tokens: they give the others their numbers, and the row its digest.
    """

    plan: bytes
    digests: bytes


def part_of(plan: PlannedMicrobatch, refs: Mapping[int, TrajectoryReference], window: Window) -> Part:
    """The part of the host that holds this window. `refs`: arrival numbers of the plan to references.

    Raises ``TrajectoryError`` for a reference that is missing, or of another length than planned.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    digests = []
    for row in range(window.row_begin, window.row_end):
        for arrival, start, length in plan.rows[row].segments:
            reference = planned(refs, arrival, length)
            rows.append((row, start, length, *reference.key))
            digests.append(reference.digest)
    return Part(np.array(rows, np.int64).tobytes(), b"".join(digests))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What one store is asked for: tokens `begins[i]` to `ends[i]` of its trajectory `numbers[i]`, int64 `[m]` each.

    `segments[i]`: which segment of the part that is.
    """

    store: int
    segments: Int64
    numbers: Int64
    begins: Int64
    ends: Int64
    lengths: Int64
    digests: tuple[bytes, ...]

    def matched(self, pieces: Sequence[Piece]) -> dict[int, Piece]:
        """Segment → its piece, for an answer that is what was asked for; anything else is a ``ProtocolError``."""
        if len(pieces) != len(self.segments):
            raise ProtocolError(f"store {self.store} was asked for {len(self.segments)} pieces and gave {len(pieces)}")
        found = {}
        asked = zip(self.segments.tolist(), self.digests, self.lengths.tolist(), self.begins.tolist(),
                    self.ends.tolist(), pieces, strict=True)  # fmt: skip
        for number, (segment, *want, piece) in enumerate(asked):
            got = [piece.digest, piece.length, piece.begin, piece.end]
            if got != want:
                raise ProtocolError(
                    f"store {self.store}, trajectory {self.numbers[number]}: [digest, length, begin, end] wants "
                    f"{_shown(want)}, got {_shown(got)} of {piece.trajectory_id!r}"
                )
            found[segment] = piece
        return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class WindowPart:
    """A `Part` as its host has read and checked it. `plan` is read-only, int64 `[n, 5]`."""

    window: Window
    plan: Int64
    digests: bytes

    def __len__(self) -> int:
        return len(self.plan)

    def digest(self, segment: int) -> bytes:
        return self.digests[segment * DIGEST_NBYTES : (segment + 1) * DIGEST_NBYTES]

    def wanted(self) -> tuple[Wanted, ...]:
        """What has to be fetched, store by store: the tokens in the window of every segment that has any."""
        starts, lengths = self.plan[:, _START], self.plan[:, _LENGTH]
        begins = np.clip(self.window.token_begin - starts, 0, lengths)
        ends = np.clip(self.window.token_end - starts, 0, lengths)
        here = np.flatnonzero(ends > begins)
        stores = self.plan[here, _STORE]
        found = []
        for store in np.unique(stores).tolist():
            segments = here[stores == store]
            digests = tuple(map(self.digest, segments.tolist()))
            numbers = self.plan[segments, _NUMBER]
            found.append(Wanted(store, segments, numbers, begins[segments], ends[segments], lengths[segments], digests))
        return tuple(found)


def read_part(plan: bytes, digests: bytes, window: Window) -> WindowPart:
    """The inverse of `part_of`, for hostile input too: anything unexpected is a ``ProtocolError``."""
    if not (0 <= window.row_begin < window.row_end and 0 <= window.token_begin < window.token_end <= _MAX_TOKENS):
        raise ProtocolError(f"{window}: a window has rows and tokens")
    if len(plan) % (COLUMNS * 8) or len(plan) // (COLUMNS * 8) * DIGEST_NBYTES != len(digests):
        raise ProtocolError(
            f"a plan is int64 [n, {COLUMNS}] with {DIGEST_NBYTES} bytes of digest for each; got {len(plan)} and "
            f"{len(digests)} bytes"
        )
    rows = np.frombuffer(plan, np.int64).reshape(-1, COLUMNS)
    if fault := _fault(rows, window):
        raise ProtocolError(f"the plan of rows {window.row_begin} to {window.row_end}: {fault}")
    return WindowPart(window, rows, digests)


def row_digests(part: WindowPart) -> bytes:
    """16 bytes for each row of the window, padding rows too, as in `packing.fill.microbatch_digest`."""
    each = np.empty((len(part), DIGEST_NBYTES + 8), np.uint8)
    each[:, :DIGEST_NBYTES] = np.frombuffer(part.digests, np.uint8).reshape(-1, DIGEST_NBYTES)
    each[:, DIGEST_NBYTES:] = np.ascontiguousarray(part.plan[:, _START]).view(np.uint8).reshape(-1, 8)
    cuts = np.searchsorted(part.plan[:, _ROW], np.arange(part.window.row_begin, part.window.row_end + 1)).tolist()
    flat, nbytes = each.tobytes(), each.shape[1]
    return b"".join(
        xxhash.xxh3_128_digest(flat[begin * nbytes : end * nbytes])
        for begin, end in pairwise(cuts)
    )


def digest_of_rows(rows: Sequence[bytes]) -> bytes:
    """The digest of the whole micro-batch. `rows`: its row digests in order, each alone or several joined."""
    joined = b"".join(rows)
    if len(joined) % DIGEST_NBYTES:
        raise ProtocolError(f"row digests of {len(joined)} bytes; each has {DIGEST_NBYTES}")
    return xxhash.xxh3_128_digest(joined)


def _fault(rows: Int64, window: Window) -> str:
    """What is wrong with a plan; "" if nothing is."""
    if not len(rows):
        return ""
    row, start, length = rows[:, _ROW], rows[:, _START], rows[:, _LENGTH]
    if rows.min() < 0:
        return f"{int(rows.min())} among its numbers"
    if row[0] < window.row_begin or row.max() >= window.row_end:
        return f"row {int(row[0])} or {int(row.max())} is not one of them"
    if start.max() > _MAX_TOKENS or length.max() > _MAX_TOKENS or (start + length).max() > _MAX_TOKENS:
        return f"tokens beyond {_MAX_TOKENS}"
    next_row, here = np.diff(row), row[1:] == row[:-1]
    if (next_row < 0).any() or (here & (start[1:] < start[:-1] + length[:-1])).any():
        return "its segments overlap or are out of order"
    if len(np.unique(rows[:, _STORE:], axis=0)) != len(rows):
        return "a trajectory stands in it twice"
    return ""


def _shown(values: Sequence[object]) -> list[object]:
    return [value.hex() if isinstance(value, bytes) else value for value in values]

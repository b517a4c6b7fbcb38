"""Packing one host's window of a micro-batch into the arrays of its slot, from pieces that were fetched for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from shmstage import _native
from shmstage.errors import LayoutError, ProtocolError
from shmstage.packing.fields import ROUTING, SEGMENT_IDS, SEGMENT_POSITIONS
from shmstage.packing.parts import WindowPart
from shmstage.packing.pieces import Piece
from shmstage.packing.routing import NAMES, encoding_of
from shmstage.packing.slot_fields import Views, fields_of, routing_views, word_views
from shmstage.packing.trajectory import check_same_fields


def fill_window(part: WindowPart, pieces: Mapping[int, Piece], views: Mapping[str, npt.NDArray[Any]]) -> int:
    """Write every byte of every packed field of the window, padding too: what `fill_microbatch` writes there.

    `pieces` maps segments of the part to what `Wanted.matched` gave; those without a token in the window have none.
    `views` are the slot's arrays: `[rows, tokens]` of the window, encoded routing as its whole tiles. Segments are
    numbered, and positions counted, as in the whole row. Returns the real tokens in the window.

    Raises before anything is written: `ProtocolError` for a piece that is missing, `TrajectoryError` for one that
    carries other fields than its neighbours, `LayoutError` for views that do not match the window and its pieces.
    """
    window = part.window
    shape = window.rows, window.tokens
    first = next(iter(pieces.values()), None)
    fields = fields_of(first, views)
    tiles = _tiles(views, shape)
    routing = routing_views(first, views, shape, tiles) if ROUTING in fields else None
    words = word_views(fields, views, shape)
    try:
        return _native.fill_window(
            part.plan,
            [pieces[number].record if number in pieces else None for number in range(len(part))],
            (window.row_begin, window.row_end, window.token_begin, window.token_end),
            tiles or (1, 1),
            views[SEGMENT_IDS],
            views[SEGMENT_POSITIONS],
            words,
            routing,
        )
    except (ValueError, TypeError) as error:
        check_same_fields(pieces.values())
        _check_complete(part, pieces)
        raise LayoutError(f"the part does not fit into {shape[0]} rows of {shape[1]} tokens: {error}") from None


def _tiles(views: Views, shape: tuple[int, int]) -> tuple[int, ...]:
    """The leading axes of encoded routing; none where it is not encoded."""
    encoding = encoding_of(views)
    if encoding in (None, "dense"):
        return ()
    ids = views[NAMES[encoding][0]]
    if ids.ndim < 2 or 0 in ids.shape[:2] or shape[0] % ids.shape[0] or shape[1] % ids.shape[1]:
        raise LayoutError(
            f"view {NAMES[encoding][0]} of shape {list(ids.shape)}: its first two axes are tiles that divide "
            f"{shape[0]} rows x {shape[1]} tokens"
        )
    return ids.shape[:2]


def _check_complete(part: WindowPart, pieces: Mapping[int, Piece]) -> None:
    for wanted in part.wanted():
        for segment, number in zip(wanted.segments.tolist(), wanted.numbers.tolist(), strict=True):
            if segment not in pieces:
                raise ProtocolError(f"trajectory {number} of store {wanted.store} was not fetched")

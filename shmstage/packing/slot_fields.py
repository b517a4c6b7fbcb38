"""Which fields a fill writes, and whether the views of a slot are those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmstage.errors import LayoutError, SlotStateError
from shmstage.packing.fields import (
    ROUTING,
    SEGMENT_IDS,
    SEGMENT_POSITIONS,
    TOKEN_FIELDS,
    WORD_FIELDS,
    TokenField,
    carried_fields,
)
from shmstage.packing.reference import Carrier
from shmstage.packing.routing import DENSE, NAMES, OFFSETS, PACKED, RAGGED, VALIDITY, encoding_of, id_bits

Views = Mapping[str, npt.NDArray[Any]]

#: packed name → where a record has the field
_NUMBERS = {field.packed: number for number, field in enumerate(WORD_FIELDS)}
_PLAN_FIELDS = ((SEGMENT_IDS, "int32"), (SEGMENT_POSITIONS, "int32"))


def fields_of(first: Carrier | None, views: Views) -> tuple[TokenField, ...]:
    """The fields to fill. Without a trajectory (padding rows only) the views decide. Raises ``LayoutError``."""
    encoding = encoding_of(views)
    if first is not None:
        fields = carried_fields(first.optional)
    else:
        present = {*views, *((ROUTING.packed,) if encoding else ())}
        fields = tuple(field for field in TOKEN_FIELDS if not field.optional or field.packed in present)
    want = {field.packed for field in fields} | {SEGMENT_IDS, SEGMENT_POSITIONS}
    if ROUTING in fields:
        want = (want - {ROUTING.packed}) | set(NAMES[encoding or "dense"])
    if views.keys() != want:
        missing, extra = sorted(want - views.keys()), sorted(views.keys() - want)
        who = "padding" if first is None else f"trajectory {first.trajectory_id!r} and its neighbours"
        raise LayoutError(f"the views lack {missing} and have {extra}, which {who} cannot fill")
    return fields


def views_to_fill(first: Carrier | None, views: Views, late: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The views that a fill writes. ``late`` fields that trajectories do not carry become zero: somebody writes them.

    ``first``: stands for all; ``None``: padding rows only. A field that is not late and not carried stays for the fill
    to refuse: zero would be trained as if it were a value.
    """
    carried = {field.packed for field in (TOKEN_FIELDS if first is None else carried_fields(first.optional))}
    absent = set(late) - carried
    for name in absent:
        views[name].fill(0)
    return {name: view for name, view in views.items() if name not in absent}


def word_views(fields: Sequence[TokenField], views: Views, shape: tuple[int, int]) -> list[tuple[Any, int, int]]:
    """Every field but routing, as the native fills take them. Raises ``LayoutError``."""
    words = [field for field in fields if field is not ROUTING]
    for name, dtype in (*((field.packed, field.dtype) for field in words), *_PLAN_FIELDS):
        check_view(name, views[name], dtype, shape)
    return [(views[field.packed], _NUMBERS[field.packed], field.pad_byte) for field in words]


#: encoding, layers, top_k, bits, ids, validity, offsets: as the native calls take them
RoutingViews = tuple[str, int, int, int, Any, Any, Any]


def routing_views(
    first: Carrier | None, views: Views, shape: tuple[int, int], tiles: tuple[int, ...] = ()
) -> RoutingViews:
    """Where routing goes; bits 0: ids are not packed. `shape`: rows and tokens. Raises ``LayoutError``.

    `tiles`: how the views of encoded routing are divided, their leading axes. Ids are taken to fit the bits: they were
    checked against the number of experts when they came in.
    """
    encoding = encoding_of(views) or "dense"
    ids = views[NAMES[encoding][0]]
    leading = 2 if encoding == "dense" else len(tiles) + 1
    if ids.ndim != leading + (3 if encoding == "ragged_packed" else 2):
        raise LayoutError(f"view {NAMES[encoding][0]} has shape {list(ids.shape)}")
    lies = ids.shape[leading : leading + 2]
    layers, top_k = lies if first is None or first.routing is None else first.routing.shape[1:]
    if encoding == "dense":
        check_view(DENSE, ids, "int16", (*shape, layers, top_k))
        return encoding, int(layers), int(top_k), 0, ids, None, None
    length = ids.shape[len(tiles)]
    bits = 0
    if encoding == "ragged":
        check_view(RAGGED, ids, "int16", (*tiles, length, layers, top_k))
    else:
        bits = ids.shape[-1]
        if first is not None and first.experts and id_bits(first.experts) > bits:
            raise LayoutError(
                f"ids of {first.experts} experts take {id_bits(first.experts)} bits, the view {PACKED} has {bits}"
            )
        check_view(PACKED, ids, "uint8", (*tiles, length, layers, top_k, bits))
        check_view(VALIDITY, views[VALIDITY], "uint8", (*tiles, length, layers))
    rows = shape[0] // tiles[0] if tiles else shape[0]
    check_view(OFFSETS, views[OFFSETS], "int32", (*tiles, rows + 1))
    return encoding, int(layers), int(top_k), bits, ids, views.get(VALIDITY), views[OFFSETS]


def check_view(name: str, view: npt.NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    """Raises ``LayoutError`` for a view of another dtype, shape or order, ``SlotStateError`` for a read-only one."""
    if view.dtype != np.dtype(dtype) or view.shape != shape:
        raise LayoutError(f"view {name} wants {dtype}{list(shape)}, got {view.dtype}{list(view.shape)}")
    if not view.flags.c_contiguous:
        raise LayoutError(f"view {name} is not C-contiguous; give the slot's whole array")
    if not view.flags.writeable:
        raise SlotStateError(f"view {name} is read-only; acquire a slot and fill it before publish")

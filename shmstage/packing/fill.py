"""Packing a planned micro-batch into the arrays of a slot: one native call, no copy in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from shmstage import _native
from shmstage.errors import LayoutError, SlotStateError, TrajectoryError
from shmstage.packing.fields import (
    ROUTING,
    SEGMENT_IDS,
    SEGMENT_POSITIONS,
    TOKEN_FIELDS,
    WORD_FIELDS,
    TokenField,
    carried_fields,
    optional_fields,
)
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.routing import DENSE, GROUP, NAMES, OFFSETS, PACKED, RAGGED, VALIDITY, encoding_of, id_bits
from shmstage.packing.trajectory import Trajectory, check_same_fields


@final
@dataclass(frozen=True, slots=True)
class FillStats:
    """What a filled micro-batch holds.

    `loss_tokens`: positions with `loss_mask` 1 that are not a segment's first token (nothing predicts that one);
    `segments`: segments with at least one loss token, so fully masked ones and padding rows count for nothing;
    `real_tokens`: tokens of a trajectory, the rest is padding.
    """

    loss_tokens: int
    segments: int
    real_tokens: int


def fill_microbatch(
    plan: PlannedMicrobatch,
    trajectories: Mapping[int, Trajectory],
    views: Mapping[str, npt.NDArray[Any]],
) -> FillStats:
    """Write every byte of every packed field, padding too.

    `trajectories` maps arrival numbers of the plan to trajectories. `views` are the slot's arrays, those of
    `microbatch_layout`: writable, C-contiguous, at any address. The GIL is released while bytes move.

    Raises before anything is written: `TrajectoryError` for a trajectory that is missing, has another length than
    planned, or carries other fields than its neighbours; `LayoutError` for views that do not match the plan and
    its trajectories; `SlotStateError` for a view that can no longer be written.
    """
    gathered = _gathered(plan, trajectories)
    segment = next(plan.segments(), None)
    first = None if segment is None else trajectories[segment.arrival]
    if SEGMENT_IDS not in views or views[SEGMENT_IDS].ndim != 2:
        raise LayoutError(f"a micro-batch has {SEGMENT_IDS} [rows, tokens]; got views {sorted(views)}")
    rows, tokens = views[SEGMENT_IDS].shape
    if rows != len(plan.rows):
        raise LayoutError(f"{SEGMENT_IDS} has {rows} rows, the plan {len(plan.rows)}")
    fields = _fields_of(first, views)
    routing = _routing(first, rows, tokens, gathered, views) if ROUTING in fields else None
    words = [field for field in fields if field is not ROUTING]
    for name, dtype in (*((field.packed, field.dtype) for field in words), *_PLAN_FIELDS):
        _check_view(name, views[name], dtype, (rows, tokens))
    try:
        _native.fill_microbatch(
            gathered,
            tokens,
            views[SEGMENT_IDS],
            views[SEGMENT_POSITIONS],
            [(views[field.packed], _NUMBERS[field.packed], field.pad_byte) for field in words],
            routing,
        )
    except (ValueError, TypeError) as error:
        raise LayoutError(f"the plan does not fit into {rows} rows of {tokens} tokens: {error}") from None
    return FillStats(loss_tokens=gathered.loss_tokens, segments=gathered.trained, real_tokens=gathered.tokens)


def microbatch_digest(plan: PlannedMicrobatch, trajectories: Mapping[int, Trajectory]) -> bytes:
    """16 bytes: xxh3-128 over the row digests in order, padding rows included.

    A row digest is xxh3-128 over (trajectory digest, start as 8 bytes little-endian) of its segments. It says
    what was packed where, and is the same for every encoding and host count.
    """
    whole = xxhash.xxh3_128()
    for row in plan.rows:
        part = xxhash.xxh3_128()
        for segment in row.segments:
            part.update(_planned(trajectories, segment.arrival, segment.length).digest)
            part.update(segment.start.to_bytes(8, "little"))
        whole.update(part.digest())
    return whole.digest()


#: packed name → where a record has the field
_NUMBERS = {field.packed: number for number, field in enumerate(WORD_FIELDS)}
_PLAN_FIELDS = ((SEGMENT_IDS, "int32"), (SEGMENT_POSITIONS, "int32"))


def _gathered(plan: PlannedMicrobatch, trajectories: Mapping[int, Trajectory]) -> _native.Gathered:
    """The records of the plan's trajectories. Nothing is done per trajectory in Python."""
    try:
        return _native.Gathered([row.segments for row in plan.rows], trajectories)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        check_same_fields([_planned(trajectories, segment.arrival, segment.length) for segment in plan.segments()])
        raise LayoutError(f"the plan does not fit its trajectories: {error}") from None


def _planned(trajectories: Mapping[int, Trajectory], arrival: int, length: int) -> Trajectory:
    trajectory = trajectories.get(arrival)
    if trajectory is None:
        raise TrajectoryError(f"the plan names trajectory number {arrival}, which was not given")
    if trajectory.length != length:
        raise TrajectoryError(
            f"trajectory {trajectory.trajectory_id!r} was planned with {length} tokens, got {trajectory.length}"
        )
    return trajectory


def _fields_of(first: Trajectory | None, views: Mapping[str, npt.NDArray[Any]]) -> tuple[TokenField, ...]:
    """The fields to fill. Without a trajectory (padding rows only) the views decide."""
    encoding = encoding_of(views)
    if first is not None:
        fields = carried_fields(optional_fields(first))
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


#: encoding, layers, top_k, bits, ids, validity, offsets: as the native call takes them
_Routing = tuple[str, int, int, int, Any, Any, Any]


def _routing(
    first: Trajectory | None, rows: int, tokens: int, gathered: _native.Gathered, views: Mapping[str, npt.NDArray[Any]]
) -> _Routing:
    """Where routing goes, for the native call; bits 0: ids are not packed.

    Ids are taken to fit `bits`: they were checked against the number of experts when they came in.
    """
    encoding = encoding_of(views) or "dense"
    name = NAMES[encoding][0]
    ids = views[name]
    if ids.ndim != (3 if encoding == "ragged" else 4):
        raise LayoutError(f"view {name} has shape {list(ids.shape)}")
    shape = ids.shape[2:4] if encoding == "dense" else ids.shape[1:3]
    layers, top_k = shape if first is None or first.routing is None else first.routing.shape[1:]
    if encoding == "dense":
        _check_view(DENSE, ids, "int16", (rows, tokens, layers, top_k))
        return encoding, int(layers), int(top_k), 0, ids, None, None
    bits = 0
    if encoding == "ragged":
        _check_view(RAGGED, ids, "int16", (len(ids), layers, top_k))
    else:
        bits = ids.shape[3]
        _check_bits(first, gathered, bits)
        _check_view(PACKED, ids, "uint8", (len(ids), layers, top_k, bits))
        _check_view(VALIDITY, views[VALIDITY], "uint8", (len(ids), layers))
    _check_view(OFFSETS, views[OFFSETS], "int32", (rows + 1,))
    capacity = len(ids) * (GROUP if bits else 1)
    if gathered.tokens > capacity:
        raise LayoutError(f"{gathered.tokens} real tokens; the slot has room for the routing of {capacity}")
    return encoding, int(layers), int(top_k), bits, ids, views.get(VALIDITY), views[OFFSETS]


def _check_bits(first: Trajectory | None, gathered: _native.Gathered, bits: int) -> None:
    if first is not None and first.experts and id_bits(first.experts) > bits:
        raise LayoutError(
            f"ids of {first.experts} experts take {id_bits(first.experts)} bits, the view {PACKED} has {bits}"
        )
    if gathered.held_bits not in (0, bits):
        raise LayoutError(f"routing is held in {gathered.held_bits} bits an id, the view {PACKED} has {bits}")


def _check_view(name: str, view: npt.NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    if view.dtype != np.dtype(dtype) or view.shape != shape:
        raise LayoutError(f"view {name} wants {dtype}{list(shape)}, got {view.dtype}{list(view.shape)}")
    if not view.flags.c_contiguous:
        raise LayoutError(f"view {name} is not C-contiguous; give the slot's whole array")
    if not view.flags.writeable:
        raise SlotStateError(f"view {name} is read-only; acquire a slot and fill it before publish")

"""Packing a planned micro-batch into the arrays of a slot: one native call, no copy in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy.typing as npt
import xxhash

from shmstage import _native
from shmstage.errors import LayoutError, TrajectoryError
from shmstage.packing.fields import ROUTING, SEGMENT_IDS, SEGMENT_POSITIONS
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.reference import Described
from shmstage.packing.routing import GROUP, PACKED
from shmstage.packing.slot_fields import RoutingViews, fields_of, routing_views, word_views
from shmstage.packing.trajectory import Trajectory, check_same_fields

_Known = TypeVar("_Known", bound=Described)


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
    fields = fields_of(first, views)
    routing = None
    if ROUTING in fields:
        routing = routing_views(first, views, (rows, tokens))
        _check_routing(routing, gathered)
    words = word_views(fields, views, (rows, tokens))
    try:
        _native.fill_microbatch(gathered, tokens, views[SEGMENT_IDS], views[SEGMENT_POSITIONS], words, routing)
    except (ValueError, TypeError) as error:
        raise LayoutError(f"the plan does not fit into {rows} rows of {tokens} tokens: {error}") from None
    return FillStats(loss_tokens=gathered.loss_tokens, segments=gathered.trained, real_tokens=gathered.tokens)


def microbatch_digest(plan: PlannedMicrobatch, trajectories: Mapping[int, Described]) -> bytes:
    """16 bytes: xxh3-128 over the row digests in order, padding rows included.

    A row digest is xxh3-128 over (trajectory digest, start as 8 bytes little-endian) of its segments. It says
    what was packed where, and is the same for every encoding and host count.
    """
    whole = xxhash.xxh3_128()
    for row in plan.rows:
        part = xxhash.xxh3_128()
        for segment in row.segments:
            part.update(planned(trajectories, segment.arrival, segment.length).digest)
            part.update(segment.start.to_bytes(8, "little"))
        whole.update(part.digest())
    return whole.digest()


def planned(trajectories: Mapping[int, _Known], arrival: int, length: int) -> _Known:
    """The trajectory that a segment names. Raises ``TrajectoryError`` if it is missing or of another length."""
    trajectory = trajectories.get(arrival)
    if trajectory is None:
        raise TrajectoryError(f"the plan names trajectory number {arrival}, which was not given")
    if trajectory.length != length:
        raise TrajectoryError(
            f"trajectory {trajectory.trajectory_id!r} was planned with {length} tokens, got {trajectory.length}"
        )
    return trajectory


def _gathered(plan: PlannedMicrobatch, trajectories: Mapping[int, Trajectory]) -> _native.Gathered:
    """The records of the plan's trajectories. Nothing is done per trajectory in Python."""
    try:
        return _native.Gathered([row.segments for row in plan.rows], trajectories)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        check_same_fields([planned(trajectories, segment.arrival, segment.length) for segment in plan.segments()])
        raise LayoutError(f"the plan does not fit its trajectories: {error}") from None


def _check_routing(routing: RoutingViews, gathered: _native.Gathered) -> None:
    encoding, _, _, bits, ids, _, _ = routing
    if encoding == "dense":
        return
    if bits and gathered.held_bits not in (0, bits):
        raise LayoutError(f"routing is held in {gathered.held_bits} bits an id, the view {PACKED} has {bits}")
    capacity = len(ids) * (GROUP if bits else 1)
    if gathered.tokens > capacity:
        raise LayoutError(f"{gathered.tokens} real tokens; the slot has room for the routing of {capacity}")

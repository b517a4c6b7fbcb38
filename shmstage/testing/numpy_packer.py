"""The packed arrays of a plan, made the obvious way: what native fill and decoder are compared with, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmstage.packing.fields import ROUTING, SEGMENT_IDS, SEGMENT_POSITIONS, carried_fields, optional_fields
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.routing import DENSE, GROUP, OFFSETS, PACKED, RAGGED, VALIDITY, id_bits, routing_capacity
from shmstage.packing.trajectory import Trajectory


def pack_with_numpy(
    plan: PlannedMicrobatch, trajectories: Mapping[int, Trajectory], tokens: int
) -> dict[str, npt.NDArray[Any]]:
    """Fresh arrays `[rows, tokens]` (`routed_experts` `[rows, tokens, layers, top_k]`) by packed name.

    The optional fields are those of the first trajectory in the plan; a plan of padding rows has none.
    """
    packed = [trajectories[arrival] for arrival in plan.arrivals]
    shape = (len(plan.rows), tokens)
    arrays: dict[str, npt.NDArray[Any]] = {
        SEGMENT_IDS: np.zeros(shape, np.int32),
        SEGMENT_POSITIONS: np.zeros(shape, np.int32),
    }
    fields = carried_fields(optional_fields(packed[0]) if packed else ())
    for field in fields:
        if field is ROUTING:
            assert packed[0].routing is not None
            arrays[field.packed] = np.full((*shape, *packed[0].routing.shape[1:]), -1, np.int16)
        else:
            arrays[field.packed] = np.zeros(shape, field.dtype)
    for row, planned in enumerate(plan.rows):
        for number, segment in enumerate(planned.segments, start=1):
            trajectory = trajectories[segment.arrival]
            end = segment.start + segment.length
            arrays[SEGMENT_IDS][row, segment.start : end] = number
            arrays[SEGMENT_POSITIONS][row, segment.start : end] = np.arange(segment.length)
            for field in fields:
                values = getattr(trajectory, field.source)
                arrays[field.packed][row, segment.start : segment.start + len(values)] = values
    return arrays


def encode_routing(
    arrays: Mapping[str, npt.NDArray[Any]],
    encoding: str,
    *,
    experts: int = 0,
    max_real_tokens: int = 0,
    tiles: tuple[int, int] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """The arrays with `routed_experts` in another encoding, its fields in its place."""
    dense, real = arrays[DENSE], arrays[SEGMENT_IDS] > 0
    if tiles is None:
        encoded = _encoded(dense, real, encoding, experts, max_real_tokens)
    else:
        down, across = tiles
        rows, tokens = dense.shape[0] // down, dense.shape[1] // across
        cuts = [_cuts(row, rows, across, tokens) for row in range(down)]
        each = [[_encoded(dense[at], real[at], encoding, experts, max_real_tokens) for at in row] for row in cuts]
        encoded = {name: np.stack([np.stack([one[name] for one in row]) for row in each]) for name in each[0][0]}
    found: dict[str, npt.NDArray[Any]] = {}
    for name, array in arrays.items():
        found.update(encoded if name == DENSE else {name: array})
    return found


def _cuts(row: int, rows: int, across: int, tokens: int) -> list[tuple[slice, slice]]:
    """The tiles of one row of tiles."""
    down = slice(row * rows, (row + 1) * rows)
    return [(down, slice(column * tokens, (column + 1) * tokens)) for column in range(across)]


def _encoded(
    dense: npt.NDArray[np.int16], real: npt.NDArray[np.bool_], encoding: str, experts: int, max_real_tokens: int
) -> dict[str, npt.NDArray[Any]]:
    rows, tokens, layers, top_k = dense.shape
    capacity = routing_capacity(rows, tokens, max_real_tokens)
    ragged = np.full((capacity, layers, top_k), -1, np.int16)
    ragged[: real.sum()] = dense[real]
    offsets = np.concatenate([[0], np.cumsum(real.sum(axis=1))]).astype(np.int32)
    if encoding == "ragged":
        return {RAGGED: ragged, OFFSETS: offsets}
    valid = ragged[:, :, 0] >= 0
    validity = np.packbits(valid.reshape(-1, GROUP, layers), axis=1, bitorder="little")[:, 0]
    return {PACKED: _pack_ids(ragged, id_bits(experts)), VALIDITY: validity, OFFSETS: offsets}


def _pack_ids(ragged: npt.NDArray[np.int16], bits: int) -> npt.NDArray[np.uint8]:
    """`[capacity, layers, top_k]` → `[capacity / 8, layers, top_k, bits]`: 8 ids of `bits` bits, little-endian."""
    capacity, layers, top_k = ragged.shape
    grouped = np.where(ragged < 0, 0, ragged).reshape(-1, GROUP, layers, top_k).transpose(0, 2, 3, 1)
    # [groups, layers, top_k, token of the group, bit] is one string of 8 * bits bits
    each = (grouped[..., None] >> np.arange(bits)) & 1
    return np.packbits(each.astype(np.uint8).reshape(capacity // GROUP, layers, top_k, -1), axis=-1, bitorder="little")

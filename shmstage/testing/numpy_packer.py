"""The packed arrays of a plan, made the obvious way: what the native fill is compared with, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmstage.packing.fields import ROUTING, SEGMENT_IDS, SEGMENT_POSITIONS, carried_fields, optional_fields
from shmstage.packing.plan import PlannedMicrobatch
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

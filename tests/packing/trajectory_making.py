"""Trajectories with seeded content, for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmstage.packing.trajectory import Trajectory


def make_trajectory(
    length: int,
    *,
    name: str = "t",
    seed: int = 0,
    optional: frozenset[str] = frozenset(),
    layers: int = 2,
    top_k: int = 3,
    experts: int = 16,
    routing_rows: int | None = None,
    **changes: Any,
) -> Trajectory:
    """`length` tokens of noise; routing has `length - 1` rows unless told."""
    noise = np.random.default_rng([seed, length])
    fields: dict[str, Any] = {
        "tokens": noise.integers(0, 1 << 31, length, dtype=np.int32),
        "loss_mask": noise.integers(0, 2, length).astype(np.float32),
        "advantages": noise.standard_normal(length).astype(np.float32),
        "old_logprobs": noise.standard_normal(length).astype(np.float32),
    }
    for field in sorted(optional - {"routing"}):
        fields[field] = noise.standard_normal(length).astype(np.float32)
    if "routing" in optional:
        rows = max(length - 1, 0) if routing_rows is None else routing_rows
        scores = noise.random((rows, layers, experts))
        fields["routing"] = np.argsort(scores, axis=-1)[..., :top_k].astype(np.int16)
    if "routing" in fields or "routing" in changes:
        fields["experts"] = experts
    return Trajectory(**{"trajectory_id": name, **fields, **changes})

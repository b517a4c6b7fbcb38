"""Micro-batches with routing, seeded: real tokens with gaps between them, rows without any, choices unset."""

from __future__ import annotations

from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]


def routed_arrays(
    seed: int, *, rows: int, tokens: int, layers: int, top_k: int, experts: int, fill: float = 0.6
) -> Arrays:
    """`segment_ids`, `completion_mask` and dense `routed_experts`; the smallest and the largest id occur."""
    noise = np.random.default_rng(seed)
    real = noise.random((rows, tokens)) < fill
    real[noise.random(rows) < 0.2] = False
    first = noise.integers(0, experts, (rows, tokens, layers, 1))
    first[noise.random(first.shape) < 0.3] = experts - 1
    dense = (first - np.arange(top_k)) % experts  # distinct as long as top_k <= experts
    dense[noise.random((rows, tokens, layers)) < 0.2] = -1
    dense[~real] = -1
    return {
        "completion_mask": real.astype(np.float32),
        "segment_ids": real.astype(np.int32),
        "routed_experts": dense.astype(np.int16),
        "advantages": noise.standard_normal((rows, tokens)).astype(np.float32),
    }

"""Packed micro-batches of made-up rollouts, for engines that train on the packed fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmstage.memory.layout import Layout

ROWS, TOKENS = 2, 24
INTS = ("completion_ids", "segment_ids", "segment_positions")
FLOATS = ("completion_mask", "advantages", "old_per_token_logps")


def packed_layout(rows: int = ROWS, tokens: int = TOKENS) -> Layout:
    kinds = {**dict.fromkeys(INTS, "int32"), **dict.fromkeys(FLOATS, "float32")}
    return Layout.of({name: (kind, (rows, tokens)) for name, kind in kinds.items()})


def packed_microbatch(layout: Layout, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of two or three segments of random lengths and some padding; how many tokens count differs by seed."""
    rng = np.random.default_rng(seed)
    rows, tokens = layout.fields[0].shape
    arrays: dict[str, np.ndarray[Any, Any]] = {f.name: np.zeros(f.shape, f.dtype) for f in layout.fields}
    for row in range(rows):
        start = 0
        for segment in range(1, int(rng.integers(2, 4)) + 1):
            length = min(int(rng.integers(4, 9)), tokens - start)
            span = slice(start, start + length)
            arrays["completion_ids"][row, span] = rng.integers(0, 200, length)
            arrays["segment_ids"][row, span] = segment
            arrays["segment_positions"][row, span] = np.arange(length)
            arrays["completion_mask"][row, span] = np.arange(length) >= 2
            arrays["advantages"][row, span] = rng.standard_normal()
            arrays["old_per_token_logps"][row, span] = -5.0 + 0.1 * rng.standard_normal(length)
            start += length
    return arrays

"""Packed arrays made by hand, independent of the planner and the native fill."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shmstage.demo.loss import LossConfig, clipped_policy_gradient
from shmstage.demo.model import ModelConfig, Params, init, logits, per_token_logps

CONFIG = ModelConfig(vocabulary=32, d_model=16, layers=2, heads=2, d_ff=32)

Segment = dict[str, np.ndarray]

# Compiled once per shape for all tests: most of their time is compilation.
compiled_logits = jax.jit(logits)
compiled_logps = jax.jit(per_token_logps)


@functools.cache
def tiny_params() -> Params:
    # Larger than a fresh model's, so that attention and logits are far from uniform.
    return jax.tree.map(lambda leaf: leaf * 2.0, init(jax.random.key(7), CONFIG))


@functools.cache
def _compiled_step(config: LossConfig) -> Any:
    def of(params: Params, batch: dict[str, np.ndarray]) -> Any:
        loss, denominator, metrics = clipped_policy_gradient(params, batch, config)
        return loss, {"denominator": denominator, **metrics}

    return jax.jit(jax.value_and_grad(of, has_aux=True))


def step(
    batch: dict[str, np.ndarray], config: LossConfig
) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """Loss sum, the other sums, and the gradients' leaves."""
    (loss, sums), gradients = _compiled_step(config)(tiny_params(), batch)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]
    return float(loss), {name: float(value) for name, value in sums.items()}, leaves


def segment(seed: int, length: int, prompt: int = 2) -> Segment:
    """One trajectory's arrays ``[length]``; the first ``prompt`` tokens are masked."""
    rng = np.random.default_rng(seed)
    mask = np.ones(length, np.float32)
    mask[:prompt] = 0
    return {
        "completion_ids": rng.integers(0, CONFIG.vocabulary, length).astype(np.int32),
        "completion_mask": mask,
        "advantages": rng.normal(size=length).astype(np.float32),
        "old_per_token_logps": -3.5 + 0.3 * rng.normal(size=length).astype(np.float32),
        "ref_per_token_logps": -3.5 + 0.3 * rng.normal(size=length).astype(np.float32),
    }


def pack(*rows: Sequence[Segment], tokens: int = 24, gap: int = 0) -> dict[str, np.ndarray]:
    """Segments one behind another, ``gap`` padding tokens between them; an empty row is padding."""
    example = segment(0, 3)
    names = list(example)
    batch = {name: np.zeros((len(rows), tokens), example[name].dtype) for name in names}
    batch["segment_ids"] = np.zeros((len(rows), tokens), np.int32)
    batch["segment_positions"] = np.zeros((len(rows), tokens), np.int32)
    for row, segments in enumerate(rows):
        start = 0
        for number, arrays in enumerate(segments, 1):
            span = slice(start, start + len(arrays["completion_ids"]))
            for name in names:
                batch[name][row, span] = arrays[name]
            batch["segment_ids"][row, span] = number
            batch["segment_positions"][row, span] = np.arange(span.stop - span.start)
            start = span.stop + gap
    return batch

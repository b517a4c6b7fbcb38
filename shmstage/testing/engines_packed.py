"""A small engine over packed micro-batches, the kind the feeder makes: real JAX programs that take milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shmstage.errors import MissingExtraError
from shmstage.trainer.checkpoints import CheckpointStore
from shmstage.trainer.optax_engine import OptaxEngine

MASK = "completion_mask"


def packed_loss(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """A linear model over packed fields; every field has a part in the sum, padding has none."""
    place = params["w"][batch["segment_positions"]] * batch["segment_ids"]
    token = (batch["completion_ids"] % 97).astype(jnp.float32) / 97.0
    error = (place * token + params["b"] - batch["advantages"] + 0.1 * batch["old_per_token_logps"]) * batch[MASK]
    return jnp.sum(jnp.square(error)), jnp.sum(batch[MASK]), {"absolute_error": jnp.sum(jnp.abs(error))}


def packed_logps(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A score per token, float32 ``[rows, tokens]``."""
    scores: jax.Array = params["w"][batch["segment_positions"]] + params["b"]
    return scores


def PackedToyEngine(tokens: int = 16, *, store: CheckpointStore | None = None, seed: int = 0) -> OptaxEngine:
    """``OptaxEngine`` with Adam over a linear model of packed micro-batches; all of them share compiled programs."""
    weights = jax.random.normal(jax.random.key(seed), (tokens,), jnp.float32)
    params = {"b": jnp.zeros((), jnp.float32), "w": weights}
    return OptaxEngine(packed_loss, params, _adam(), store=store, logps_fn=packed_logps)


@functools.lru_cache(maxsize=1)
def _adam() -> Any:
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingExtraError("PackedToyEngine needs optax; pip install 'shmstage[train]'") from error
    return optax.adam(1e-2)

"""Restores ``routed_experts`` from a slot's encoded form, inside the program that reads it; every shape is static.

    OptaxEngine decodes by itself; an engine of your own does ``batch = with_dense_routing(batch)`` where it traces, and
    says so by ``decodes_routing = True``.

The form is drawn in ``packing/routing.py``, whole or in tiles, which are told apart by their rank. Nothing here counts
bits or bytes of the whole: with 4.2 million tokens of 600 ids each such an index would not fit int32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shmstage.packing.fields import SEGMENT_IDS
from shmstage.packing.routing import DENSE, GROUP, NAMES, OFFSETS, PACKED, RAGGED, VALIDITY, encoding_of, is_encoded
from shmstage.trainer.jax_seam import barrier, constrained


def with_dense_routing(
    batch: Mapping[str, jax.Array], sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.Array]:
    """The batch as with ``routing_encoding = "dense"``: ``routed_experts`` int16 ``[rows, tokens, layers, top_k]``.

    It stands where its encoded fields stood; -1 is unset, padding too. A batch without encoded routing is returned as
    it is. ``sharding``: where the restored array lies.
    """
    if not is_encoded(batch):
        return dict(batch)
    dense = dense_routing(batch)
    if sharding is not None:
        dense = constrained(dense, sharding)
    # what follows is compiled as if the array had come with the batch: its bits do not depend on the encoding
    return in_place_of_encoded(batch, barrier(dense))


def dense_routing(batch: Mapping[str, jax.Array]) -> jax.Array:
    """int16 ``[rows, tokens, layers, top_k]`` of a batch that ``is_encoded``."""
    real, offsets = batch[SEGMENT_IDS] > 0, batch[OFFSETS]
    encoded = (batch[RAGGED],) if RAGGED in batch else (batch[PACKED], batch[VALIDITY])
    if offsets.ndim == 1:
        return _restored(offsets, real, *encoded)
    rows, tokens = real.shape
    down, across = offsets.shape[:2]
    # every tile by itself, along axes of its own: where each lies on its own device, none needs another
    tiled = real.reshape(down, rows // down, across, tokens // across).swapaxes(1, 2)
    dense = jax.vmap(jax.vmap(_restored))(offsets, tiled, *encoded)
    return dense.swapaxes(1, 2).reshape(rows, tokens, *dense.shape[4:])


def in_place_of_encoded(batch: Mapping[str, jax.Array], dense: jax.Array) -> dict[str, jax.Array]:
    """The batch with ``dense`` where its encoded fields stood."""
    first, *others = NAMES[encoding_of(batch) or "dense"]
    found = {}
    for name, array in batch.items():
        if name == first:
            found[DENSE] = dense
        elif name not in others:
            found[name] = array
    return found


def unpack(packed: jax.Array, validity: jax.Array) -> jax.Array:
    """uint8 ``[groups, layers, top_k, bits]`` and ``[groups, layers]`` → int16 ``[groups * 8, layers, top_k]``."""
    groups, layers, top_k, bits = packed.shape
    lanes = []
    for token in range(GROUP):
        first, shift = divmod(token * bits, 8)
        # an id of at most 15 bits lies in at most 3 bytes
        parts = [packed[..., first + n].astype(jnp.int32) << (8 * n) for n in range(-(-(shift + bits) // 8))]
        ids = functools.reduce(jnp.bitwise_or, parts) >> shift & ((1 << bits) - 1)
        is_set = (validity >> token & 1).astype(bool)
        lanes.append(jnp.where(is_set[..., None], ids, -1).astype(jnp.int16))
    return jnp.stack(lanes, axis=1).reshape(groups * GROUP, layers, top_k)


def _restored(offsets: jax.Array, real: jax.Array, *encoded: jax.Array) -> jax.Array:
    return _spread(encoded[0] if len(encoded) == 1 else unpack(*encoded), offsets, real)


def _spread(ragged: jax.Array, offsets: jax.Array, real: jax.Array) -> jax.Array:
    """``[capacity, layers, top_k]`` to the places of the real tokens, -1 elsewhere."""
    number = offsets[:-1, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    return jnp.where(real[..., None, None], jnp.take(ragged, number, axis=0, mode="clip"), jnp.int16(-1))


@functools.lru_cache(maxsize=64)
def decoding(function: Callable[..., Any], sharding: jax.sharding.Sharding | None = None) -> Callable[..., Any]:
    """``function(params, batch)`` with decoded batches; the same one for the same function: programs are kept by it."""

    @functools.wraps(function)
    def decoded(params: Any, batch: Mapping[str, jax.Array]) -> Any:
        return function(params, with_dense_routing(batch, sharding))

    return decoded

"""A decoder-only language model over packed rows, in plain JAX.

Rotary positions restart with each segment, and neither attention nor the look at the token before leaves a segment,
so a trajectory's outputs do not depend on what it is packed with. Tokens are bytes by default: any byte-tokenised text
can be trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shmstage.errors import SettingsError

Params = dict[str, Any]

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6
MASKED_SCORE = -1e30  # finite: softmax of a wholly masked line stays a number; exp() of it is exactly 0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; ``SettingsError`` for a combination that cannot be built."""

    vocabulary: int = 256
    d_model: int = 80
    layers: int = 3
    heads: int = 2
    d_ff: int = 256

    def __post_init__(self) -> None:
        for name in ("vocabulary", "d_model", "layers", "heads", "d_ff"):
            value = getattr(self, name)
            if value < 1:
                raise SettingsError(f"{name} = {value}: must be at least 1")
        if self.d_model % (2 * self.heads):
            raise SettingsError(
                f"d_model = {self.d_model} with heads = {self.heads}: rotary positions need d_model to be a "
                f"multiple of 2 x heads = {2 * self.heads}"
            )


def init(key: jax.Array, config: ModelConfig) -> Params:
    """Fresh float32 parameters; the embedding is also the output projection."""
    keys = iter(jax.random.split(key, 1 + 4 * config.layers))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        drawn: jax.Array = jax.random.normal(next(keys), (rows, columns), jnp.float32) * (scale * rows**-0.5)
        return drawn

    d, ff = config.d_model, config.d_ff
    # Residual branches start smaller the deeper the model, so that activations keep their size (GPT-2).
    branch = (2 * config.layers) ** -0.5
    params: Params = {
        "embedding": matrix(d, config.vocabulary).T,
        "final_norm": jnp.ones((d,), jnp.float32),
    }
    for layer in range(config.layers):
        params[f"layer_{layer}"] = {
            "attention_norm": jnp.ones((d,), jnp.float32),
            # How much of the token before is added to what attention sees. Copying from earlier text then takes
            # one layer instead of two, which a warm-up of a minute needs.
            "predecessor": jnp.full((d,), 0.5, jnp.float32),
            # [d_model, query | key | value, heads, head width]: the shape alone says how many heads there are.
            "qkv": matrix(d, 3 * d).reshape(d, 3, config.heads, d // config.heads),
            "attention_out": matrix(d, d, branch),
            "mlp_norm": jnp.ones((d,), jnp.float32),
            "mlp_in": matrix(d, ff),
            "mlp_out": matrix(ff, d, branch),
        }
    return params


def config_of(params: Params) -> ModelConfig:
    """The sizes that ``params`` were made with, read from their shapes."""
    vocabulary, d_model = params["embedding"].shape
    return ModelConfig(
        vocabulary=vocabulary,
        d_model=d_model,
        layers=sum(name.startswith("layer_") for name in params),
        heads=params["layer_0"]["qkv"].shape[2],
        d_ff=params["layer_0"]["mlp_in"].shape[1],
    )


def parameter_count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def logits(
    params: Params,
    completion_ids: jax.Array,
    segment_ids: jax.Array,
    segment_positions: jax.Array,
) -> jax.Array:
    """Next-token logits, ``[rows, tokens, vocabulary]`` float32, from three int32 ``[rows, tokens]`` arrays.

    Position t sees the tokens of its own segment up to and including t. Padding (segment 0) sees only itself and
    yields finite numbers without meaning. A token outside the vocabulary makes its row NaN instead of
    passing for another one.
    """
    mask, follows = _attention_mask(segment_ids), has_prediction(segment_ids)[..., None]
    sin, cos = _rotary_angles(segment_positions, params["layer_0"]["qkv"].shape[3])
    x = _embed(params["embedding"], completion_ids)
    for layer in range(sum(name.startswith("layer_") for name in params)):
        block = params[f"layer_{layer}"]
        seen = _rms_norm(x, block["attention_norm"])
        before = jnp.where(follows, jnp.roll(seen, 1, axis=1), 0.0)
        x = x + _attention(block, seen + before * block["predecessor"], mask, sin, cos)
        x = x + _mlp(block, _rms_norm(x, block["mlp_norm"]))
    scores: jax.Array = _rms_norm(x, params["final_norm"]) @ params["embedding"].T
    return scores


def token_logps(
    params: Params,
    completion_ids: jax.Array,
    segment_ids: jax.Array,
    segment_positions: jax.Array,
) -> jax.Array:
    """Log-probability of each token given its segment's earlier tokens, ``[rows, tokens]`` float32.

    Aligned with the tokens: the prediction for token t is made at t-1. Zero where nothing predicts: on a
    segment's first token and in padding.
    """
    scores = logits(params, completion_ids, segment_ids, segment_positions)[:, :-1]
    chosen = jnp.take_along_axis(scores, completion_ids[:, 1:, None], axis=-1, mode="clip")[..., 0]
    logps = chosen - jax.scipy.special.logsumexp(scores, axis=-1)
    return jnp.where(has_prediction(segment_ids), jnp.pad(logps, ((0, 0), (1, 0))), 0.0)


def per_token_logps(params: Params, batch: Mapping[str, jax.Array]) -> jax.Array:
    """``token_logps`` of a packed micro-batch, by its field names."""
    return token_logps(params, batch["completion_ids"], batch["segment_ids"], batch["segment_positions"])


def has_prediction(segment_ids: jax.Array) -> jax.Array:
    """Where the token before belongs to the same segment, bool ``[rows, tokens]``: what training may weigh."""
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(same, ((0, 0), (1, 0)))


def _embed(embedding: jax.Array, ids: jax.Array) -> jax.Array:
    vocabulary = embedding.shape[0]
    # take() wraps negative ids around; sent past the end they are filled with NaN like the rest.
    inside = jnp.where(ids < 0, vocabulary, ids)
    # Rows of the embedding have length 1, as output projection; as input each value should be about 1.
    taken: jax.Array = jnp.take(embedding, inside, axis=0, mode="fill", fill_value=jnp.nan)
    return taken * float(embedding.shape[1] ** 0.5)


def _attention_mask(segment_ids: jax.Array) -> jax.Array:
    """bool ``[rows, 1, tokens (query), tokens (key)]``."""
    tokens = segment_ids.shape[1]
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] != 0)
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    return ((same & causal) | jnp.eye(tokens, dtype=bool))[:, None]


def _rotary_angles(positions: jax.Array, head_width: int) -> tuple[jax.Array, jax.Array]:
    """sin and cos, each ``[rows, tokens, 1, head_width / 2]`` (Su et al., RoFormer, 2021)."""
    half = head_width // 2
    frequencies = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.sin(angles), jnp.cos(angles)


def _rotate(x: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(block: Params, x: jax.Array, mask: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
    query, key, value = jnp.moveaxis(jnp.einsum("rtd,dnhc->rtnhc", x, block["qkv"]), 2, 0)
    query, key = _rotate(query, sin, cos), _rotate(key, sin, cos)
    scores = jnp.einsum("rqhc,rkhc->rhqk", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED_SCORE), axis=-1)
    mixed = jnp.einsum("rhqk,rkhc->rqhc", weights, value)
    out: jax.Array = mixed.reshape(x.shape) @ block["attention_out"]
    return out


def _mlp(block: Params, x: jax.Array) -> jax.Array:
    out: jax.Array = jax.nn.gelu(x @ block["mlp_in"]) @ block["mlp_out"]
    return out


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON) * scale

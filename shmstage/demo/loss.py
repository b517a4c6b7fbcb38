"""Clipped policy-gradient loss over a packed micro-batch, as sums: the division happens once, at the update.

Every mean taken here would weigh a token by how full its micro-batch happens to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shmstage.demo.model import Params, has_prediction, per_token_logps
from shmstage.errors import SettingsError

MAX_LOG_RATIO = 20.0
ROUTING_MODULUS = 1021


@dataclass(frozen=True)
class LossConfig:
    """``clip_low`` and ``clip_high`` bound the probability ratio to ``[1 - clip_low, 1 + clip_high]``.

    ``kl_coefficient`` weighs the divergence from the reference policy; it acts only on micro-batches that carry
    ``ref_per_token_logps``. ``routing_weight`` > 0 weighs each token by its experts (``routing_factor``).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    routing_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low < 1.0:
            raise SettingsError(f"clip_low = {self.clip_low}: must lie between 0 and 1")
        if not 0.0 < self.clip_high < math.inf:
            raise SettingsError(f"clip_high = {self.clip_high}: must be greater than 0")
        if not 0.0 <= self.kl_coefficient < math.inf:
            raise SettingsError(f"kl_coefficient = {self.kl_coefficient}: must not be negative")
        if not 0.0 <= self.routing_weight < math.inf:
            raise SettingsError(f"routing_weight = {self.routing_weight}: must not be negative")


def loss_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """float32 ``[rows, tokens]``: the completion mask, zero where no token of the same segment comes before."""
    return jnp.where(has_prediction(batch["segment_ids"]), batch["completion_mask"].astype(jnp.float32), 0.0)


def clipped_policy_gradient(
    params: Params, batch: Mapping[str, jax.Array], config: LossConfig
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Summed loss, its denominator (sum of weights) and sums to report, all float32 scalars.

    Per token: ``-min(ratio A, clip(ratio) A)`` (Schulman et al., PPO, 2017, eq. 7), with
    ``ratio = exp(logp - old_logp)``, plus ``kl_coefficient`` times the k3 estimate
    ``exp(ref - logp) - (ref - logp) - 1`` of the divergence from the reference. ``sampler_is_weights``, where
    present, scales the policy term.
    """
    weights = loss_weights(batch)
    weighed = weights != 0
    logps = per_token_logps(params, batch)
    # Zeroed before exp(): an infinity there times weight 0 would be NaN, in the gradient too.
    log_ratio = _bounded(jnp.where(weighed, logps - batch["old_per_token_logps"], 0.0))
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    advantages = batch["advantages"]
    per_token = -jnp.minimum(ratio * advantages, clipped * advantages)
    if "sampler_is_weights" in batch:
        per_token = per_token * batch["sampler_is_weights"]
    if config.routing_weight:
        if "routed_experts" not in batch:
            raise SettingsError(
                f"routing_weight = {config.routing_weight}: the micro-batches carry no routing; give it by the table "
                "[source] (routing_layers, routing_top_k, routing_experts), or leave routing_weight out"
            )
        per_token = per_token * routing_factor(batch["routed_experts"], config.routing_weight)
    sums = {
        "ratio": jnp.sum(ratio * weights),
        "clipped_tokens": jnp.sum(jnp.where(clipped * advantages < ratio * advantages, weights, 0.0)),
        "old_policy_kl": jnp.sum((ratio - 1.0 - log_ratio) * weights),
    }
    if config.kl_coefficient and "ref_per_token_logps" in batch:
        away = _bounded(jnp.where(weighed, batch["ref_per_token_logps"] - logps, 0.0))
        divergence = jnp.exp(away) - away - 1.0
        per_token = per_token + config.kl_coefficient * divergence
        sums["reference_kl"] = jnp.sum(divergence * weights)
    return jnp.sum(jnp.where(weighed, per_token * weights, 0.0)), jnp.sum(weights), sums


def routing_factor(routed_experts: jax.Array, weight: float) -> jax.Array:
    """float32 ``[rows, tokens]`` from 1 to 1 + ``weight``: a checksum of each token's expert ids, by layer and place.

    It stands for the router of a mixture of experts: an id that is lost, altered or moved alters the gradient. int16
    ``routed_experts[rows, tokens, layers, top_k]``, -1 where unset.
    """
    _, _, layers, top_k = routed_experts.shape
    place = 1 + jnp.arange(layers * top_k, dtype=jnp.int32).reshape(layers, top_k)
    # integers: a sum of them is the same in any order
    checksum = jnp.sum((routed_experts.astype(jnp.int32) + 1) * place, axis=(2, 3)) % ROUTING_MODULUS
    return 1.0 + weight * checksum.astype(jnp.float32) / ROUTING_MODULUS


def _bounded(log_ratio: jax.Array) -> jax.Array:
    """Far off-policy tokens: exp() must not overflow, or the gradient that the clip zeroes is 0 x infinity."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)

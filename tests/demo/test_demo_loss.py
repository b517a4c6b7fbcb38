"""Sums that do not depend on how trajectories are packed (P8, P9)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_by_hand import Segment, compiled_logps, pack, segment, step, tiny_params

from shmstage.demo.loss import LossConfig, clipped_policy_gradient, loss_weights, routing_factor
from shmstage.errors import SettingsError

# Whichever runs first compiles for all.
pytestmark = pytest.mark.slow

CONFIG = LossConfig(kl_coefficient=0.1)
FIVE = [segment(1, 9), segment(2, 4), segment(3, 12), segment(4, 7), segment(5, 2, prompt=0)]
A, B, C, D, E = ([one] for one in FIVE)


def test_the_last_token_never_trains_on_the_next_segments_first() -> None:
    """P8"""
    batch = pack([segment(1, 5, prompt=0), segment(2, 4, prompt=0)])
    weights = np.asarray(loss_weights(batch))
    np.testing.assert_array_equal(weights[0, :9], [0, 1, 1, 1, 1, 0, 1, 1, 1])
    assert not weights[0, 9:].any()
    batch["completion_mask"][:] = 0
    batch["completion_mask"][0, 5] = 1  # only the second segment's first token
    loss, sums, gradients = step(batch, CONFIG)
    assert loss == 0 and sums["denominator"] == 0
    assert not any(leaf.any() for leaf in gradients)


def test_segment_ids_are_not_weights() -> None:
    """P8: Segment 3 counts as much as segment 1, and the mask alone says which tokens train."""
    batch = pack([segment(1, 4), segment(1, 4), segment(1, 4)])
    assert np.asarray(loss_weights(batch)).sum() == 3 * 2
    batch["completion_mask"][0, 10] = 0  # a hole, as a tool's turn leaves it
    assert np.asarray(loss_weights(batch)).sum() == 3 * 2 - 1


PACKINGS = {
    "unpacked": [pack(A, tokens=9), pack(B), pack(C), pack(D), pack(E)],
    "one row": [pack(A + B + C + D + E, tokens=40)],
    "one row, another order": [pack(E + D + C + B + A, tokens=40)],
    "two rows": [pack(A + B + D, C + E)],
    "with a padding row": [pack(C + A, []), pack(D + B + E, [])],
    "with gaps and two micro-batches": [pack(E + A, D, gap=3), pack(B + C, gap=5)],
}


def add_up(batches: Sequence[dict[str, np.ndarray]]) -> tuple[float, dict[str, float], list[np.ndarray]]:
    """Over micro-batches, as the engine does."""
    parts = [step(batch, CONFIG) for batch in batches]
    sums = {name: sum(part[1][name] for part in parts) for name in parts[0][1]}
    gradients = [np.sum(leaves, axis=0) for leaves in zip(*(part[2] for part in parts), strict=True)]
    return sum(part[0] for part in parts), sums, gradients


@pytest.mark.parametrize("name", [name for name in PACKINGS if name != "unpacked"])
def test_sums_and_gradients_are_the_same_however_packed(name: str) -> None:
    """P9"""
    want_loss, want_sums, want_gradients = add_up(PACKINGS["unpacked"])
    loss, sums, gradients = add_up(PACKINGS[name])
    assert sums["denominator"] == want_sums["denominator"] == 7 + 2 + 10 + 5 + 1
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert sums == pytest.approx(want_sums, rel=1e-5)
    for want, got in zip(want_gradients, gradients, strict=True):
        # Sums that cancel are as exact as their largest terms, not as themselves.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def by_hand(one: Segment, config: LossConfig) -> float:
    """The same loss in numpy, token by token."""
    batch = pack([one])
    names = ("completion_ids", "segment_ids", "segment_positions")
    logps = np.asarray(compiled_logps(tiny_params(), {name: batch[name] for name in names}))[0]
    total = 0.0
    for t in range(1, len(one["completion_ids"])):
        ratio = np.exp(logps[t] - one["old_per_token_logps"][t])
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        advantage = one["advantages"][t]
        away = one["ref_per_token_logps"][t] - logps[t]
        kl = np.exp(away) - away - 1
        policy = -min(ratio * advantage, bounded * advantage)
        total += one["completion_mask"][t] * (policy + config.kl_coefficient * kl)
    return float(total)


def test_the_loss_is_the_one_of_the_formula() -> None:
    for config in (CONFIG, LossConfig(clip_low=0.1, clip_high=0.3)):
        loss, sums, _ = step(pack(C), config)
        assert loss == pytest.approx(by_hand(FIVE[2], config), rel=1e-4)
        assert sums["denominator"] == 10
        assert ("reference_kl" in sums) == (config.kl_coefficient > 0)


def test_a_token_past_the_clip_gives_no_gradient() -> None:
    far = np.full(6, -200, np.float32)  # the ratio itself would overflow
    one = {**segment(3, 6), "advantages": np.ones(6, np.float32), "old_per_token_logps": far}
    # The divergence from the reference has a gradient of its own; at equal log-probs it is 0.
    logps = np.asarray(compiled_logps(tiny_params(), pack([one])))[0, :6]
    _, sums, gradients = step(pack([{**one, "ref_per_token_logps": logps}]), CONFIG)
    assert sums["clipped_tokens"] == 4
    assert max(np.abs(leaf).max() for leaf in gradients) < 1e-4


def test_nothing_that_is_masked_can_make_the_loss_nan() -> None:
    one = segment(3, 6, prompt=3)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        one[name] = np.where(one["completion_mask"] == 0, np.float32(-np.inf), one[name])
    loss, sums, gradients = step(pack([one]), CONFIG)
    assert np.isfinite(loss) and sums["denominator"] == 3
    assert all(np.isfinite(leaf).all() for leaf in gradients)


def test_sampler_weights_scale_the_policy_term_and_not_the_denominator() -> None:
    config = LossConfig(clip_low=0.1, clip_high=0.3)
    plain, sums, _ = step(pack(C), config)
    batch = pack(C)
    half, same, _ = step({**batch, "sampler_is_weights": np.full_like(batch["advantages"], 0.5)}, config)
    assert half == pytest.approx(0.5 * plain, rel=1e-6)
    assert same["denominator"] == sums["denominator"]


def test_every_expert_id_counts_where_routing_has_a_weight() -> None:
    """A demo that a lost, altered or moved id could not change would prove nothing about an encoding."""
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(8), (2, 4, 3, 1)), axis=-1)[..., :2].astype(np.int16)
    ids[0, 1, 2] = -1
    factor = np.asarray(routing_factor(jnp.array(ids), 0.5))
    assert factor.shape == (2, 4) and (factor >= 1).all() and (factor < 1.5).all()
    for place in np.ndindex(ids.shape):
        other = ids.copy()
        other[place] += 1
        changed = np.asarray(routing_factor(jnp.array(other), 0.5)) != factor
        assert changed[place[:2]] and changed.sum() == 1
    swapped = np.asarray(routing_factor(jnp.array(ids[..., ::-1]), 0.5))
    assert (swapped != factor).any()


def test_a_weight_on_routing_that_is_not_there_is_refused() -> None:
    config = LossConfig(routing_weight=0.5)
    with pytest.raises(SettingsError, match=r"routing_weight = 0.5: the micro-batches carry no routing; give it by"):
        jax.eval_shape(lambda p, b: clipped_policy_gradient(p, b, config), tiny_params(), pack(A))
    with pytest.raises(SettingsError, match="routing_weight = -1.0: must not be negative"):
        LossConfig(routing_weight=-1.0)


def test_loss_outputs_are_float32_scalars() -> None:
    outputs = jax.eval_shape(lambda p, b: clipped_policy_gradient(p, b, CONFIG), tiny_params(), pack(A))
    for leaf in jax.tree.leaves(outputs):
        assert leaf.shape == () and leaf.dtype == jnp.float32


@pytest.mark.parametrize("wrong", [{"clip_low": 1.0}, {"clip_high": 0.0}, {"kl_coefficient": -0.1}])
def test_a_bound_that_makes_no_sense_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        LossConfig(**wrong)

"""The model sees one segment at a time, whatever it is packed with (P7)."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from packed_by_hand import CONFIG, compiled_logits, compiled_logps, pack, segment, tiny_params

from shmstage.demo.model import (
    ModelConfig,
    config_of,
    init,
    parameter_count,
)
from shmstage.errors import SettingsError

# Whichever runs first compiles for all.
pytestmark = pytest.mark.slow


def outputs(batch: dict[str, np.ndarray]) -> np.ndarray:
    arrays = batch["completion_ids"], batch["segment_ids"], batch["segment_positions"]
    return np.asarray(compiled_logits(tiny_params(), *arrays))


def logps(batch: dict[str, np.ndarray]) -> np.ndarray:
    names = ("completion_ids", "segment_ids", "segment_positions")
    return np.asarray(compiled_logps(tiny_params(), {name: batch[name] for name in names}))


def test_changing_one_segment_leaves_the_others_outputs_bit_identical() -> None:
    """P7"""
    before = pack([segment(1, 9), segment(2, 7), segment(3, 6)])
    after = pack([segment(1, 9), segment(4, 7), segment(3, 6)])
    a, b = outputs(before), outputs(after)
    np.testing.assert_array_equal(a[0, :9], b[0, :9])
    np.testing.assert_array_equal(a[0, 16:22], b[0, 16:22])
    assert np.any(a[0, 9:16] != b[0, 9:16])


def test_a_later_token_leaves_earlier_outputs_bit_identical() -> None:
    batch = pack([segment(1, 9)])
    a = outputs(batch)
    batch["completion_ids"][0, 6] ^= 1
    b = outputs(batch)
    np.testing.assert_array_equal(a[0, :6], b[0, :6])
    assert np.any(a[0, 6:9] != b[0, 6:9])


def test_a_segment_scores_the_same_alone_and_packed_behind_another() -> None:
    """P7"""
    alone = logps(pack([segment(2, 7)]))
    packed = logps(pack([segment(1, 9), segment(2, 7)]))
    np.testing.assert_allclose(packed[0, 9:16], alone[0, :7], atol=1e-5)


def test_positions_count_by_their_differences_alone() -> None:
    batch = pack([segment(1, 9)])
    a = outputs(batch)[0, :9]
    batch["segment_positions"] += 50
    np.testing.assert_allclose(outputs(batch)[0, :9], a, atol=1e-4)
    batch["segment_positions"] *= 2
    assert np.abs(outputs(batch)[0, :9] - a).max() > 1e-2


def test_logps_are_aligned_with_the_token_they_score() -> None:
    batch = pack([segment(1, 5), segment(2, 4)])
    scores = outputs(batch)[0].astype(np.float64)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    found = logps(batch)[0]
    for t in (1, 2, 3, 4, 6, 7, 8):
        assert found[t] == pytest.approx(scores[t - 1, batch["completion_ids"][0, t]], abs=1e-5)
    assert not found[[0, 5, *range(9, 24)]].any(), "first tokens and padding score 0"


def test_padding_is_finite_and_reads_nothing() -> None:
    first, second = pack([segment(1, 5)]), pack([segment(2, 5)])
    assert np.isfinite(outputs(first)).all()
    np.testing.assert_array_equal(outputs(first)[0, 5:], outputs(second)[0, 5:])


@pytest.mark.parametrize("token", [-1, CONFIG.vocabulary])
def test_a_token_outside_the_vocabulary_is_nan_and_not_another_token(token: int) -> None:
    batch = pack([segment(1, 5)])
    batch["completion_ids"][0, 2] = token
    assert np.isnan(outputs(batch)[0, 4]).all()


def test_sizes_are_read_back_from_the_parameters() -> None:
    params = init(jax.random.key(0), CONFIG)
    assert config_of(params) == CONFIG
    assert parameter_count(params) == 32 * 16 + 16 + 2 * (16 * 48 + 16 * 16 + 2 * 16 * 32 + 3 * 16)


def test_a_width_that_rotary_positions_cannot_split_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"d_model = 20 with heads = 4.*multiple of 2 x heads = 8"):
        ModelConfig(d_model=20, heads=4)
    with pytest.raises(SettingsError, match="layers = 0"):
        ModelConfig(layers=0)

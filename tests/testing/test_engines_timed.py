from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from shmstage.errors import SettingsError
from shmstage.testing.engines_timed import (
    TimedEngine,
    digest_on_device,
    digest_on_host,
    make_engine,
    matmul_chain,
    square_matrix,
)

pytestmark = pytest.mark.slow

Arrays = Mapping[str, np.ndarray[Any, Any]]


def batch(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    return {
        "completion_ids": random.integers(0, 99, (2, 8), np.int32),
        "completion_mask": np.ones((2, 8), np.float32),
        "routed_experts": random.integers(-1, 16, (2, 8, 2, 2), np.int16),
    }


def trained(engine: TimedEngine, batches: list[dict[str, np.ndarray[Any, Any]]]) -> tuple[list[int], float]:
    """Parameters and denominator after one step."""
    for each in batches:
        engine.fwd_bwd(jax.device_put({name: np.array(value) for name, value in each.items()}))
    engine.update()
    return np.asarray(engine.weights()["w"]).tolist(), float(engine.metrics()["denominator"])


def engine() -> TimedEngine:
    return make_engine({"side": 8})


def test_device_and_host_agree_in_the_digest_of_every_dtype() -> None:
    arrays = list(batch(1).values())
    assert int(digest_on_device(arrays)) == digest_on_host(arrays)


def test_the_digest_notices_a_changed_a_moved_and_a_lost_word() -> None:
    words = np.arange(1, 9, dtype=np.uint32)
    other = [words + (np.arange(8, dtype=np.uint32) == 7), words[::-1], words[:-1]]
    assert digest_on_host([words]) not in [digest_on_host([each]) for each in other]
    assert digest_on_host([words, words[:4]]) != digest_on_host([words[:4], words])


def test_the_same_microbatches_in_the_same_order_train_the_same_and_no_others_do() -> None:
    wanted = trained(engine(), [batch(1), batch(2)])
    assert wanted == trained(engine(), [batch(1), batch(2)]) and wanted[1] == 32.0
    overwritten = {**batch(2), "routed_experts": np.full((2, 8, 2, 2), -1, np.int16)}
    others = ([batch(2), batch(1)], [batch(1)], [batch(1), batch(2), batch(2)], [batch(1), overwritten])
    for each in others:
        assert trained(engine(), list(each))[0] != wanted[0]


def test_it_is_calibrated_when_it_is_compiled() -> None:
    timed = TimedEngine(2e-3, 1e-4, 8)
    timed.compile({name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in batch(1).items()})
    assert timed._counts[0] > 1
    assert trained(timed, [batch(1)])[0] == trained(engine(), [batch(1)])[0]  # the zeros it compiled with left nothing


def test_the_chain_is_compiled_with_a_known_number_of_turns() -> None:
    """Else a GPU asks the host after each turn, and a forward call returns only when it is done."""
    matrix = square_matrix(8, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
    assert "known_trip_count" in matmul_chain.lower(matrix, 37).compile().as_text()


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(SettingsError, match="does not know microbatch; the timed engine has"):
        make_engine({"microbatch": 1})

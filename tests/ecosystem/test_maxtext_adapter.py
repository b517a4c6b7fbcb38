"""The adapter for MaxText, driven by hand against a double; ``test_maxtext_package.py`` has the package itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxtext_double import TOKENS, MaxTextDouble, Prepared, PreparingDouble

from shmstage.adapters.maxtext import MaxTextEngine, causal_lm_inputs
from shmstage.errors import CheckpointError, EngineError
from shmstage.memory.layout import Layout
from shmstage.packing.routing import DENSE
from shmstage.testing.engines_packed import PackedToyEngine
from shmstage.testing.numpy_packer import encode_routing
from shmstage.trainer.digests import param_digest
from shmstage.trainer.engine import optional_of

ROWS = 2
DTYPES = {
    "segment_ids": "int32",
    "segment_positions": "int32",
    "completion_ids": "int32",
    "completion_mask": "float32",
    "advantages": "float32",
    "old_per_token_logps": "float32",
}
LAYOUT = Layout.of({name: (dtype, (ROWS, TOKENS)) for name, dtype in DTYPES.items()})


def packed(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "segment_ids": np.repeat([[1] * 9 + [2] * 5 + [0] * 2], ROWS, axis=0),
        "segment_positions": np.repeat([[*range(9), *range(5), 0, 0]], ROWS, axis=0),
        "completion_ids": random.integers(0, 90, shape),
        "completion_mask": random.integers(0, 2, shape),
        "advantages": random.normal(size=shape),
        "old_per_token_logps": -random.random(shape),
    }
    return {name: array.astype(DTYPES[name]) for name, array in arrays.items()}


def placed(engine: Any, seed: int) -> dict[str, jax.Array]:
    shardings = engine.shardings(LAYOUT)
    return {name: jax.device_put(array, shardings[name]) for name, array in packed(seed).items()}


def steps(engine: Any, seeds: list[list[int]], batch_of: Any = placed) -> list[dict[str, float]]:
    """Trains; the metrics of each step."""
    told = []
    for microbatches in seeds:
        for seed in microbatches:
            engine.fwd_bwd(batch_of(engine, seed))
        engine.update()
        told.append({name: float(value) for name, value in engine.metrics().items()})
    return told


def uploaded(engine: MaxTextEngine, seed: int) -> Mapping[str, jax.Array]:
    return engine.put(packed(seed), engine.shardings(LAYOUT))


@pytest.mark.slow
def test_it_trains_what_our_own_engine_trains() -> None:
    double = MaxTextDouble()
    own, adapter = PackedToyEngine(TOKENS), MaxTextEngine(double)
    ours, theirs = steps(own, [[1, 2], [3]]), steps(adapter, [[1, 2], [3]])
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "denominator"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name
    for name, array in own.weights().items():
        np.testing.assert_allclose(adapter.weights()[name], array, rtol=1e-5)


def test_without_prepare_fwd_bwd_input_the_engine_gets_the_placed_arrays_themselves() -> None:
    double = MaxTextDouble()
    adapter = MaxTextEngine(double)
    assert not hasattr(adapter, "put")
    batch = placed(adapter, 1)
    adapter.fwd_bwd(batch)
    assert double.payloads[0].keys() == batch.keys()
    assert all(double.payloads[0][name] is batch[name] for name in batch)
    for name, wanted in packed(1).items():
        assert np.asarray(double.payloads[0][name]).tobytes() == wanted.tobytes(), name


def test_prepare_fwd_bwd_input_is_called_at_the_upload_with_arrays_under_way() -> None:
    double = PreparingDouble()
    adapter = MaxTextEngine(double)
    adapter.compile({}, uses=("train",))
    batch = uploaded(adapter, 1)
    assert double.calls == ["compile", "prepare_fwd_bwd_input"]
    adapter.fwd_bwd(batch)
    assert double.calls == ["compile", "prepare_fwd_bwd_input", "fwd_bwd"]
    (payload,) = double.payloads
    assert isinstance(payload, Prepared)
    for name, wanted in packed(1).items():
        assert payload.payload[name] is batch[name], name
        assert np.asarray(batch[name]).tobytes() == wanted.tobytes(), name


@pytest.mark.slow
def test_prepared_or_not_the_same_is_trained() -> None:
    plain, preparing = MaxTextEngine(MaxTextDouble()), MaxTextEngine(PreparingDouble())
    assert steps(plain, [[1, 2], [3]]) == steps(preparing, [[1, 2], [3]], uploaded)
    assert param_digest(plain) == param_digest(preparing)


def test_what_was_prepared_of_a_dropped_or_patched_upload_is_not_trained() -> None:
    double = PreparingDouble()
    adapter = MaxTextEngine(double)
    uploaded(adapter, 1)  # a stage that is sent again
    batch = dict(uploaded(adapter, 2))
    batch["completion_mask"] = jnp.ones((ROWS, TOKENS), jnp.float32)
    adapter.fwd_bwd(batch)
    assert double.payloads[0].payload["completion_mask"] is batch["completion_mask"]
    third = uploaded(adapter, 3)
    adapter.fwd_bwd(third)
    assert double.payloads[1].payload["completion_ids"] is third["completion_ids"]
    assert double.calls.count("prepare_fwd_bwd_input") == 4  # three uploads, and the patched one again


def test_nothing_of_a_micro_batch_stays_with_the_adapter_once_it_is_dispatched() -> None:
    adapter = MaxTextEngine(PreparingDouble())
    adapter.fwd_bwd(uploaded(adapter, 1))
    assert not adapter._prepared


def test_tokens_are_fresh_outputs_of_the_call() -> None:
    adapter = MaxTextEngine(MaxTextDouble())
    tokens = [adapter.fwd_bwd(placed(adapter, 1)), adapter.fwd_bwd(placed(adapter, 2)), adapter.update()]
    assert all(isinstance(token, jax.Array) for token in tokens)
    assert len({id(token) for token in tokens}) == 3
    assert tokens[1].shape == (2,)


def test_without_a_metric_to_wait_on_wait_for_device_is_called_and_there_is_no_token() -> None:
    double = PreparingDouble(notes=False)
    adapter = MaxTextEngine(double)
    assert adapter.fwd_bwd(placed(adapter, 1)) is None
    assert double.calls[-1] == "wait_for_device"


def test_an_engine_that_does_not_say_when_a_call_is_over_is_refused() -> None:
    adapter = MaxTextEngine(MaxTextDouble(notes=False))
    with pytest.raises(EngineError, match=r"fwd_bwd.*no wait_for_device.*metrics \[\] but none of loss"):
        adapter.fwd_bwd(placed(adapter, 1))


def test_a_step_whose_loss_is_no_weighted_metric_is_refused() -> None:
    double = PreparingDouble(notes=False)
    adapter = MaxTextEngine(double)
    adapter.fwd_bwd(placed(adapter, 1))
    with pytest.raises(EngineError, match="WeightedMetric"):
        adapter.update()


def test_metrics_are_sums_over_sums_and_means() -> None:
    double = MaxTextDouble()
    adapter = MaxTextEngine(double)
    for seed in (1, 2):
        adapter.fwd_bwd(placed(adapter, seed))
    noted = double.buffer
    noted.scalar_metrics["overflow"] = jnp.array([True, False])
    sums, denominators = (np.asarray(x) for x in (noted.weighted_metrics["loss"].__dict__.values()))
    adapter.update()
    told = adapter.metrics()
    assert float(told["loss"]) == pytest.approx(sums.sum() / denominators.sum(), rel=1e-6)
    assert float(told["denominator"]) == denominators.sum()
    assert float(told["overflow"]) == 0.5
    assert "gradient_norm" not in told
    assert float(told["grad_norm"]) > 0
    assert double.get_metrics().id == -1  # cleared: the next step begins anew


def test_an_update_without_a_micro_batch_is_refused() -> None:
    with pytest.raises(EngineError, match="no micro-batch"):
        MaxTextEngine(MaxTextDouble()).update()


def test_the_engine_is_compiled_before_its_first_micro_batch_even_if_nobody_asks() -> None:
    double = MaxTextDouble()
    adapter = MaxTextEngine(double)
    for seed in (1, 2):
        adapter.fwd_bwd(placed(adapter, seed))
    assert double.calls == ["compile", "fwd_bwd", "fwd_bwd"]


def test_routing_arrives_as_it_was_whatever_form_it_took_in_the_slot() -> None:
    double = MaxTextDouble()
    adapter = MaxTextEngine(double)
    arrays = packed(1)
    routing = np.random.default_rng(5).integers(0, 16, (ROWS, TOKENS, 2, 2)).astype(np.int16)
    routing[arrays["segment_ids"] == 0] = -1
    encoded = encode_routing({**arrays, DENSE: routing}, "ragged_packed", experts=16, max_real_tokens=32)
    assert DENSE not in encoded
    adapter.fwd_bwd({name: jnp.asarray(array) for name, array in encoded.items()})
    assert np.asarray(double.payloads[0][DENSE]).tobytes() == routing.tobytes()


def test_maxtexts_own_loss_counts_next_tokens_of_the_same_segment_that_are_in_the_mask() -> None:
    batch = {
        "completion_ids": jnp.array([[5, 6, 7, 8, 9, 0]]),
        "segment_ids": jnp.array([[1, 1, 1, 2, 2, 0]]),
        "segment_positions": jnp.array([[0, 1, 2, 0, 1, 0]]),
        "completion_mask": jnp.array([[0.0, 0.0, 1.0, 1.0, 1.0, 0.0]]),
    }
    found = {name: np.asarray(array).tolist() for name, array in causal_lm_inputs(batch).items()}
    assert found == {
        "inputs": [[5, 6, 7, 8, 9, 0]],
        "inputs_position": [[0, 1, 2, 0, 1, 0]],
        "inputs_segmentation": [[1, 1, 1, 2, 2, 0]],
        "targets": [[6, 7, 8, 9, 0, 5]],
        "targets_segmentation": [[0, 1, 0, 1, 0, 0]],
    }


def test_weights_of_an_engine_without_a_model_are_lent_until_they_may_change() -> None:
    double = MaxTextDouble()
    adapter = MaxTextEngine(double)
    assert list(adapter.weights()) == ["b", "w"]
    adapter.fwd_bwd(placed(adapter, 1))
    assert double.calls == ["prepare_weight_sync", "compile", "release_weight_sync", "fwd_bwd"]
    double.params = {"b": "no array"}
    with pytest.raises(EngineError, match="not arrays by name"):
        adapter.weights()


def test_scores_and_evaluations_run_through_fwd_only_and_are_there_only_if_asked_for() -> None:
    assert optional_of(MaxTextEngine(MaxTextDouble())) == ["decodes_routing"]
    double = MaxTextDouble()
    adapter = MaxTextEngine(
        double,
        payload=lambda batch: batch["segment_positions"],
        logps_fn=lambda params, positions: params["w"][positions],
        eval_fn=lambda params, positions: {"sum": positions.sum()},
    )
    assert optional_of(adapter) == ["decodes_routing", "eval_step", "per_token_logps"]
    batch = placed(adapter, 1)
    scores = adapter.per_token_logps(batch, "actor")
    assert scores.tolist() == double.params["w"][batch["segment_positions"]].tolist()
    assert int(adapter.eval_step(batch)["sum"]) == int(packed(1)["segment_positions"].sum())
    assert double.calls == ["fwd_only", "fwd_only"]
    with pytest.raises(EngineError, match=r"role is reference.*ref_logprobs"):
        adapter.per_token_logps(batch, "reference")


def test_an_object_without_the_methods_is_refused_and_the_missing_ones_are_named() -> None:
    with pytest.raises(EngineError, match=r"dict is no training engine.* compile, fwd_bwd, .*release_weight_sync"):
        MaxTextEngine({})  # type: ignore[arg-type]


# --- checkpoints --------------------------------------------------------------------------------------------


def save(adapter: MaxTextEngine, number: int, **metadata: object) -> Mapping[str, object]:
    snapshot = adapter.save(number, metadata)
    snapshot.copy_to_host()
    return snapshot.write()


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    adapter = MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path)
    steps(adapter, [[1, 2]])
    assert save(adapter, 1, note="n") == {"step": 1, "path": str(tmp_path / "1")}
    wanted = steps(adapter, [[3], [4, 5]])
    again = MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path)
    assert again.restore() == {"note": "n", "step": 1}
    assert steps(again, [[3], [4, 5]]) == wanted
    assert param_digest(again) == param_digest(adapter)


@pytest.mark.slow
def test_a_restore_inside_a_step_drops_what_was_accumulated(tmp_path: Path) -> None:
    adapter = MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path)
    save(adapter, 0)
    wanted = steps(adapter, [[1, 2]])
    adapter.fwd_bwd(placed(adapter, 9))
    assert adapter.restore() == {"step": 0}
    assert adapter.metrics() == {}
    assert steps(adapter, [[1, 2]]) == wanted


def test_half_a_step_without_a_checkpoint_cannot_be_dropped(tmp_path: Path) -> None:
    adapter = MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path)
    assert adapter.restore() is None
    adapter.fwd_bwd(placed(adapter, 1))
    with pytest.raises(CheckpointError, match="start the trainer again"):
        adapter.restore()


def test_a_checkpoint_that_maxtext_passes_over_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with pytest.raises(CheckpointError, match=rf"checkpoint 7 in {tmp_path} was not restored"):
        MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path).restore()


def test_a_checkpoint_taken_inside_a_step_is_refused(tmp_path: Path) -> None:
    double = MaxTextDouble(tmp_path)
    MaxTextEngine(double).fwd_bwd({name: jnp.asarray(array) for name, array in packed(1).items()})
    double.save_checkpoint({"step": 1})
    with pytest.raises(CheckpointError, match="inside a step, after 1 micro-batches"):
        MaxTextEngine(MaxTextDouble(tmp_path), checkpoint_dir=tmp_path).restore()


def test_a_checkpoint_that_was_not_written_is_no_success(tmp_path: Path) -> None:
    adapter = MaxTextEngine(MaxTextDouble(), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"wrote no checkpoint 0.*enable_checkpointing=True"):
        save(adapter, 0)
    with pytest.raises(CheckpointError, match="without checkpoint_dir"):
        MaxTextEngine(MaxTextDouble()).save(0, {})


def test_closing_writes_no_checkpoint_that_nobody_asked_for(tmp_path: Path) -> None:
    double = MaxTextDouble(tmp_path)
    adapter = MaxTextEngine(double, checkpoint_dir=tmp_path)
    save(adapter, 0)
    adapter.fwd_bwd(placed(adapter, 1))
    adapter.close()
    assert "close" not in double.calls
    adapter.update()
    save(adapter, 1)
    adapter.close()
    assert double.calls[-2:] == ["close", "save_checkpoint"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def test_a_snapshot_waits_for_the_device_before_maxtext_copies(tmp_path: Path) -> None:
    double = PreparingDouble(tmp_path)
    adapter = MaxTextEngine(double, checkpoint_dir=tmp_path)
    save(adapter, 0)
    assert double.calls == ["wait_for_device", "save_checkpoint"]
    assert not adapter.snapshots

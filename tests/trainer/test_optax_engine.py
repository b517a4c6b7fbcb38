from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from trainer.rig import microbatch

from shmstage.errors import CheckpointError, EngineError
from shmstage.memory.layout import Layout
from shmstage.testing.engines import MemoryStore, ToyEngine, toy_layout, toy_loss
from shmstage.trainer import checkpoints
from shmstage.trainer.checkpoints import OrbaxStore
from shmstage.trainer.digests import param_digest
from shmstage.trainer.host_copy import host_copy
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow

LAYOUT = toy_layout()


def batch(seed: int, rows: slice = slice(None)) -> dict[str, jax.Array]:
    return {name: jnp.array(value[rows]) for name, value in microbatch(LAYOUT, seed).items()}


def test_gradients_add_up_undivided_and_are_divided_once() -> None:
    """P9"""
    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}
    engine = OptaxEngine(toy_loss, params, optax.sgd(0.5))
    for rows in (slice(0, 1), slice(1, 4)):  # uneven micro-batches: a mean of means would be another number
        engine.fwd_bwd(batch(3, rows))
    engine.update()
    whole = batch(3)
    loss, count, _ = toy_loss(params, whole)
    grads = jax.grad(lambda p: toy_loss(p, whole)[0])(params)
    metrics = {name: float(value) for name, value in engine.metrics().items()}
    assert metrics["denominator"] == float(count) == 4.0
    np.testing.assert_allclose(metrics["loss"], float(loss) / 4, rtol=1e-6)
    np.testing.assert_allclose(engine.weights()["w"], params["w"] - 0.5 * grads["w"] / 4, rtol=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g) / 4)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_sums_start_again_after_an_update() -> None:
    engine = ToyEngine()
    for _ in range(2):
        engine.fwd_bwd(batch(1))
        engine.update()
        assert float(engine.metrics()["denominator"]) == 4.0


def test_a_step_without_counted_tokens_changes_no_loss_into_nan() -> None:
    engine = ToyEngine()
    empty = {**batch(1), "mask": jnp.zeros(4)}
    engine.fwd_bwd(empty)
    engine.update()
    assert all(np.isfinite(np.asarray(value)) for value in engine.metrics().values())


def test_the_callers_parameters_are_left_alone() -> None:
    params = {"b": np.zeros((), np.float32), "w": np.ones(32, np.float32)}
    engine = OptaxEngine(toy_loss, params, optax.sgd(0.5))
    engine.fwd_bwd(batch(1))
    engine.update()
    jax.block_until_ready(engine.weights())
    assert np.array_equal(params["w"], np.ones(32))


def test_state_and_sums_are_updated_in_place_although_a_snapshot_has_read_them() -> None:
    engine = ToyEngine(store=MemoryStore())
    engine.fwd_bwd(batch(1))
    engine.update()
    sums = engine._sums["grads"]["w"]
    engine.fwd_bwd(batch(1))
    assert sums.is_deleted()  # given away to the program, not copied by it
    engine.save(1, {}).copy_to_host()
    state = {"w": engine._params["w"], "mu": engine._opt_state[0].mu["w"]}
    before = {name: leaf.unsafe_buffer_pointer() for name, leaf in state.items()}
    engine.update()
    assert all(leaf.is_deleted() for leaf in state.values())
    after = {"w": engine._params["w"], "mu": engine._opt_state[0].mu["w"]}
    assert {name: leaf.unsafe_buffer_pointer() for name, leaf in after.items()} == before


def test_tokens_and_metrics_outlive_the_donation_of_everything_else() -> None:
    engine = ToyEngine()
    tokens = [engine.fwd_bwd(batch(1)), engine.update()]
    metrics = engine.metrics()
    for _ in range(3):
        engine.fwd_bwd(batch(2))
        engine.update()
    assert all(token.is_ready() or token.block_until_ready() is token for token in tokens)
    assert float(metrics["denominator"]) == 4.0


def compiled_by(act: Any) -> list[str]:
    """Names of the programs that are compiled while ``act`` runs."""
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("jax._src.interpreters.pxla.logger.log", lambda level, text, *a, **k: lines.append(text % a))
        act()
    return [name for name in ("forward", "update", "toy_loss", "width_24_logps") if any(name in line for line in lines)]


def test_compiling_first_leaves_nothing_to_compile_and_changes_nothing() -> None:
    """Programs of their own, 24 wide: what another test compiled must not be found again."""

    def width_24_logps(params: Any, batch: Any) -> jax.Array:
        return batch["x"] @ params["w"]

    layout = Layout.of({**{f.name: (f.dtype, f.shape) for f in LAYOUT.fields}, "x": ("float32", (4, 24))})
    engine = OptaxEngine(toy_loss, {"b": jnp.zeros(()), "w": jnp.ones(24)}, optax.sgd(0.5), logps_fn=width_24_logps)
    shardings = engine.shardings(layout)
    example = {
        f.name: jax.ShapeDtypeStruct(f.shape, np.dtype(f.dtype), sharding=shardings[f.name]) for f in layout.fields
    }
    digest = param_digest(engine)
    everything = compiled_by(lambda: engine.compile(example, uses=("train", "evaluate", "score")))
    assert everything == ["forward", "update", "toy_loss", "width_24_logps"]
    assert param_digest(engine) == digest
    data = {name: jax.device_put(value, shardings[name]) for name, value in microbatch(layout, 1).items()}

    def use() -> None:
        engine.eval_step(data)
        engine.per_token_logps(data, "actor")
        engine.per_token_logps(data, "reference")
        engine.fwd_bwd(data)
        engine.update()

    assert compiled_by(use) == []


def test_a_loss_that_is_not_a_sum_is_refused() -> None:
    def per_row(params: Any, batch: Any) -> Any:
        loss, count, metrics = toy_loss(params, batch)
        return loss * batch["mask"], count, metrics

    engine = OptaxEngine(per_row, {"b": jnp.zeros(()), "w": jnp.ones(32)}, optax.sgd(0.5))
    with pytest.raises(EngineError, match=r"loss_sum of shape \(4,\)"):
        engine.fwd_bwd(batch(1))


def test_bfloat16_parameters_accumulate_in_float32() -> None:
    params = {"b": jnp.zeros((), jnp.bfloat16), "w": jnp.ones(32, jnp.bfloat16)}
    engine = OptaxEngine(toy_loss, params, optax.sgd(0.5), store=MemoryStore())
    engine.fwd_bwd(batch(1))
    engine.update()
    assert engine._sums["grads"]["w"].dtype == jnp.float32
    assert engine.weights()["w"].dtype == jnp.bfloat16
    assert host_copy(engine.weights()["w"]).dtype == ml_dtypes.bfloat16
    assert len(param_digest(engine)) == 32


def test_on_a_mesh_batches_are_split_and_parameters_replicated() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    engine = OptaxEngine(
        toy_loss, {"b": jnp.zeros(()), "w": jnp.ones(32)}, optax.adam(1e-2), mesh, PartitionSpec("data", None)
    )
    shardings = engine.shardings(LAYOUT)
    assert shardings["x"] == NamedSharding(mesh, PartitionSpec("data", None))
    assert shardings["y"] == NamedSharding(mesh, PartitionSpec("data"))
    data = {name: jax.device_put(value, shardings[name]) for name, value in microbatch(LAYOUT, 1).items()}
    for _ in range(2):
        engine.fwd_bwd(data)
        engine.update()
    assert engine.weights()["w"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec()), 1)
    assert engine._programs.update._cache_size() == 1


# --- checkpoints --------------------------------------------------------------------------------------------


def trained(directory: Path, steps: int) -> OptaxEngine:
    engine = ToyEngine(checkpoint_dir=directory)
    for step in range(1, steps + 1):
        engine.fwd_bwd(batch(step))
        engine.update()
        snapshot = engine.save(step, {"cursor": step * 10})
        snapshot.copy_to_host()
        snapshot.write()
    return engine


def test_the_highest_complete_checkpoint_is_restored(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    engine = trained(directory, 2)
    (directory / "9").mkdir()  # no metadata: not ours, or not complete
    (directory / ".partial-3").mkdir()
    other = ToyEngine(checkpoint_dir=directory, seed=7)
    assert param_digest(other) != param_digest(engine)
    assert other.restore() == {"cursor": 20, "step": 2}
    assert param_digest(other) == param_digest(engine)
    for each in (engine, other):  # the optimizer's state came along
        each.fwd_bwd(batch(5))
        each.update()
    assert param_digest(other) == param_digest(engine)


def test_a_checkpoint_of_the_same_step_replaces_the_older_one(tmp_path: Path) -> None:
    engine = ToyEngine(checkpoint_dir=tmp_path)
    for note in ("first", "second"):
        snapshot = engine.save(0, {"note": note})
        snapshot.copy_to_host()
        snapshot.write()
    assert engine.restore() == {"note": "second", "step": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_snapshot_is_of_the_update_it_was_taken_after(tmp_path: Path) -> None:
    engine = ToyEngine(checkpoint_dir=tmp_path)
    digest = param_digest(engine)
    snapshot = engine.save(0, {})
    snapshot.copy_to_host()
    engine.fwd_bwd(batch(1))
    engine.update()
    snapshot.write()
    assert engine.restore() == {"step": 0}
    assert param_digest(engine) == digest


def test_without_a_checkpoint_parameters_stay_and_sums_go(tmp_path: Path) -> None:
    engine = ToyEngine(checkpoint_dir=tmp_path / "none")
    digest = param_digest(engine)
    engine.fwd_bwd(batch(1))
    assert engine.restore() is None
    engine.fwd_bwd(batch(1))
    engine.update()
    assert float(engine.metrics()["denominator"]) == 4.0
    assert param_digest(engine) != digest


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot be restored into this model"):
        ToyEngine(48, checkpoint_dir=tmp_path).restore()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    engine = trained(tmp_path, 1)
    for path in (tmp_path / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        engine.restore()


def test_metadata_that_is_not_plain_is_refused_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    engine = ToyEngine(checkpoint_dir=tmp_path)
    snapshot = engine.save(0, {"bad": object()})
    snapshot.copy_to_host()
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        snapshot.write()
    assert engine.restore() is None


def test_saving_without_a_directory_is_refused() -> None:
    with pytest.raises(CheckpointError, match="without checkpoint_dir"):
        ToyEngine().save(0, {})


def test_a_restore_goes_no_further_than_it_is_told_to() -> None:
    engine = ToyEngine(store=MemoryStore())
    digests = {}
    for step in (1, 2, 3):
        engine.fwd_bwd(batch(step))
        engine.update()
        digests[step] = param_digest(engine)
        snapshot = engine.save(step, {"cursor": step * 10})
        snapshot.copy_to_host()
        snapshot.write()
    assert engine.restore(at_most=7) == {"cursor": 30, "step": 3}
    assert engine.restore(at_most=1) == {"cursor": 10, "step": 1}
    assert param_digest(engine) == digests[1]
    with pytest.raises(CheckpointError, match="no checkpoint of step 0 or before is left"):
        engine.restore(at_most=0)


def test_checkpoints_that_a_restore_went_back_behind_are_taken_by_no_later_one(tmp_path: Path) -> None:
    engine = trained(tmp_path, 3)
    assert engine.restore(at_most=1) == {"cursor": 10, "step": 1}
    assert ToyEngine(checkpoint_dir=tmp_path).restore() == {"cursor": 10, "step": 1}
    # they go for good when their steps are saved again
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced-2", ".replaced-3", "1"]
    OrbaxStore(tmp_path).save(2, {"x": np.zeros(2)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced-3", "1", "2"]


def test_checkpoints_in_memory_that_a_restore_went_back_behind_are_gone_too() -> None:
    store = MemoryStore()
    engine = ToyEngine(store=store)
    for step in (1, 2, 3):
        snapshot = engine.save(step, {})
        snapshot.copy_to_host()
        snapshot.write()
    engine.restore(at_most=2)
    assert store.steps() == [1, 2]


def test_a_restore_that_fails_removes_no_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    with pytest.raises(CheckpointError):
        ToyEngine(48, checkpoint_dir=tmp_path).restore(at_most=1)
    assert OrbaxStore(tmp_path).steps() == [1, 2]


def test_later_checkpoints_are_renamed_durably_and_keep_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 3)
    seen: list[tuple[list[int], bool]] = []
    store = OrbaxStore(tmp_path)

    def flush(directory: Path) -> None:
        bytes_left = any(path.is_file() for path in (directory / ".replaced-3").rglob("*"))
        seen.append((OrbaxStore(directory).steps(), bytes_left))

    monkeypatch.setattr(checkpoints, "_flush_directory", flush)
    store.discard_above(1)
    assert seen == [([1], True)]
    store.discard_above(1)
    assert len(seen) == 1


def test_later_checkpoints_that_cannot_be_removed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained(tmp_path, 2)
    monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("read-only")))
    with pytest.raises(CheckpointError, match=r"checkpoints \[2\] .*were not removed: read-only; remove them"):
        engine.restore(at_most=1)


def test_a_store_that_cannot_discard_is_restored_all_the_same() -> None:
    class Keeping:
        def __init__(self) -> None:
            inner = MemoryStore()
            self.steps, self.save, self.load = inner.steps, inner.save, inner.load

    engine = ToyEngine(store=Keeping())
    for step in (1, 2):
        snapshot = engine.save(step, {})
        snapshot.copy_to_host()
        snapshot.write()
    assert engine.restore(at_most=1) == {"step": 1}

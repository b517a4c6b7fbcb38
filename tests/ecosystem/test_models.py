"""The files in examples/models: run by hand as they say, each trains for real and alike in every mode."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from command_line import run_json

from shmstage.memory.layout import Layout

MODELS = Path(__file__).parents[2] / "examples" / "models"
FACTORIES = {
    "plain_jax": "make_engine",
    "flax_nnx": "make_engine",
    "equinox_module": "make_engine",
    "fsdp_tensor": "make_engine",
    "train_engine": "BigramEngine",
}
SMALL = ("--tokens", "192", "--microbatches-per-step", "2")


def test_the_examples_are_these_and_each_is_of_at_most_80_lines() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in MODELS.glob("*.py")}
    assert set(lines) == set(FACTORIES)
    assert max(lines.values()) <= 80, lines


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_an_example_run_by_hand_trains_alike_in_every_mode(name: str, tmp_path: Path) -> None:
    verdict = run_json("--steps", "4", *SMALL, "--out", "out", cwd=tmp_path, script=MODELS / f"{name}.py")
    assert verdict["equal"], verdict["problems"]
    assert verdict["steps"] == 4
    losses = verdict["reference"]["losses"]
    # sums over byte tokens, divided once: without training about ln 256
    assert losses[0] == pytest.approx(math.log(256), rel=1e-6 if name == "train_engine" else 0.15)
    assert all(after < before for before, after in itertools.pairwise(losses)), losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp_tensor", "train_engine"])
def test_an_engine_of_ones_own_resumes_from_its_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain ``run`` and ``--engine``, over a mesh and without OptaxEngine."""
    monkeypatch.setenv("PYTHONPATH", str(MODELS), prepend=os.pathsep)
    given = (*SMALL, "--engine", f"{name}:{FACTORIES[name]}", "--boundary", "staged_before_update")
    run_json("run", *given, "--steps", "2", "--out", "stopped", cwd=tmp_path)
    resumed = run_json("run", "--resume", "stopped", "--steps", "4", cwd=tmp_path)
    whole = run_json("run", *given, "--steps", "4", "--out", "whole", cwd=tmp_path)
    assert resumed["losses"] == whole["losses"]
    assert resumed["param_digest"] == whole["param_digest"]


# --- the engine in numpy, by hand -------------------------------------------------------------------------------


def bigrams(directory: Path) -> Any:
    return loaded("train_engine").BigramEngine({"checkpoint_dir": str(directory)})


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 256, (2, 24)).astype(np.int32)
    segments = np.repeat([[1] * 10 + [2] * 8 + [0] * 6], 2, axis=0).astype(np.int32)
    advantages = np.where(segments == 1, 0.5, -0.5).astype(np.float32)
    found = {
        "completion_ids": ids,
        "segment_ids": segments,
        "completion_mask": (segments > 0).astype(np.float32),
        "advantages": advantages,
    }
    return {name: jax.numpy.array(value) for name, value in found.items()}


def reference_loss(logits: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    logps = jax.nn.log_softmax(logits)[arrays["completion_ids"][:, :-1], arrays["completion_ids"][:, 1:]]
    return -logps[:, :9].sum()  # the first segment, whose advantages are positive


@pytest.mark.slow
def test_the_gradient_made_by_hand_is_that_of_jax(tmp_path: Path) -> None:
    engine = bigrams(tmp_path)
    engine.logits = np.random.default_rng(5).normal(size=(256, 256)).astype(np.float32)
    before = engine.logits
    for seed in (1, 2):
        engine.fwd_bwd(batch(seed))
    engine.update()
    losses, grads = zip(*(jax.value_and_grad(reference_loss)(before, batch(seed)) for seed in (1, 2)), strict=True)
    assert float(engine.metrics()["denominator"]) == 2 * 2 * 9
    np.testing.assert_allclose(engine.metrics()["loss"], sum(losses) / 36, rtol=1e-5)
    np.testing.assert_allclose(engine.weights()["logits"], before - 10.0 * sum(grads) / 36, rtol=1e-4, atol=1e-6)


def test_its_checkpoints_are_whole_and_restored_no_further_than_told(tmp_path: Path) -> None:
    engine = bigrams(tmp_path / "checkpoints")
    assert engine.restore() is None
    kept = {}
    for step in (1, 2, 3):
        engine.fwd_bwd(batch(step))
        engine.update()
        metadata: dict[str, Any] = {}
        snapshot = engine.save(step, metadata)
        metadata["cursor"] = step * 10  # complete when it is copied, not before
        snapshot.copy_to_host()
        kept[step] = engine.logits.copy()
        engine.fwd_bwd(batch(9))
        engine.update()  # what is written is of the update it was taken after
        snapshot.write()
    other = bigrams(tmp_path / "checkpoints")
    assert other.restore(at_most=2) == {"cursor": 20, "step": 2}
    assert np.array_equal(other.logits, kept[2])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1.npz", "2.npz"]
    assert other.restore() == {"cursor": 20, "step": 2}
    assert not any(map(np.any, other.sums))


def test_it_asks_for_the_fields_where_jax_computes() -> None:
    layout = Layout.of({"completion_ids": ("int32", (2, 24))})
    assert set(bigrams(Path()).shardings(layout)) == {"completion_ids"}

"""``OptaxEngine`` gives the same bits whatever form routing comes in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from trainer.routed_by_seed import routed_arrays

from shmstage.memory.layout import Layout
from shmstage.testing.numpy_packer import encode_routing
from shmstage.trainer.digests import param_digest
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow

EXPERTS, LAYERS, TOP_K = 12, 3, 2


def batch(seed: int, encoding: str, tiles: tuple[int, int] | None = None) -> dict[str, jax.Array]:
    arrays = routed_arrays(seed, rows=4, tokens=16, layers=LAYERS, top_k=TOP_K, experts=EXPERTS)
    if encoding != "dense":
        arrays = encode_routing(arrays, encoding, experts=EXPERTS, tiles=tiles)
    return {name: jnp.array(array) for name, array in arrays.items()}


def scores(params: Any, batch: Any) -> jax.Array:
    """A table entry per expert, layer and place, added up: every id has a gradient of its own."""
    ids = batch["routed_experts"].astype(jnp.int32)
    taken = params["w"][jnp.arange(LAYERS)[:, None], jnp.arange(TOP_K), jnp.maximum(ids, 0)]
    return jnp.sum(jnp.where(ids >= 0, taken, 0.0), axis=(2, 3))


def loss(params: Any, batch: Any) -> Any:
    per_token = jnp.tanh(scores(params, batch)) * batch["advantages"] * batch["completion_mask"]
    return jnp.sum(per_token), jnp.sum(batch["completion_mask"]), {}


def overflowing(params: Any, batch: Any) -> Any:
    return *loss(params, batch), jnp.bool_(True)


def trained(encoding: str, **options: Any) -> tuple[OptaxEngine, str]:
    params = {"w": np.random.default_rng(0).standard_normal((LAYERS, TOP_K, EXPERTS)).astype(np.float32)}
    function = overflowing if "replay_loss_fn" in options else loss
    engine = OptaxEngine(function, params, optax.adam(1e-2), **options)
    for step in range(2):
        for index in range(2):
            engine.fwd_bwd(batch(10 * step + index, encoding))
        engine.update()
    return engine, param_digest(engine)


@pytest.mark.parametrize("options", [{}, {"replay_loss_fn": loss}], ids=["plain", "replay"])
def test_parameters_do_not_depend_on_the_encoding(options: dict[str, Any]) -> None:
    digests = {encoding: trained(encoding, **options)[1] for encoding in ("dense", "ragged", "ragged_packed")}
    assert len(set(digests.values())) == 1, digests
    assert digests["dense"] != param_digest(OptaxEngine(loss, {"w": np.zeros((LAYERS, TOP_K, EXPERTS))}, optax.sgd(1)))


def test_evaluation_and_scoring_see_dense_routing_too() -> None:
    engine, _ = trained("dense", logps_fn=scores)
    for encoding in ("ragged", "ragged_packed"):
        for name, value in engine.eval_step(batch(5, "dense")).items():
            assert float(value) == float(engine.eval_step(batch(5, encoding))[name])
        want = np.asarray(engine.per_token_logps(batch(5, "dense"), "actor"))
        np.testing.assert_array_equal(want, engine.per_token_logps(batch(5, encoding), "actor"))


def test_an_encoded_layout_compiles_before_its_first_batch() -> None:
    engine, _ = trained("ragged_packed", logps_fn=scores)
    example = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch(1, "ragged_packed").items()}
    engine.compile(example, uses=("train", "evaluate", "score"))


@pytest.mark.parametrize("encoding", ["ragged", "ragged_packed"])
def test_encoded_fields_are_replicated_over_a_mesh(encoding: str) -> None:
    mesh = jax.make_mesh((1,), ("data",))
    engine = OptaxEngine(loss, {"w": np.zeros((LAYERS, TOP_K, EXPERTS))}, optax.sgd(1), mesh, PartitionSpec("data"))
    layout = Layout.of({n: (str(a.dtype), a.shape) for n, a in batch(1, encoding).items()})
    for name, sharding in engine.shardings(layout).items():
        assert isinstance(sharding, NamedSharding)
        assert sharding.is_fully_replicated or not name.startswith("routed_experts_")
        want = PartitionSpec() if name.startswith("routed_experts_") else PartitionSpec("data")
        assert sharding.spec == want, name


def test_a_mesh_gives_the_bits_of_dense_too() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainer.routed_on_two_devices"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["devices"] == 2
    for spec in ("rows", "tokens"):
        assert found[spec]["ragged"] == found[spec]["dense"]
        assert found[spec]["ragged_packed"] == found[spec]["dense"]
        assert found[spec]["tiles"] == found[spec]["dense"]
        assert found[spec]["dense"][2] == 1, "compiled again"

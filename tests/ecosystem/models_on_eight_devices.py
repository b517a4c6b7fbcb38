"""Run by ``test_meshes.py``; the example sets the eight virtual CPU devices up. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "models"))
import fsdp_tensor
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shmstage.errors import EngineError
from shmstage.memory.layout import Layout
from shmstage.testing.engines import MemoryStore
from shmstage.trainer.digests import param_digest
from shmstage.trainer.optax_engine import OptaxEngine

ROWS, TOKENS = 4, 32


def arrays(seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    segments = np.repeat([[1] * 16 + [2] * 12 + [0] * 4], ROWS, axis=0).astype(np.int32)
    positions = np.repeat([[*range(16), *range(12), 0, 0, 0, 0]], ROWS, axis=0).astype(np.int32)
    return {
        "completion_ids": random.integers(0, 256, (ROWS, TOKENS)).astype(np.int32),
        "segment_ids": segments,
        "segment_positions": positions,
        "completion_mask": (segments > 0).astype(np.float32),
        "advantages": np.ones((ROWS, TOKENS), np.float32),
    }


def trained(engine: Any, steps: int) -> list[float]:
    layout = Layout.from_arrays(arrays(0))
    shardings = engine.shardings(layout)
    losses = []
    for step in range(steps):
        for index in range(2):
            engine.fwd_bwd(jax.device_put(arrays(2 * step + index), shardings))
        engine.update()
        losses.append(float(engine.metrics()["loss"]))
    return losses


def shares(tree: Any) -> dict[str, float]:
    """Of each array with more than one element, the largest part that lies on any one device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size > 1]
    return {str(leaf.shape): max(s.data.size for s in leaf.addressable_shards) / leaf.size for leaf in leaves}


def example(found: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        engine = fsdp_tensor.make_engine({"checkpoint_dir": directory})
        found["devices"] = len(jax.devices())
        fields = Layout.from_arrays(arrays(0))
        found["batch"] = sorted({str(sharding.spec) for sharding in engine.shardings(fields).values()})
        initial = jax.device_get(dict(engine.weights()))
        found["losses"] = trained(engine, 3)
        wanted = {str(shape): cut for shape, cut in fsdp_tensor.PARAMETERS.values()}
        found["shares"] = {name: shares(tree) for name, tree in state_of(engine).items()}
        found["wanted"] = {
            shape: 1 / np.prod([{"fsdp": 4, "tensor": 2}.get(axis, 1) for axis in cut]) for shape, cut in wanted.items()
        }
        snapshot = engine.save(3, {})
        snapshot.copy_to_host()
        snapshot.write()
        other = fsdp_tensor.make_engine({"checkpoint_dir": directory, "seed": 1})
        found["restored"] = [other.restore(), param_digest(other) == param_digest(engine)]
        found["goes_on"] = [trained(other, 1) == trained(engine, 1), param_digest(other) == param_digest(engine)]
        found["restored_shares"] = {name: shares(tree) for name, tree in state_of(other).items()}
        found["compiled"] = [
            [each._programs.forward._cache_size(), each._programs.update._cache_size()] for each in (engine, other)
        ]
        one = OptaxEngine(fsdp_tensor.loss_fn, initial, optax.adamw(3e-3))
        found["losses_on_one_device"] = trained(one, 3)


def state_of(engine: OptaxEngine) -> dict[str, Any]:
    moments = engine._opt_state[0]
    return {"params": engine._params, "mu": moments.mu, "nu": moments.nu, "sums": engine._sums["grads"]}


def explicit(found: dict[str, Any]) -> None:
    """``jax.make_mesh`` as one types it: its axes are Explicit."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def unclear(params: Any, batch: Any) -> Any:
        return params["w"][batch["x"]].sum(), jnp.float32(8), {}

    def clear(params: Any, batch: Any) -> Any:
        return params["w"].at[batch["x"]].get(out_sharding=rows).sum(), jnp.float32(8), {}

    batch = {"x": jax.device_put(np.arange(8, dtype=np.int32), rows)}
    for loss_fn in (unclear, clear):
        engine = OptaxEngine(loss_fn, {"w": jnp.ones(16)}, optax.adam(0.5), mesh, PartitionSpec("data"))
        try:
            engine.fwd_bwd(batch)
            engine.update()
            found[loss_fn.__name__] = np.asarray(engine.weights()["w"]).tolist()
        except EngineError as error:
            found[loss_fn.__name__] = str(error)


def optimizers(found: dict[str, Any]) -> None:
    """Where the state of other optimizers lies; the second is trained, saved and restored."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    cut = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    params = {"w": jax.device_put(np.full((160, 128), 0.1, np.float32), cut), "b": np.zeros(128, np.float32)}

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.square(batch["x"] @ params["w"] + params["b"] - 1.0).sum(), jnp.float32(4), {}

    rows, store = PartitionSpec("fsdp"), MemoryStore()
    found["adafactor"] = shares(OptaxEngine(loss_fn, params, optax.adafactor(0.1), mesh, rows)._opt_state)
    schedule_free = optax.contrib.schedule_free_sgd(0.1)  # begins with the parameters themselves as its state
    engine, other = (OptaxEngine(loss_fn, params, schedule_free, mesh, rows, store=store) for _ in range(2))
    batch = {"x": jax.device_put(np.ones((4, 160), np.float32), NamedSharding(mesh, rows))}
    engine.fwd_bwd(batch)
    engine.update()
    snapshot = engine.save(1, {})
    snapshot.copy_to_host()
    snapshot.write()
    other.restore()
    for each in (engine, other):
        each.fwd_bwd(batch)
        each.update()
    found["schedule_free"] = shares(engine._opt_state)
    found["schedule_free_restored"] = param_digest(engine) == param_digest(other)


if __name__ == "__main__":
    report: dict[str, Any] = {}
    example(report)
    explicit(report)
    optimizers(report)
    json.dump(report, sys.stdout)

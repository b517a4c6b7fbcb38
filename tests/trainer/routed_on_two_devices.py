"""Run by ``test_routed_engine.py`` with two virtual CPU devices; prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec
from trainer.test_routed_engine import EXPERTS, LAYERS, TOP_K, batch, loss

from shmstage.memory.layout import Layout
from shmstage.trainer.digests import decoded_digest, param_digest
from shmstage.trainer.optax_engine import OptaxEngine

MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
SPECS = {"rows": PartitionSpec("data"), "tokens": PartitionSpec(None, "data")}
TILES = {"rows": (2, 1), "tokens": (1, 2)}


def trained(encoding: str, spec: PartitionSpec, tiles: tuple[int, int] | None = None) -> list[Any]:
    params = {"w": np.random.default_rng(0).standard_normal((LAYERS, TOP_K, EXPERTS)).astype(np.float32)}
    engine = OptaxEngine(loss, params, optax.adam(1e-2), MESH, spec)
    digests = []
    for seed in range(3):
        arrays = batch(seed, encoding, tiles)
        layout = Layout.of({name: (str(array.dtype), array.shape) for name, array in arrays.items()})
        shardings = engine.shardings(layout)
        if tiles is not None:
            parts = shardings["routed_experts_packed"].shard_shape(arrays["routed_experts_packed"].shape)
            assert parts[:2] == (1, 1), "a device has more than its tile"
        placed = jax.device_put(arrays, dict(shardings))
        digests.append(decoded_digest(placed))
        engine.fwd_bwd(placed)
        engine.update()
    return [param_digest(engine), digests, engine._programs.forward._cache_size()]


def main() -> None:
    found = {
        name: {
            **{encoding: trained(encoding, spec) for encoding in ("dense", "ragged", "ragged_packed")},
            "tiles": trained("ragged_packed", spec, TILES[name]),
        }
        for name, spec in SPECS.items()
    }
    json.dump({"devices": len(jax.devices()), **found}, sys.stdout)


if __name__ == "__main__":
    main()

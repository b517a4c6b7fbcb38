"""Run by ``test_decode_tiles.py`` with four virtual CPU devices; prints one JSON object."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from trainer.routed_by_seed import routed_arrays

from shmstage.testing.numpy_packer import encode_routing
from shmstage.trainer.decode import with_dense_routing

COLLECTIVE = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast")


def restored(encoding: str) -> dict[str, Any]:
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "seq"))
    arrays = routed_arrays(3, rows=4, tokens=32, layers=3, top_k=2, experts=300)
    encoded = encode_routing(arrays, encoding, experts=300, tiles=(2, 2))
    placed = jax.device_put(encoded, sharding)

    def dense(batch: Any) -> Any:
        return with_dense_routing(batch, sharding)["routed_experts"]

    program = jax.jit(dense).lower(placed).compile()
    got = program(placed)
    return {
        "devices": len(got.sharding.device_set),
        "same": bool(np.array_equal(np.asarray(got), arrays["routed_experts"])),
        "collectives": sorted(set(COLLECTIVE.findall(program.as_text()))),
    }


if __name__ == "__main__":
    json.dump({encoding: restored(encoding) for encoding in ("ragged", "ragged_packed")}, sys.stdout)

"""Where the leaves lie on eight devices, however ``sharding`` says so; prints one JSON object. Run by a test."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shmstage import Consumer, DoubleBuffer, Producer

FIELDS = {"tokens": ("int32", (16, 8)), "logps": ("float32", (16, 8)), "scale": ("float32", ())}
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))


class Batch(NamedTuple):
    inputs: dict[str, Any]
    scale: Any


def nested(tokens: Any, logps: Any, scale: Any) -> Batch:
    return Batch({"tokens": tokens, "logps": logps}, scale)


def on(*axes: Any) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*axes))


def by_shape(batch: Batch) -> Any:
    assert isinstance(batch, Batch) and batch.inputs["tokens"].shape == (16, 8)
    return jax.tree.map(lambda leaf: on("fsdp") if leaf.ndim else on(), batch)


def replicated(batch: Batch) -> Sharding:
    return on()


WAYS: dict[str, Any] = {
    "one": on(),
    "prefix": Batch(on("fsdp", "tensor"), on()),  # one for the whole dict below it
    "leaves": Batch({"tokens": on("fsdp"), "logps": on(None, "tensor")}, on()),
    "device": jax.devices()[3],
    "none": Batch(on("fsdp"), None),
    "callable": by_shape,
    "callable for all": replicated,
}


def placed(way: str) -> dict[str, Any]:
    """Per leaf the parts that it is in and the devices that it is on, and whether the values are right."""
    with Producer("mesh", FIELDS) as producer, Consumer("mesh") as consumer:
        for step in range(3):
            with producer.acquire() as slot:
                for name, view in slot.views.items():
                    view[...] = np.arange(view.size).reshape(view.shape) + step
                    assert name in FIELDS
                slot.publish()
        producer._ended = True  # one thread: it cannot wait for the consumer below
        found: dict[str, Any] = {}
        with DoubleBuffer(consumer, WAYS[way], into=nested) as batches, jax.transfer_guard("disallow"):
            for step in range(3):
                batch = next(batches)
                leaves = {"tokens": batch.inputs["tokens"], "logps": batch.inputs["logps"], "scale": batch.scale}
                for name, leaf in leaves.items():
                    shards = leaf.addressable_shards
                    found[name] = [list(shards[0].data.shape), sorted(shard.device.id for shard in shards)]
                    want = np.arange(leaf.size).reshape(leaf.shape) + step
                    if not np.array_equal(jax.device_get(leaf), want):
                        found[name] = f"step {step} arrived altered"
                del batch, leaf, leaves, shards
        return found


if __name__ == "__main__":
    print(json.dumps({way: placed(way) for way in WAYS}))

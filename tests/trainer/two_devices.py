"""Run by ``test_two_devices.py`` with two virtual CPU devices; prints one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from trainer.rig import Rig, rigged
from trainer.test_poison import poison

from shmstage.testing.engines import MemoryStore, toy_loss
from shmstage.trainer.optax_engine import OptaxEngine

MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
SPECS: dict[str, Any] = {
    "rows": PartitionSpec("data"),  # contiguous shards: aliased
    "tokens": {"x": PartitionSpec(None, "data")},  # strided shards: copied, one by one
}


def engine(spec: Any) -> OptaxEngine:
    weights = jax.device_put(jnp.ones(32), NamedSharding(MESH, PartitionSpec("data")))
    params = {"b": jnp.zeros(()), "w": weights}
    return OptaxEngine(toy_loss, params, optax.adam(1e-2), MESH, spec, store=MemoryStore())


def serial(rig: Rig) -> list[Any]:
    return [rig.train_step(step) for step in (1, 2, 3)]


def staged(rig: Rig) -> list[Any]:
    """Staged before the update, every released slot and retired buffer overwritten."""
    tickets = []
    rig.call("fwd_bwd", handle=rig.publish(1, 0))
    for step in (1, 2, 3):
        for index in (1, 2):
            handle = rig.publish(step, index, final=index == 2)
            rig.call("stage_fwd_bwd", handle=handle)
            poison(rig)
            rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=index == 2)
        following = rig.publish(step + 1, 0)
        rig.call("stage_fwd_bwd", handle=following)
        poison(rig)
        rig.call("apply_deferred_update")
        tickets.append(rig.call("get_metrics", step=step))
        rig.call("save_checkpoint", step=step, metadata={})
        if step < 3:
            rig.call("fwd_bwd_staged", request_id=following.request_id)
    return [rig.ticket(ticket).value for ticket in tickets]


def main() -> None:
    found: dict[str, Any] = {"devices": len(jax.devices())}
    for name, spec in SPECS.items():
        for order in (serial, staged):
            with rigged(lambda spec=spec: engine(spec), payload_shift=4 if order is staged else 0) as rig:
                steps = order(rig)
                found[f"{name}.{order.__name__}"] = [steps, rig.digest()]
                found[f"{name}.{order.__name__}.compiled"] = [
                    rig.engine._programs.forward._cache_size(),
                    rig.engine._programs.update._cache_size(),
                ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

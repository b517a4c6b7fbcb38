"""Run by ``test_ranges.py`` with eight virtual devices; prints one JSON object.

A process of several is one that sees some of the devices as its own: a sharding that says so stands for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shmstage.errors import LayoutError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import microbatch_layout
from shmstage.trainer.field_placement import FieldPlacement
from shmstage.trainer.optax_engine import OptaxEngine
from shmstage.trainer.placement import Placement
from shmstage.trainer.ranges import ranges_of

DEVICES = np.array(jax.devices())
TOY = Layout.of({"completion_ids": ("int32", (8, 32)), "row": ("float32", (8,)), "scale": ("float32", ())})
SPEC = PartitionSpec("data", "seq")


class Seen(NamedSharding):
    """As a process sees it that has the devices from ``first`` to ``last`` of all."""

    own: tuple[int, int] = (0, 8)

    def addressable_devices_indices_map(self, shape: Any) -> Any:
        own = set(DEVICES[slice(*self.own)])
        return {device: index for device, index in self.devices_indices_map(shape).items() if device in own}


def seen(mesh: Any, spec: PartitionSpec, own: tuple[int, int]) -> Seen:
    sharding = Seen(mesh, spec)
    sharding.own = own
    return sharding


def mesh_of(devices: Any) -> Any:
    return jax.sharding.Mesh(devices, ("data", "seq"), axis_types=(AxisType.Auto,) * 2)


def told(layout: Layout, devices: Any, hosts: int, spec: PartitionSpec = SPEC) -> Any:
    """``ranges`` of every host, which has as many devices as the others, in order."""
    found, each, mesh = [], 8 // hosts, mesh_of(devices)
    for host in range(hosts):
        own = (host * each, host * each + each)
        shardings = {f.name: seen(mesh, PartitionSpec(*tuple(spec)[: len(f.shape)]), own) for f in layout.fields}
        found.append(ranges_of(layout, shardings).as_facts())
    return found


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "nothing"


def tiled() -> Any:
    """How the engine cuts routing, by field: with the two axes of tiles, then without."""
    mesh = mesh_of(DEVICES.reshape(4, 2))
    engine = OptaxEngine.__new__(OptaxEngine)
    engine._mesh, engine._placement, engine._spans_hosts = mesh, FieldPlacement(mesh, SPEC), False
    tiles = {
        "routed_experts_packed": ("uint8", (4, 2, 4, 3, 2, 5)),
        "routed_experts_validity": ("uint8", (4, 2, 4, 3)),
        "routed_experts_offsets": ("int32", (4, 2, 3)),
        "routed_experts_ragged": ("int16", (4, 2, 32, 3, 2)),
    }
    flat = {name: (dtype, shape[2:]) for name, (dtype, shape) in tiles.items()}
    by_name: dict[str, list[Any]] = {}
    for specs in (tiles, flat):
        layout = Layout.of(dict(specs))
        for name, sharding in engine.shardings(layout).items():
            by_name.setdefault(name, []).append([*tuple(sharding.spec)])
    return by_name


def main() -> None:
    rows = DEVICES.reshape(8, 1)
    grid = DEVICES.reshape(4, 2)
    diagonal = DEVICES[[0, 2, 3, 1, 4, 5, 6, 7]].reshape(4, 2)
    everything = Layout.of({"completion_ids": ("int32", (8, 32))})
    whole = ranges_of(everything, {"completion_ids": seen(mesh_of(grid), SPEC, (0, 2))})
    part = Layout.of({"completion_ids": ("int32", (2, 16))})
    half = {"completion_ids": seen(mesh_of(grid), SPEC, (0, 4))}
    found = {
        "rows.2": told(TOY, rows, 2),
        "grid.4": told(TOY, grid, 4),
        "tokens.2": told(TOY, DEVICES.reshape(2, 4).T, 2),
        "replicated.2": told(TOY, rows, 2, PartitionSpec()),
        "packed.2": told(microbatch_layout(8, 32), grid, 2)[1]["ranges"]["advantages"],
        "one.first": whole.as_facts(),
        "odd rows": refusal(lambda: told(Layout.of({"completion_ids": ("int32", (6, 32))}), grid, 2)),
        "odd tokens": refusal(lambda: told(Layout.of({"completion_ids": ("int32", (8, 31))}), grid, 2)),
        "diagonal": refusal(lambda: told(TOY, diagonal, 4)),
        "no device": refusal(lambda: ranges_of(everything, {"completion_ids": seen(mesh_of(grid), SPEC, (8, 8))})),
        "wrong part": refusal(lambda: Placement(part, everything, half)),
        "tiled": tiled(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

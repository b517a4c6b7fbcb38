"""Where one layout's fields go on the devices, and how a slot's arrays become device arrays.

On one host a slot holds whole micro-batches. On one of several it holds this host's ranges of them: the arrays still
have the shape of the whole, and every process gives the parts that lie on its own devices
(what ``jax.make_array_from_process_local_data`` means, for all fields in one ``device_put``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from shmstage.errors import LayoutError
from shmstage.memory.layout import Layout
from shmstage.trainer.jax_seam import struct
from shmstage.trainer.ranges import Rectangle, local_rectangle, rectangle_of, slices

Shardings = Mapping[str, jax.sharding.Sharding]
HostArrays = Mapping[str, np.ndarray[Any, Any]]


@final
class Placement:
    """``whole`` is the layout of whole micro-batches, ``local`` that of this host's slots."""

    def __init__(self, local: Layout, whole: Layout | None, shardings: Shardings) -> None:
        """Raises ``LayoutError`` if ``local`` does not hold just what this process's devices need of ``whole``."""
        self.local = local
        self.whole = whole or local
        self.shardings = shardings
        self._shapes = {f.name: f.shape for f in self.whole.fields}
        self._rectangles: dict[str, Rectangle] = {}
        self._parts: dict[str, list[tuple[SingleDeviceSharding, tuple[slice, ...]]]] = {}
        #: issues the upload of this host's part of any of the fields; ``None`` where a slot holds whole micro-batches
        self.spread: Callable[[HostArrays], dict[str, jax.Array]] | None = None
        if whole is not None:
            self._take_part(local, whole)
            self.spread = self._spread

    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What a micro-batch looks like to the compiler."""
        return {f.name: struct(f.shape, f.dtype, self.shardings[f.name]) for f in self.whole.fields}

    def rectangle(self, name: str) -> Rectangle | None:
        """This host's part of a field; ``None`` for all of it, and for a field that the layout has not."""
        return self._rectangles.get(name)

    def _take_part(self, local: Layout, whole: Layout) -> None:
        has = {f.name: (f.dtype, f.shape, f.late) for f in local.fields}
        wants = {}
        for f in whole.fields:
            sharding = self.shardings[f.name]
            box = self._rectangles[f.name] = local_rectangle(f.name, f.shape, sharding)
            wants[f.name] = (f.dtype, tuple(end - begin for begin, end in box), f.late)
            indices = sharding.addressable_devices_indices_map(f.shape)
            kind = sharding.memory_kind
            self._parts[f.name] = [
                (SingleDeviceSharding(device, memory_kind=kind), slices(rectangle_of(index, f.shape), box))
                for device, index in indices.items()
                if index is not None
            ]
        if list(has) != list(wants):
            raise LayoutError(f"a slot's fields are {list(has)}; those of the whole micro-batch {list(wants)}")
        for name, want in wants.items():
            if has[name] != want:
                raise LayoutError(
                    f"field {name!r}: a slot of this host has (dtype, shape, late) {has[name]}; of the whole "
                    f"micro-batch its devices hold {want}; ask for ``ranges`` again"
                )

    def _spread(self, views: HostArrays) -> dict[str, jax.Array]:
        placed = jax.device_put(
            [views[name][part] for name in views for _, part in self._parts[name]],
            [device for name in views for device, _ in self._parts[name]],
        )
        left = iter(placed)
        return {
            name: jax.make_array_from_single_device_arrays(
                self._shapes[name], self.shardings[name], [next(left) for _ in self._parts[name]]
            )
            for name in views
        }

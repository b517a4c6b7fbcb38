"""Which part of a micro-batch lies on this process's devices: one rectangle per field, told by the engine's shardings.

Pure: it asks shardings, never a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from shmstage.errors import LayoutError
from shmstage.memory.layout import Layout

#: every field that is told by rows and tokens is cut as this one is
LEADING = "completion_ids"

Shape = tuple[int, ...]
Rectangle = tuple[tuple[int, int], ...]
"""``(begin, end)`` per axis, the end excluded."""
Shardings = Mapping[str, jax.sharding.Sharding]


@dataclass(frozen=True, slots=True)
class Ranges:
    """``local``: per field what this process holds. ``tiles``: distinct parts along rows and along tokens, anywhere."""

    local: dict[str, Rectangle]
    tiles: tuple[int, int]

    def as_facts(self) -> dict[str, object]:
        """As the command ``ranges`` answers."""
        return {
            "ranges": {name: [list(pair) for pair in rectangle] for name, rectangle in self.local.items()},
            "tiles": list(self.tiles),
        }


def ranges_of(layout: Layout, shardings: Shardings) -> Ranges:
    """This process's part of every field of a whole micro-batch.

    Raises ``LayoutError`` naming field, axis, size and devices for what does not divide evenly, and naming the field
    where this process's part is no rectangle.
    """
    local = {f.name: local_rectangle(f.name, f.shape, shardings[f.name]) for f in layout.fields}
    leading = next((f for f in layout.fields if f.name == LEADING), layout.fields[0])
    indices = shardings[leading.name].devices_indices_map(leading.shape).values()
    cells = {rectangle_of(index, leading.shape) for index in indices}
    rows, tokens = (len({cell[axis : axis + 1] for cell in cells}) for axis in (0, 1))
    return Ranges(local, (rows, tokens))


def local_rectangle(name: str, shape: Shape, sharding: jax.sharding.Sharding) -> Rectangle:
    """What this process's devices hold of one array. Raises as ``ranges_of``."""
    _check_divides(name, shape, sharding)
    try:
        indices = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise LayoutError(f"field {name!r} {list(shape)} cannot lie as the engine says: {_first_line(error)}") from None
    cells = {rectangle_of(index, shape) for index in indices.values() if index is not None}
    if not cells:
        raise LayoutError(
            f"field {name!r} lies on no device of process {jax.process_index()}; make the engine's mesh of devices of "
            "all processes"
        )
    if not shape:
        return ()
    box = bounding(cells)
    if sum(map(volume, cells)) != volume(box):
        raise LayoutError(
            f"field {name!r} {list(shape)}: the devices of process {jax.process_index()} hold {sorted(cells)}, which "
            "is no rectangle; order the engine's mesh so that the devices of one process lie together"
        )
    return box


def rectangle_of(index: Iterable[slice], shape: Shape) -> Rectangle:
    """An index of ``devices_indices_map`` or of a shard, in full."""
    return tuple((axis.indices(size)[0], axis.indices(size)[1]) for axis, size in zip(index, shape, strict=True))


def bounding(cells: Iterable[Rectangle]) -> Rectangle:
    """The smallest rectangle that holds them all."""
    axes = zip(*cells, strict=True)  # per axis its (begin, end) in each cell
    return tuple((min(begin for begin, _ in axis), max(end for _, end in axis)) for axis in axes)


def common(one: Rectangle, other: Rectangle) -> Rectangle:
    """What lies in both; an axis without anything has its end before or at its begin."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def volume(rectangle: Rectangle) -> int:
    """Elements in it; 1 for an array without axes."""
    return math.prod(max(0, end - begin) for begin, end in rectangle)


def slices(rectangle: Rectangle, origin: Rectangle) -> tuple[slice, ...]:
    """The rectangle as an index into an array that holds ``origin`` alone."""
    return tuple(slice(begin - first, end - first) for (begin, end), (first, _) in zip(rectangle, origin, strict=True))


def _check_divides(name: str, shape: Shape, sharding: jax.sharding.Sharding) -> None:
    if not isinstance(sharding, NamedSharding):
        return  # JAX says what it has against it
    for axis, entry in enumerate(tuple(sharding.spec)[: len(shape)]):
        over = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        parts = math.prod(sharding.mesh.shape[str(each)] for each in over)
        if shape[axis] % parts:
            raise LayoutError(
                f"field {name!r} {list(shape)}: axis {axis} of size {shape[axis]} does not divide over the {parts} "
                f"devices along {' x '.join(map(str, over))}; make it a multiple of {parts} (rows, tokens), or change "
                "the engine's batch_spec"
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

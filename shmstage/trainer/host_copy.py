"""Device arrays to bytes the host owns, without a device program and without disturbing donation.

``np.asarray(array)`` is a view on the CPU backend, cached in the array, and a held view silently disables that
buffer's donation (memory doubles). So every shard is copied out of its view and the view dropped at once.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shmstage import _native
from shmstage.errors import EngineError, PoolError
from shmstage.trainer.ranges import Rectangle, bounding, common, rectangle_of, slices, volume

HostArray = np.ndarray[Any, Any]


def host_copy(array: jax.Array, within: Rectangle | None = None) -> HostArray:
    """An owned, C-contiguous copy of the whole array, or of a rectangle of it; waits until it is computed.

    JAX's own error comes through if the computation failed: the caller knows what the copy was for. Raises
    ``EngineError`` if a part of it lies on no device of this process.
    """
    shape = array.shape if within is None else tuple(end - begin for begin, end in within)
    owned: HostArray = np.empty(shape, array.dtype)
    copy_to(owned, array, within)
    return owned


def copy_to(target: HostArray, array: jax.Array, within: Rectangle | None = None) -> None:
    """As ``host_copy``, into a C-contiguous ``target`` of the same dtype and of the shape of what is copied."""
    wanted = within if within is not None else tuple((0, size) for size in array.shape)
    found = 0
    for cell, shard in _distinct(array).items():
        shared = common(cell, wanted)
        if not volume(shared):
            continue
        found += volume(shared)
        # shard.data of an unsharded array is the array itself; its cached view goes when the caller drops the array
        part = _view(np.asarray(shard.data), slices(shared, cell))
        place = _view(target, slices(shared, wanted))
        if place.flags.c_contiguous and part.flags.c_contiguous:
            copy_bytes(place, part)
        else:
            np.copyto(place, part, casting="no")
        del part
    if found != volume(wanted):
        raise EngineError(
            f"an array {list(array.shape)} lies as {array.sharding}: of the wanted {volume(wanted)} elements this "
            f"process's devices hold {found}; have the engine replicate it over the hosts"
        )


def is_whole_here(array: jax.Array) -> bool:
    """Whether this process's devices hold all of it, in one copy or more."""
    return sum(map(volume, _distinct(array))) == array.size


def part_here(array: jax.Array) -> Rectangle:
    """The rectangle around what this process's devices hold."""
    return bounding(_distinct(array)) if array.shape else ()


def _distinct(array: jax.Array) -> dict[Rectangle, Any]:
    """One shard for each part of it that lies here: which replica does not matter, another host may have the first."""
    return {rectangle_of(shard.index, array.shape): shard for shard in reversed(array.addressable_shards)}


def _view(array: HostArray, index: tuple[slice, ...]) -> HostArray:
    # the ellipsis makes it a view of a 0-d array too
    view: HostArray = array[(*index, ...)]  # type: ignore[arg-type]
    return view


def copy_bytes(target: HostArray, source: HostArray) -> None:
    """Native copy, GIL released, between C-contiguous arrays of one dtype and shape.

    Raises ``PoolError`` if one of them lies in a pool whose file was shrunk meanwhile, where a plain copy would be
    SIGBUS; the target then holds a part.
    """
    if source.nbytes and not _native.copy_guarded(as_bytes(target), as_bytes(source)):
        raise PoolError(f"the memory of {source.nbytes} bytes went away under their copy: a pool's file was shrunk")


def as_bytes(array: HostArray) -> HostArray:
    """The array's memory as uint8 ``[nbytes]``; ml_dtypes have no buffer protocol of their own."""
    return array.reshape(-1).view(np.uint8)

"""Device arrays to bytes the host owns, without a device program and without disturbing donation.

``np.asarray(array)`` is a view on the CPU backend, cached in the array, and a held view silently disables that
buffer's donation (memory doubles). So every shard is copied out of its view and the view dropped at once.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shmstage import _native
from shmstage.errors import PoolError

HostArray = np.ndarray[Any, Any]


def host_copy(array: jax.Array) -> HostArray:
    """An owned, C-contiguous copy of the whole array; waits until it is computed.

    JAX's own error comes through if the computation failed: the caller knows what the copy was for. Every shard must
    be addressable from this process.
    """
    owned: HostArray = np.empty(array.shape, array.dtype)
    copy_to(owned, array)
    return owned


def copy_to(target: HostArray, array: jax.Array) -> None:
    """As ``host_copy``, into a C-contiguous ``target`` of the same shape and dtype."""
    for shard in array.addressable_shards:
        if shard.replica_id != 0:
            continue
        # shard.data of an unsharded array is the array itself; its cached view goes when the caller drops the array
        part = np.asarray(shard.data)
        place = target[(*shard.index, ...)]  # the ellipsis makes it a view of a 0-d array too
        if place.flags.c_contiguous and part.flags.c_contiguous:
            copy_bytes(place, part)
        else:
            np.copyto(place, part, casting="no")
        del part


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

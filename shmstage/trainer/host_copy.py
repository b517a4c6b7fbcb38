"""Device arrays to bytes the host owns, without a device program and without disturbing donation.

``np.asarray(array)`` is a view on the CPU backend, cached in the array, and a held view silently disables that
buffer's donation (memory doubles). So every shard is copied out of its view and the view dropped at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from shmstage import _native
from shmstage.memory.layout import dtype_name

HostArray = np.ndarray[Any, Any]


def host_copy(array: jax.Array) -> HostArray:
    """An owned, C-contiguous copy of the whole array; waits until it is computed.

    Raises ``EngineError``-free JAX errors as they are: the caller knows what the copy was for. Every shard must be
    addressable from this process.
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
        place = target[shard.index]
        if place.flags.c_contiguous and part.flags.c_contiguous:
            copy_bytes(place, part)
        else:
            np.copyto(place, part, casting="no")
        del part


def copy_bytes(target: HostArray, source: HostArray) -> None:
    """Native copy, GIL released, between C-contiguous arrays of one dtype and shape."""
    if source.nbytes:
        _native.copy_into(as_bytes(target), as_bytes(source))


def as_bytes(array: HostArray) -> HostArray:
    """The array's memory as uint8 ``[nbytes]``; ml_dtypes have no buffer protocol of their own."""
    return array.reshape(-1).view(np.uint8)


def array_digest_parts(name: str, array: HostArray) -> tuple[bytes, HostArray]:
    """What a digest over named arrays feeds per array: a header naming it, then its bytes."""
    header = f"{name}|{dtype_name(array.dtype)}|{array.shape}|".encode()
    return header, as_bytes(np.ascontiguousarray(array))


def params_digest(params: Mapping[str, jax.Array]) -> str:
    """xxh3_128 hex over the leaves in their order: path, dtype, shape, bytes. Waits for the device."""
    import xxhash

    state = xxhash.xxh3_128()
    for name, array in params.items():
        header, payload = array_digest_parts(name, host_copy(array))
        state.update(header)
        state.update(payload)
    return state.hexdigest()


def payload_digest(arrays: Mapping[str, HostArray]) -> str:
    """xxh3_128 hex over arrays in their order: name bytes, raw bytes. ``verify = "full"`` compares it."""
    import xxhash

    state = xxhash.xxh3_128()
    for name, array in arrays.items():
        state.update(name.encode())
        state.update(as_bytes(np.ascontiguousarray(array)))
    return state.hexdigest()

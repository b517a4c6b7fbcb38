"""Digests that two runs are compared by: of a micro-batch as the engine gets it, and of the parameters."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import xxhash

from shmstage.memory.layout import dtype_name
from shmstage.packing.routing import is_encoded
from shmstage.trainer.decode import dense_routing, in_place_of_encoded
from shmstage.trainer.engine import Batch, TrainEngine
from shmstage.trainer.host_copy import HostArray, as_bytes, host_copy, part_here

_dense_routing = jax.jit(dense_routing)


def decoded_digest(batch: Batch) -> str:
    """``payload_digest`` of a micro-batch with its routing as the loss sees it: the same for every encoding.

    Of one that spans hosts: of this host's part, as it was uploaded. To decode it is work for the devices of all.
    """
    if not all(array.is_fully_addressable for array in batch.values()):
        return payload_digest({name: host_copy(array, part_here(array)) for name, array in batch.items()})
    if is_encoded(batch):
        batch = in_place_of_encoded(batch, _dense_routing(batch))
    return payload_digest({name: np.asarray(array) for name, array in batch.items()})


def payload_digest(arrays: Mapping[str, HostArray]) -> str:
    """xxh3_128 hex over arrays in the order given: name bytes, then raw bytes in C order."""
    state = xxhash.xxh3_128()
    for name, array in arrays.items():
        state.update(name.encode())
        state.update(as_bytes(np.ascontiguousarray(array)).data)
    return state.hexdigest()


def param_digest(engine: TrainEngine) -> str:
    """xxh3_128 hex over the parameters in tree order: path, dtype, shape, bytes. Waits for the device."""
    state = xxhash.xxh3_128()
    for name, array in engine.weights().items():
        state.update(f"{name}|{dtype_name(array.dtype)}|{array.shape}|".encode())
        state.update(as_bytes(host_copy(array)).data)
    return state.hexdigest()

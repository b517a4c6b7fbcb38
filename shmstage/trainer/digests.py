"""Digests that two runs are compared by: of a micro-batch as the engine gets it, and of the parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from shmstage.memory.layout import dtype_name
from shmstage.trainer.engine import TrainEngine
from shmstage.trainer.host_copy import HostArray, as_bytes, host_copy


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

"""The few functions of JAX that carry no types, with the types they have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shmstage.errors import EngineError
from shmstage.memory.layout import numpy_dtype


def wait_ready(tree: Any) -> None:
    """Return when every array of the pytree is computed; raises what its computation raised."""
    jax.block_until_ready(tree)  # type: ignore[no-untyped-call]


def partition_spec(*parts: Any) -> PartitionSpec:
    return PartitionSpec(*parts)  # type: ignore[no-untyped-call]


def struct(shape: Sequence[int], dtype: str, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """An array to compile for, by the layout's dtype name."""
    return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype), sharding=sharding)  # type: ignore[no-untyped-call]


def struct_like(array: np.ndarray[Any, Any]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def check_fits(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> None:
    """``ValueError`` for an array that cannot lie so: fewer axes than are cut, or an axis cut into unequal parts."""
    anything: Any = sharding
    anything.check_compatible_aval(shape)  # ranks; the other, sizes
    anything.shard_shape(shape)


def local_devices() -> dict[str, Any]:
    """What JAX computes on in this process, as plain facts."""
    devices = jax.local_devices()
    return {"platform": devices[0].platform, "devices": [str(device) for device in devices]}


@lru_cache(maxsize=1024)
def is_cpu(sharding: jax.sharding.Sharding) -> bool:
    """True if any of its devices is the host's own."""
    devices: Any = sharding.device_set
    return any(device.platform == "cpu" for device in devices)


def barrier(array: jax.Array) -> jax.Array:
    """The same array; what computes it and what reads it are compiled apart."""
    apart: jax.Array = jax.lax.optimization_barrier(array)  # type: ignore[no-untyped-call]
    return apart


def constrained(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The same array, lying as ``sharding`` says; inside a program."""
    placed: jax.Array = jax.lax.with_sharding_constraint(array, sharding)  # type: ignore[no-untyped-call]
    return placed


def run_copy(array: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
    """A copy by a program, which every process has to run that has devices of the array."""
    copied: jax.Array = jax.jit(jnp.copy, out_shardings=target)(array)
    return copied


def leave_signals_alone() -> None:
    """Before joining: JAX's watch for preemption would take SIGTERM for itself."""
    with suppress(AttributeError):  # a version without it
        jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]


def coordinator_store() -> Any:
    """The key-value store that processes of ``jax.distributed`` share; JAX names it in no public module."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise EngineError("this process has not joined others with jax.distributed")
    return client


def start_profile(directory: Path) -> None:
    """Traces device work and annotations; Python's own calls too only where JAX cannot leave them out: they cost."""
    options: dict[str, Any] = {}
    if hasattr(jax.profiler, "ProfileOptions"):
        options["profiler_options"] = jax.profiler.ProfileOptions()
        options["profiler_options"].python_tracer_level = 0
    jax.profiler.start_trace(str(directory), **options)


def stop_profile() -> None:
    """Writes the files; seconds for a long profile."""
    jax.profiler.stop_trace()  # type: ignore[no-untyped-call]

"""``engine = "shmstage.testing.engines_timed:make_engine"``: real programs that take a given time on a real device.

For benchmarks of uploads and boundaries where there is an accelerator. What it trains is a chain of sums over every
word it was given, so that one micro-batch too many, too few, out of order or overwritten changes every later parameter;
integers only, so that it is the same whatever algorithm a matrix product is given.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from shmstage.errors import SettingsError
from shmstage.memory.layout import Layout

MASK = "completion_mask"
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
#: words that are summed up at a time on the host
_PIECE = 1 << 20


# the count is known when it is compiled: else the host is asked after each turn, and dispatching waits for the device
@functools.partial(jax.jit, static_argnums=1)
def matmul_chain(matrix: jax.Array, count: int) -> jax.Array:
    """``count`` matrix products, one after the other; a float32 that is there when the last one is done."""
    product = jax.lax.fori_loop(0, count, lambda turn, value: value @ matrix, matrix)
    last: jax.Array = product[0, 0].astype(jnp.float32)
    return last


@jax.jit
def digest_on_device(arrays: Iterable[jax.Array]) -> jax.Array:
    """uint32 over all words of the arrays and where they lie."""
    total: Any = jnp.uint32(0)
    for array in arrays:
        words = jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
        weights = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
        total = total * jnp.uint32(31) + jnp.sum(words * weights, dtype=jnp.uint32)
    digest: jax.Array = total
    return digest


def digest_on_host(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    """The same as ``digest_on_device``."""
    total = 0
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.itemsize}")
        subtotal = 0
        for begin in range(0, words.size, _PIECE):
            piece = words[begin : begin + _PIECE]
            weights = 2 * np.arange(begin, begin + piece.size, dtype=np.uint32) + np.uint32(1)
            subtotal += int(np.sum(piece * weights, dtype=np.uint32))
        total = (total * 31 + subtotal) % 2**32
    return total


def square_matrix(side: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """bfloat16 ``[side, side]`` whose powers stay finite for long."""
    values = np.random.default_rng(0).standard_normal((side, side), np.float32) / side**0.5
    placed: jax.Array = jax.device_put(values.astype(ml_dtypes.bfloat16), sharding)
    return placed


def count_for(matrix: jax.Array, seconds: float) -> int:
    """How many products take ``seconds``, measured now."""
    count, took = 1, 0.0
    while took < seconds / 4:
        count *= 4
        times = []
        for _ in range(4):  # the first compiles
            begin = time.perf_counter()
            matmul_chain(matrix, count).block_until_ready()
            times.append(time.perf_counter() - begin)
        took = min(times)
    return max(1, round(count * seconds / took))


def make_engine(settings: Mapping[str, Any]) -> TimedEngine:
    """The factory: ``microbatch_s`` and ``update_s`` in seconds, ``side`` of the matrix. Raises ``SettingsError``."""
    known = {"microbatch_s": 0.01, "update_s": 0.001, "side": 64, "checkpoint_dir": None}
    if unknown := sorted(set(settings) - set(known)):
        raise SettingsError(f"[engine] does not know {', '.join(unknown)}; the timed engine has {sorted(known)}")
    given = {**known, **settings}
    return TimedEngine(float(given["microbatch_s"]), float(given["update_s"]), int(given["side"]))


@final
class TimedEngine:
    """A ``TrainEngine`` on the first device; its checkpoints are forgotten at once."""

    snapshots = True

    def __init__(self, microbatch_s: float, update_s: float, side: int) -> None:
        self._times = (microbatch_s, update_s)
        self._counts = (1, 1)
        self._sharding = SingleDeviceSharding(jax.local_devices()[0])
        self._matrix = square_matrix(side, self._sharding)
        self._params: jax.Array = jax.device_put(np.zeros(4, np.uint32), self._sharding)
        self._none: tuple[jax.Array, jax.Array] = jax.device_put((np.uint32(1), np.float32(0)), self._sharding)
        self._sums = self._none
        self._metrics: dict[str, jax.Array] = {}

    def shardings(self, layout: Layout) -> dict[str, jax.sharding.Sharding]:
        return {field.name: self._sharding for field in layout.fields}

    def compile(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self._counts = (count_for(self._matrix, self._times[0]), count_for(self._matrix, self._times[1]))
        batch = {
            name: jax.device_put(np.zeros(like.shape, like.dtype), self._sharding) for name, like in example.items()
        }
        jax.block_until_ready((  # type: ignore[no-untyped-call]
            _forward(self._none, batch, self._matrix, self._counts[0]),
            _update(self._params, self._none, self._matrix, self._counts[1]),
        ))  # fmt: skip

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        token: jax.Array
        token, self._sums = _forward(self._sums, dict(batch), self._matrix, self._counts[0])
        return token

    def update(self) -> jax.Array:
        token: jax.Array
        token, self._params, self._metrics = _update(self._params, self._sums, self._matrix, self._counts[1])
        self._sums = self._none
        return token

    def metrics(self) -> dict[str, jax.Array]:
        return dict(self._metrics)

    def weights(self) -> dict[str, jax.Array]:
        return {"w": self._params}

    def save(self, step: int, metadata: Mapping[str, object]) -> _Forgotten:
        return _Forgotten(self._params)

    def restore(self) -> None:
        self._sums = self._none


@functools.partial(jax.jit, static_argnums=3)
def _forward(
    sums: tuple[jax.Array, jax.Array], batch: dict[str, jax.Array], matrix: jax.Array, count: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    digest = digest_on_device([batch[name] for name in sorted(batch)])
    real = jnp.sum(batch[MASK]) if MASK in batch else jnp.float32(1)
    return matmul_chain(matrix, count), (sums[0] * jnp.uint32(0x9E3779B1) + digest, sums[1] + real)


@functools.partial(jax.jit, static_argnums=3)
def _update(
    params: jax.Array, sums: tuple[jax.Array, jax.Array], matrix: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    mixed = (params + sums[0]) * jnp.uint32(0x85EBCA77)
    loss = (mixed[0] >> 16).astype(jnp.float32)
    return matmul_chain(matrix, count), mixed, {"loss": loss, "grad_norm": loss, "denominator": sums[1]}


@final
class _Forgotten:
    """A checkpoint that nobody will ask for."""

    def __init__(self, params: jax.Array) -> None:
        self._params: list[jax.Array] = [params]

    def copy_to_host(self) -> None:
        self._params.pop().block_until_ready()

    def write(self) -> dict[str, object]:
        return {"kept": False}

"""When host memory that was given to ``jax.device_put`` may be written again: the one place that owns the rule.

On the CPU backend ``device_put`` *aliases* a 64-byte-aligned, C-contiguous view whatever one asks (``may_alias=False``
and ``donate=True`` included), per shard; an unaligned one it copies *after* the call has returned. So there, slots are
copied into private aligned buffers, and those are aliased on purpose; such a buffer may be written again only when no
program will read it any more and JAX has let go of its memory. On other backends ``device_put`` reads the slot until
the staged arrays are ready, and never afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from shmstage.errors import LayoutError
from shmstage.memory.layout import numpy_dtype
from shmstage.trainer.jax_seam import is_cpu

ALIGNMENT = 64


def aliases_host_memory(shardings: Mapping[str, jax.sharding.Sharding]) -> bool:
    """True if arrays with these shardings may be host memory itself, so that a slot must not be handed to JAX."""
    return any(is_cpu(sharding) for sharding in shardings.values())


def exported(buffer: np.ndarray[Any, Any], on_dropped: Callable[[], None]) -> np.ndarray[Any, Any]:
    """A uint8 view of ``buffer`` to make arrays from; ``on_dropped`` runs when the last of them is gone.

    JAX keeps a reference not to the array it was given but to that array's base, so the finalizer sits on the base:
    ``frombuffer`` over a memoryview is one that numpy does not look through. JAX drops its reference after the array
    is deleted *and* the programs reading it are over, and does so lazily: see ``nudge``. ``on_dropped`` may run on
    any thread, in the middle of anything.
    """
    base: np.ndarray[Any, Any] = np.frombuffer(buffer.data, np.uint8)
    weakref.finalize(base, on_dropped).atexit = False
    return base


def nudge() -> None:
    """Make JAX drop the references it has put off dropping; it does so in its garbage-collector callback."""
    gc.collect(0)


def refuse_narrowing(fields: Iterable[tuple[str, str]]) -> None:
    """Raise ``LayoutError`` for a (name, dtype name) that ``device_put`` would narrow: 2**40 + 7 becomes 7."""
    for name, dtype in fields:
        wanted = numpy_dtype(dtype)
        got = jax.dtypes.canonicalize_dtype(wanted)
        if got != wanted:
            raise LayoutError(
                f"field {name!r} is {dtype}, which JAX narrows to {got} with x64 off; "
                f"send it as {got} or set JAX_ENABLE_X64=1"
            )

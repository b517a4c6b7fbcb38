"""The producer's part in late fields: what it writes into a published slot once the trainer's scores are there.

Each late field has one writer. The trainer writes log-probs; the producer, which alone knows what the sampler said,
writes ``sampler_is_weights``. ``completion_mask`` is late as well with recomputed log-probs, and stays as packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import numpy.typing as npt
import xxhash

from shmstage.memory.handle import Handle
from shmstage.memory.pool import Pool
from shmstage.orchestrator.importance import sampler_is_weights
from shmstage.packing.fields import OLD_LOGPS, SAMPLER_IS_WEIGHTS


@dataclass(frozen=True)
class Patch:
    """What ``patch_staged`` is told."""

    fields: tuple[str, ...]
    loss_tokens: int
    #: (name, xxh3-128) of what the producer wrote
    digests: tuple[tuple[str, str], ...] = ()


class LateFieldWriter(Protocol):
    """Called by the program's thread, once before a micro-batch is scored and once after."""

    def before_scoring(self, handle: Handle) -> None:
        """Keep the sampler's log-probs, which the trainer is about to write over."""

    def after_scoring(self, handle: Handle) -> Patch:
        """Derive what is the producer's, write it where the micro-batch lies, and say what is to be patched."""


@final
class LateFields:
    """In the pool of this host."""

    def __init__(self, pool: Pool, *, sampler_is_cap: float) -> None:
        self._pool = pool
        self._cap = sampler_is_cap
        self._sampled: dict[Handle, npt.NDArray[np.float32]] = {}

    def before_scoring(self, handle: Handle) -> None:
        """Keep the sampler's log-probs, which the trainer is about to write over."""
        self._sampled[handle] = np.array(self._pool.late_views(handle)[OLD_LOGPS])

    def after_scoring(self, handle: Handle) -> Patch:
        """Derive what is the producer's, write it into the slot, and say what is to be patched.

        Raises ``StaleHandleError`` if the slot has moved on.
        """
        late = self._pool.late_views(handle)
        sampled = self._sampled.pop(handle)
        weights = sampler_is_weights(sampled, late[OLD_LOGPS], late["completion_mask"], self._cap)
        late[SAMPLER_IS_WEIGHTS][:] = weights
        self._pool.commit_late(handle, SAMPLER_IS_WEIGHTS)
        names = (OLD_LOGPS, "completion_mask", SAMPLER_IS_WEIGHTS)
        digest = xxhash.xxh3_128_hexdigest(weights.tobytes())
        return Patch(tuple(name for name in names if name in late), handle.loss_tokens, ((SAMPLER_IS_WEIGHTS, digest),))

"""What an engine remembers for overflow replay: the open step's micro-batches whose flag nobody has read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import jax

from shmstage.trainer.engine import Batch
from shmstage.trainer.host_copy import host_copy


@dataclass(frozen=True, slots=True)
class _Attempt:
    number: int
    batch: Batch
    overflow: jax.Array


@final
class Replays:
    """First attempts of the open step, numbered from 1, in the order they were dispatched."""

    def __init__(self) -> None:
        self.attempts = 0
        self._open: deque[_Attempt] = deque()

    def attempted(self, batch: Batch, overflow: jax.Array) -> None:
        """A first attempt was dispatched; its arrays are held until it is settled."""
        self.attempts += 1
        self._open.append(_Attempt(self.attempts, batch, overflow))

    def settle(self, upto: int, replay: Callable[[Batch], jax.Array]) -> dict[int, jax.Array]:
        """Read the flags through attempt ``upto`` and replay those that overflowed, in order: number → token.

        Waits until those attempts are computed, not for anything dispatched after them.
        """
        tokens = {}
        while self._open and self._open[0].number <= upto:
            attempt = self._open[0]
            if bool(host_copy(attempt.overflow)):
                tokens[attempt.number] = replay(attempt.batch)
            self._open.popleft()  # with it goes the last reference that kept the device buffer
        return tokens

    def clear(self) -> None:
        """The step is closed or given up."""
        self.attempts = 0
        self._open.clear()

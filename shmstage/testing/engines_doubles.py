"""Engines that stand for other people's trainers: they wait, replay or fail where one wants it.

Each wraps an engine and leaves the arithmetic to it; real JAX programs run. ``doubles_trainer`` puts a real worker and
server around them; ``engines_refusing`` has those that raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import jax
import jax.numpy as jnp

from shmstage.testing.doubles_device import Device, Work
from shmstage.testing.engines_packed import MASK
from shmstage.trainer.engine import restored
from shmstage.trainer.jax_seam import wait_ready

Blocks = Literal["never", "two deep", "until last done"]
"""When the host waits inside ``fwd_bwd`` and ``update``: never · until at most two programs are unfinished, as a
throttled backend does · in ``update`` until the step's last micro-batch is done, as the reference trainer does, which
reads its overflow flags there (``retry_when_tokens_dropped``)."""

@final
class PacedEngine:
    """An engine on a ``Device``: what it dispatches ends when that says so.

    ``blocks`` says where the host waits. Without ``tokens`` every call returns when its work is over, and with None.
    The work named in ``fails`` (``1.2``, ``replay 1.2``, ``update 1``) is dispatched well and fails when it ends.
    """

    def __init__(
        self,
        inner: Any,
        device: Device,
        *,
        blocks: Blocks = "never",
        tokens: bool = True,
        fails: frozenset[str] = frozenset(),
    ) -> None:
        self._inner = inner
        self._device = device
        self._blocks = blocks
        self._tokens = tokens
        self._fails = fails
        self._step = 1
        self._open: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return functools.partial(self._settle, found) if name == "settle" else found

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> jax.Array | None:
        name = f"{self._step}.{len(self._open)}"
        token = self._inner.fwd_bwd(batch)
        self._open.append(self._device.begin(name))
        return self._returns(token, self._open[-1])

    def update(self) -> jax.Array | None:
        if self._blocks == "until last done":
            self._device.end_through(self._open[-1])
        token = self._inner.update()
        work = self._device.begin(f"update {self._step}")
        self._step, self._open = self._step + 1, []
        return self._returns(token, work)

    def restore(self, at_most: int | None = None) -> Mapping[str, object] | None:
        metadata = restored(self._inner, at_most)
        self._step, self._open = 1 + (int(str(metadata["step"])) if metadata else 0), []
        return metadata

    def _settle(self, settle: Callable[[int], Any], upto: int) -> dict[int, _PacedToken]:
        self._device.end_through(self._open[upto - 1])  # flags are read from work that is over
        replays = settle(upto) or {}
        return {number: self._paced(token, f"replay {self._step}.{number - 1}") for number, token in replays.items()}

    def _paced(self, token: Any, name: str) -> _PacedToken:
        return _PacedToken(token, self._device.begin(name), name in self._fails)

    def _returns(self, token: Any, work: Work) -> jax.Array | None:
        if self._blocks == "two deep":
            self._device.end_all_but(2)
        paced = _PacedToken(token, work, work.name in self._fails)
        if self._tokens:
            return cast(jax.Array, paced)
        self._device.end_through(work)
        paced.block_until_ready()
        return None


@final
@dataclass(frozen=True)
class _PacedToken:
    """XLA:CPU is done too soon and raises in the call itself, so that lateness and failure have to be acted out."""

    token: jax.Array
    work: Work
    fails: bool

    def block_until_ready(self) -> _PacedToken:
        self.work.wait()
        self.token.block_until_ready()
        if self.fails:
            raise RuntimeError(f"seeded device failure of {self.work.name}")
        return self


@final
class OverflowingEngine:
    """Drops the tokens of some micro-batches on their first attempt and replays those in ``settle``.

    ``overflows(step, index)`` says which. A first attempt that overflows adds ``where(overflow, 0, gradient)``: here it
    is run with its mask zeroed. ``log`` tells attempts, replays and updates by name.
    """

    def __init__(self, inner: Any, overflows: Callable[[int, int], bool]) -> None:
        self._inner = inner
        self._overflows = overflows
        self._step = 1
        self._attempts: list[tuple[jax.Array, Mapping[str, jax.Array] | None]] = []
        self._settled = 0
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        index = len(self._attempts)
        overflow = self._overflows(self._step, index)
        first = {**batch, MASK: jnp.zeros_like(batch[MASK])} if overflow else batch
        token: jax.Array = self._inner.fwd_bwd(first)
        self._attempts.append((token, batch if overflow else None))
        self.log.append(f"first {self._step}.{index}")
        return token

    def settle(self, upto: int) -> dict[int, jax.Array]:
        replays = {}
        for index in range(self._settled, upto):
            token, batch = self._attempts[index]
            wait_ready(token)  # the flag would be read here
            if batch is not None:
                replays[index + 1] = self._inner.fwd_bwd(batch)
                self.log.append(f"replay {self._step}.{index}")
            self._attempts[index] = (token, None)
        self._settled = max(self._settled, upto)
        return replays

    def update(self) -> jax.Array:
        token: jax.Array = self._inner.update()
        self.log.append(f"update {self._step}")
        self._step, self._attempts, self._settled = self._step + 1, [], 0
        return token

    def restore(self, at_most: int | None = None) -> Mapping[str, object] | None:
        metadata = restored(self._inner, at_most)
        self._step = 1 + (int(str(metadata["step"])) if metadata else 0)
        self._attempts, self._settled = [], 0
        return metadata


@final
class SettledInOrder:
    """Calls an engine's ``settle`` as a worker does, for the reference loop, which knows of none."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._trained = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> Any:
        token = self._inner.fwd_bwd(batch)
        self._trained += 1
        if self._trained > 1:
            self._inner.settle(self._trained - 1)
        return token

    def update(self) -> Any:
        self._inner.settle(self._trained)
        self._trained = 0
        return self._inner.update()

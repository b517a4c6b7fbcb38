"""Small engines for tests: real JAX programs that take milliseconds, and a few ways to go wrong on purpose."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import jax
import jax.numpy as jnp

from shmstage.errors import MissingExtraError
from shmstage.memory.layout import Layout
from shmstage.trainer.checkpoints import CheckpointStore
from shmstage.trainer.optax_engine import OptaxEngine


def toy_layout(rows: int = 4, tokens: int = 32, *, late: bool = False) -> Layout:
    """``x`` float32 ``[rows, tokens]``, ``y`` and ``mask`` float32 ``[rows]``; with ``late`` two late fields."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = {
        "x": ("float32", (rows, tokens)),
        "y": ("float32", (rows,)),
        "mask": ("float32", (rows,)),
    }
    if not late:
        return Layout.of(specs)
    names = ("old_per_token_logps", "ref_per_token_logps")
    return Layout.of({**specs, **dict.fromkeys(names, ("float32", (rows, tokens)))}, late=names)


def toy_loss(params: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Summed squared error of a linear model, the number of counted rows, and the summed absolute error.

    Late fields count with a small weight, so that one which was not patched changes the loss.
    """
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) * batch["mask"]
    loss = jnp.sum(jnp.square(error))
    if "old_per_token_logps" in batch:
        loss = loss + 1e-3 * jnp.sum(params["b"] * batch["old_per_token_logps"])
    return loss, jnp.sum(batch["mask"]), {"absolute_error": jnp.sum(jnp.abs(error))}


def toy_logps(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """A score per token, float32 ``[rows, tokens]``."""
    scores: jax.Array = batch["x"] * params["w"] + params["b"]
    return scores


@final
class MemoryStore:
    """Checkpoints in memory; ``hold`` makes the next saves wait until it is set."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.hold = threading.Event()
        self.hold.set()

    def steps(self) -> list[int]:
        return sorted(self.kept)

    def save(self, step: int, tree: Any, metadata: Mapping[str, object]) -> str:
        self.hold.wait()
        self.kept[step] = (tree, {**metadata, "step": step})
        return f"memory/{step}"

    def load(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        return self.kept[step]

    def discard_above(self, step: int) -> None:
        self.kept = {kept: value for kept, value in self.kept.items() if kept <= step}


def ToyEngine(
    tokens: int = 32,
    *,
    checkpoint_dir: Path | str | None = None,
    store: CheckpointStore | None = None,
    seed: int = 0,
) -> OptaxEngine:
    """``OptaxEngine`` with Adam over a linear model of ``tokens`` weights."""
    weights = jax.random.normal(jax.random.key(seed), (tokens,), jnp.float32)
    params = {"b": jnp.zeros((), jnp.float32), "w": weights}
    return OptaxEngine(toy_loss, params, _adam(), checkpoint_dir=checkpoint_dir, store=store, logps_fn=toy_logps)


@functools.lru_cache(maxsize=1)
def _adam() -> Any:
    """One optimizer object for all toy engines: engines over the same functions share compiled programs."""
    try:
        import optax
    except ModuleNotFoundError as error:
        raise MissingExtraError("ToyEngine needs optax; pip install 'shmstage[train]'") from error
    return optax.adam(1e-2)


def make_toy_engine(settings: Mapping[str, Any]) -> OptaxEngine:
    """The factory: settings ``tokens``, ``seed``, ``checkpoint_dir``, each optional."""
    tokens, seed = int(settings.get("tokens", 32)), int(settings.get("seed", 0))
    return ToyEngine(tokens, checkpoint_dir=settings.get("checkpoint_dir"), seed=seed)


@final
class FailingEngine:
    """Wraps an engine; the micro-batches counted in ``bad`` (from 1) are dispatched well and fail later.

    They compute until ``over`` is set.
    """

    def __init__(self, inner: OptaxEngine, bad: frozenset[int]) -> None:
        self.over = threading.Event()
        self.over.set()
        self._inner = inner
        self._bad = bad
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        self._count += 1
        token = self._inner.fwd_bwd(batch)
        return cast(jax.Array, _FailedToken(token, self.over)) if self._count in self._bad else token


@dataclass(frozen=True)
class _FailedToken:
    """XLA:CPU raises in the call itself, so that a failure after a good return has to be acted out."""

    token: jax.Array
    over: threading.Event

    def block_until_ready(self) -> None:
        self.over.wait()
        self.token.block_until_ready()
        raise RuntimeError("seeded device failure")


@final
class ReplayingEngine:
    """Wraps an engine and adds ``settle``: keeps each micro-batch's arrays until settled, and logs what it is asked."""

    def __init__(self, inner: OptaxEngine) -> None:
        self._inner = inner
        self.log: list[str] = []
        self.held: dict[int, Mapping[str, jax.Array]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def fwd_bwd(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        number = len([entry for entry in self.log if entry.startswith("fwd_bwd")]) + 1
        self.log.append(f"fwd_bwd {number}")
        self.held[number] = batch
        return self._inner.fwd_bwd(batch)

    def settle(self, upto: int) -> None:
        self.log.append(f"settle {upto}")
        for number in [n for n in self.held if n <= upto]:
            del self.held[number]

    def update(self) -> jax.Array:
        self.log.append("update")
        return self._inner.update()

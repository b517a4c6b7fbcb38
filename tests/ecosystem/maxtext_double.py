"""A double with the methods of MaxText's training engine, in a few lines of JAX; ``test_maxtext_package.py`` compares
its signatures with the package's. It does as the engine does: calls return nothing, metrics stay on the device, a
checkpoint inside a step has the half step in it, one that cannot be read is as if there was none.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shmstage.testing.engines_packed import packed_loss

TOKENS = 16


@dataclass
class Metric:
    unreduced_sum: jax.Array
    denominator: jax.Array


@dataclass
class Buffer:
    id: int = -1
    weighted_metrics: dict[str, Metric] = field(default_factory=dict)
    scalar_metrics: dict[str, jax.Array] = field(default_factory=dict)


def first_params() -> dict[str, jax.Array]:
    return {"b": jnp.zeros((), jnp.float32), "w": jax.random.normal(jax.random.key(0), (TOKENS,), jnp.float32)}


@functools.lru_cache(maxsize=1)
def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-2)


@jax.jit
def forward(params: Any, batch: dict[str, jax.Array]) -> Any:
    def loss(p: Any) -> Any:
        total, denominator, _ = packed_loss(p, batch)
        return total, denominator

    return jax.value_and_grad(loss, has_aux=True)(params)


@jax.jit
def step(params: Any, state: Any, grads: Any, denominator: jax.Array) -> Any:
    divided = jax.tree.map(lambda g: g / denominator, grads)
    updates, state = optimizer().update(divided, state, params)
    return optax.apply_updates(params, updates), state, optax.global_norm(divided)


class MaxTextDouble:
    """``calls`` says what was asked of it, ``payloads`` what ``fwd_bwd`` was given."""

    def __init__(self, directory: Path | None = None, *, notes: bool = True) -> None:
        self.directory = directory
        self.notes = notes
        self.calls: list[str] = []
        self.payloads: list[Any] = []
        self.params: Any = first_params()
        self.state: Any = optimizer().init(self.params)
        self.grads: Any = None
        self.denominator: Any = jnp.float32(0)
        self.micro_step_count = 0
        self.train_step = 0
        self.buffer = Buffer()

    def compile(self, dummy_data: Any) -> None:
        self.calls.append("compile")

    def fwd_bwd(self, payload: Any, **kwargs: Any) -> None:
        self.calls.append("fwd_bwd")
        self.payloads.append(payload)
        (loss, denominator), grads = forward(self.params, self.batch_of(payload))
        self.grads = grads if self.grads is None else jax.tree.map(jnp.add, self.grads, grads)
        self.denominator = self.denominator + denominator
        self.micro_step_count += 1
        if self.notes:
            old = self.buffer.weighted_metrics.get("loss", Metric(jnp.zeros(0), jnp.zeros(0)))
            now = Metric(jnp.append(old.unreduced_sum, loss), jnp.append(old.denominator, denominator))
            self.buffer.weighted_metrics["loss"] = now

    def update(self, **kwargs: Any) -> int:
        self.calls.append("update")
        self.params, self.state, norm = step(self.params, self.state, self.grads, self.denominator)
        if self.notes:
            self.buffer.scalar_metrics["gradient_norm"] = jnp.atleast_1d(norm)
        self.grads, self.denominator, self.micro_step_count = None, jnp.float32(0), 0
        self.train_step += 1
        return self.train_step

    def get_metrics(self, clear_cache: bool = True) -> Buffer:
        found = self.buffer
        if clear_cache:
            self.buffer = Buffer()
        return found

    def eval_step(self, payload: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def fwd_only(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("fwd_only")
        return fn(self.params, *args, **kwargs)

    def save_checkpoint(self, metadata: Any, **kwargs: Any) -> None:
        self.calls.append("save_checkpoint")
        if self.directory is None:
            return
        number = kwargs.get("step", self.train_step + (self.micro_step_count > 0))
        place = self.directory / str(number)
        place.mkdir(parents=True, exist_ok=True)
        leaves = jax.tree.leaves((self.params, self.state))
        np.savez(place / "state.npz", *[np.asarray(leaf) for leaf in leaves])
        said = {"metadata": metadata, "micro_step_count": self.micro_step_count}
        (place / "said.json").write_text(json.dumps(said))

    def restore_checkpoint(self, **kwargs: Any) -> Any:
        self.calls.append("restore_checkpoint")
        kept = sorted(int(entry.name) for entry in self.directory.iterdir()) if self.directory else []
        if not kept:
            return None
        place = self.directory / str(kept[-1])
        try:
            said = json.loads((place / "said.json").read_text())
            loaded = np.load(place / "state.npz", allow_pickle=False)
        except OSError:
            return None  # logs it and goes on
        leaves, tree = jax.tree.flatten((self.params, self.state))
        placed = [jnp.array(loaded[f"arr_{i}"]) for i in range(len(leaves))]
        self.params, self.state = jax.tree.unflatten(tree, placed)
        self.micro_step_count, self.train_step = said["micro_step_count"], kept[-1]
        return said["metadata"]  # accumulated gradients stay, as in the package

    def prepare_weight_sync(self, **kwargs: Any) -> Any:
        self.calls.append("prepare_weight_sync")
        return self.params

    def release_weight_sync(self, **kwargs: Any) -> Any:
        self.calls.append("release_weight_sync")
        return True

    def close(self) -> None:
        self.calls.append("close")
        if self.directory is not None:
            self.save_checkpoint(None)

    def batch_of(self, payload: Any) -> Any:
        return payload


@dataclass
class Prepared:
    payload: Any


class PreparingDouble(MaxTextDouble):
    """One with the two methods that staging is easier with, and no others besides."""

    def prepare_fwd_bwd_input(self, payload: Any) -> Prepared:
        self.calls.append("prepare_fwd_bwd_input")
        return Prepared(payload)

    def wait_for_device(self) -> None:
        self.calls.append("wait_for_device")
        jax.block_until_ready((self.params, self.grads))

    def batch_of(self, payload: Any) -> Any:
        assert isinstance(payload, Prepared), "handed over unprepared"
        return payload.payload

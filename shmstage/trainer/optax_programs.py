"""The jitted programs of ``OptaxEngine``: forward and backward into donated sums, one update, an evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shmstage.errors import EngineError
from shmstage.trainer.engine import Batch

PyTree = Any
LossFn = Callable[[PyTree, Batch], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Programs:
    """``replay`` is ``None`` for a loss that never overflows."""

    init: Callable[..., Any]
    forward: Any
    replay: Any
    update: Any
    evaluate: Any


@functools.lru_cache(maxsize=16)
def programs_of(loss_fn: LossFn, optimizer: Any, replay_loss_fn: LossFn | None) -> Programs:
    """Jitted once per loss and optimizer, so that a second engine over the same ones compiles nothing again."""
    return Programs(
        init=jax.jit(optimizer.init),
        forward=jax.jit(forward_program(loss_fn, may_overflow=replay_loss_fn is not None), donate_argnums=1),
        replay=None if replay_loss_fn is None else jax.jit(forward_program(replay_loss_fn), donate_argnums=1),
        update=jax.jit(update_program(optimizer), donate_argnums=(0, 1, 2)),
        # an evaluation is not replayed: it takes the form that drops nothing
        evaluate=jax.jit(replay_loss_fn or loss_fn),
    )


def programs_on_mesh(loss_fn: LossFn, optimizer: Any, replay_loss_fn: LossFn | None, state: PyTree) -> Programs:
    """As ``programs_of``, with outputs where ``state`` (params, optimizer state, sums) lies.

    Otherwise the outputs of the first step could lie elsewhere than its donated inputs and the second would compile
    again.
    """
    at = jax.tree.map(lambda leaf: leaf.sharding, state)
    plain = programs_of(loss_fn, optimizer, replay_loss_fn)
    forward = forward_program(loss_fn, may_overflow=replay_loss_fn is not None)
    outside = (None,) if replay_loss_fn is None else (None, None)
    replay = None
    if replay_loss_fn is not None:
        replay = jax.jit(forward_program(replay_loss_fn), donate_argnums=1, out_shardings=(at[2], None))
    return Programs(
        init=plain.init,
        forward=jax.jit(forward, donate_argnums=1, out_shardings=(at[2], *outside)),
        replay=replay,
        update=jax.jit(update_program(optimizer), donate_argnums=(0, 1, 2), out_shardings=(*at, None, None)),
        evaluate=plain.evaluate,
    )


def forward_program(loss_fn: LossFn, *, may_overflow: bool = False) -> Callable[..., tuple[Any, ...]]:
    """(params, sums, batch) → (sums, token), or (sums, token, overflow flag) for a loss that may overflow."""

    def forward(params: PyTree, sums: PyTree, batch: Batch) -> tuple[Any, ...]:
        def loss_sum(params: PyTree) -> tuple[jax.Array, Any]:
            loss, *others = loss_fn(params, batch)
            return loss.astype(jnp.float32), others

        (loss, (denominator, metrics, *flag)), grads = jax.value_and_grad(loss_sum, has_aux=True)(params)
        new = {
            "grads": grads,
            "loss": loss,
            "denominator": denominator,
            "metrics": metrics,
        }
        if may_overflow:
            # selected, not multiplied: what dropped tokens made infinite must not reach the sums either
            new = jax.tree.map(lambda part: jnp.where(flag[0], jnp.zeros_like(part), part), new)
        total = jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new)
        # the token is an output of its own: the sums are donated to the next call and cannot be waited for
        return total, loss, *flag

    return forward


def update_program(optimizer: Any) -> Callable[..., Any]:
    """(params, optimizer state, sums) → (params, optimizer state, zeroed sums, metrics, token)."""

    def update(params: PyTree, opt_state: PyTree, sums: PyTree) -> tuple[Any, ...]:
        denominator = sums["denominator"]
        divisor = jnp.where(denominator > 0, denominator, 1.0)
        grads = jax.tree.map(lambda total, p: (total / divisor).astype(p.dtype), sums["grads"], params)
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
        changes, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, change: (p + change).astype(p.dtype), params, changes)
        metrics = {
            **{name: total / divisor for name, total in sums["metrics"].items()},
            "loss": sums["loss"] / divisor,
            "grad_norm": jnp.sqrt(sum(squares, jnp.float32(0))),
            # a copy, not the donated sum itself
            "denominator": denominator + 0,
        }
        token = divisor + 0
        return params, opt_state, jax.tree.map(jnp.zeros_like, sums), metrics, token

    return update


def metric_names(loss_fn: LossFn, params: PyTree, batch: PyTree, *, may_overflow: bool = False) -> list[str]:
    """The names of a loss function's own metrics, from a trace over a batch's shapes.

    Raises ``EngineError`` if it does not return what ``OptaxEngine`` wants.
    """
    returned = jax.eval_shape(loss_fn, params, dict(batch))
    who, last = getattr(loss_fn, "__name__", "loss_fn"), ", overflow" if may_overflow else ""
    if not isinstance(returned, tuple) or len(returned) != 3 + may_overflow:
        got = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise EngineError(f"{who} returned {got}; want (loss_sum, denominator, metrics{last})")
    loss, denominator, metrics, *flag = returned
    for name, value in {**metrics, "loss_sum": loss, "denominator": denominator}.items():
        if value.shape != ():
            raise EngineError(f"{who} returned {name} of shape {value.shape}; want a scalar sum")
    if flag and (flag[0].shape, flag[0].dtype) != ((), jnp.bool_):
        raise EngineError(f"{who} returned overflow {flag[0].dtype}{list(flag[0].shape)}; want bool[]")
    return sorted(metrics)

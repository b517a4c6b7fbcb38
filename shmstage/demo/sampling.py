"""Rollouts: completions drawn from the policy at temperature 1, with the log-probability of each draw."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shmstage.demo.model import Params, logits

# The whole prefix is computed for each token: no cache to keep right. Widths bound what that costs.
WIDTH_STEP = 40


@dataclass(frozen=True)
class Rollout:
    """``tokens`` int32 ``[n]``, prompt and completion; ``logps`` float32 ``[n]``, 0 in the prompt."""

    tokens: npt.NDArray[np.int32]
    logps: npt.NDArray[np.float32]
    prompt_length: int


def sample(
    params: Params, prompts: Sequence[npt.NDArray[np.int32]], key: jax.Array, *, end: int, max_tokens: int
) -> list[Rollout]:
    """One completion per prompt, up to and including the token ``end``, or to ``max_tokens`` in all.

    Temperature is 1 on purpose: only then is what was drawn from also what the loss computes log-probs of.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((len(prompts), max_tokens), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    logps = np.zeros(ids.shape, np.float32)
    done = np.zeros(len(prompts), bool)
    at = int(lengths.min())
    while at < max_tokens and not done.all():
        width = min(max_tokens, WIDTH_STEP * (at // WIDTH_STEP + 1))
        piece_ids, piece_logps, piece_done = _extend(
            params, ids[:, :width], logps[:, :width], done, lengths, key, at, end=end
        )
        ids[:, :width], logps[:, :width], done = piece_ids, piece_logps, np.asarray(piece_done)
        at = width
    return [_cut(ids[row], logps[row], int(lengths[row]), end) for row in range(len(prompts))]


@functools.partial(jax.jit, static_argnames="end")
def _extend(
    params: Params,
    ids: jax.Array,
    logps: jax.Array,
    done: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    first: jax.Array,
    *,
    end: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw tokens ``first`` and later of ``[sequences, width]`` arrays, until all are done."""
    width = ids.shape[1]
    segments = jnp.ones_like(ids)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), ids.shape)
    State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def more(state: State) -> jax.Array:
        at, _, _, done = state
        return (at < width) & ~jnp.all(done)

    def draw(state: State) -> State:
        at, ids, logps, done = state
        scores = logits(params, ids, segments, positions)[:, at - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, at), scores).astype(jnp.int32)
        logp = jnp.take_along_axis(jax.nn.log_softmax(scores), drawn[:, None], axis=1)[:, 0]
        # A longer prompt still gives its own token here. A finished sequence goes on; _cut() drops that.
        free = at >= lengths
        ids = ids.at[:, at].set(jnp.where(free, drawn, ids[:, at]))
        logps = logps.at[:, at].set(jnp.where(free, logp, 0.0))
        return at + 1, ids, logps, done | (free & (drawn == end))

    _, ids, logps, done = jax.lax.while_loop(more, draw, (jnp.asarray(first), ids, logps, done))
    return ids, logps, done


def _cut(ids: npt.NDArray[np.int32], logps: npt.NDArray[np.float32], prompt_length: int, end: int) -> Rollout:
    ends = np.flatnonzero(ids[prompt_length:] == end)
    length = prompt_length + int(ends[0]) + 1 if len(ends) else len(ids)
    return Rollout(ids[:length].copy(), logps[:length].copy(), prompt_length)

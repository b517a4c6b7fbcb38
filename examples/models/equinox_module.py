"""Your own model as an equinox module: a transformer of one block, parted into what is trained and what is not.

It learns the completions that did better than the others of their prompt. `python examples/models/equinox_module.py`
trains it in all boundary modes and in the reference loop and compares; for a run of its own, in this directory:
`shmstage run --engine equinox_module:make_engine`.
"""

import os
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from shmstage import OptaxEngine
from shmstage.cli import main

VOCABULARY, WIDTH, HEADS, LONGEST = 256, 64, 4, 1024


class Model(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    unembed: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.tokens = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.positions = eqx.nn.Embedding(LONGEST, WIDTH, key=keys[1])
        self.norms = [eqx.nn.RMSNorm(WIDTH) for _ in range(3)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[2])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, activation=jax.nn.gelu, key=keys[3])
        self.unembed = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[4])

    def __call__(self, ids, segments, positions):
        """Logits [tokens, vocabulary] of one row; a token sees those before it in its own segment: rows are packed."""
        seen = jnp.tril(segments[:, None] == segments[None, :])
        x = jax.vmap(self.tokens)(ids) + jax.vmap(self.positions)(positions)
        normed = jax.vmap(self.norms[0])(x)
        x += self.attention(normed, normed, normed, mask=seen)
        x += jax.vmap(lambda token: self.mlp(self.norms[1](token)))(x)
        return jax.vmap(lambda token: self.unembed(self.norms[2](token)))(x)


def make_engine(settings):
    """`settings` is the table [engine] of the TOML file, and checkpoint_dir."""
    model = Model(jax.random.key(settings.get("seed", 0)))
    # OptaxEngine holds the floating-point arrays; activation functions and the like stay with the loss
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        """Sums over the micro-batch, not means: the step divides once by the summed denominator."""
        ids, segments = batch["completion_ids"], batch["segment_ids"]
        logits = jax.vmap(eqx.combine(params, static))(ids, segments, batch["segment_positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        better = batch["completion_mask"] * (batch["advantages"] > 0)
        weight = better[:, 1:] * (segments[:, 1:] == segments[:, :-1])  # never from one trajectory into the next
        return (losses * weight).sum(), weight.sum(), {}

    optimizer = optax.adamw(settings.get("learning_rate", 3e-3))
    return OptaxEngine(loss_fn, params, optimizer, checkpoint_dir=settings["checkpoint_dir"])


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "equinox_module:make_engine", *sys.argv[1:]]))

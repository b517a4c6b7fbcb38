"""Your own model in flax nnx: a transformer of one block, split into what is trained and what is not.

It learns the completions that did better than the others of their prompt. `python examples/models/flax_nnx.py` trains
it in all boundary modes and in the reference loop and compares; for a run of its own, in this directory:
`shmstage run --engine flax_nnx:make_engine`.
"""

import os
import sys
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import nnx

from shmstage import OptaxEngine
from shmstage.cli import main

VOCABULARY, WIDTH, HEADS, LONGEST = 256, 64, 4, 1024


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.gelu, nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        )

    def __call__(self, ids, segments, positions):
        """Logits [rows, tokens, vocabulary]; a token sees those before it in its own segment: rows are packed."""
        same = nnx.make_attention_mask(segments, segments, jnp.equal, dtype=bool)
        seen = same & nnx.make_causal_mask(ids, dtype=bool)
        x = self.tokens(ids) + self.positions(positions)
        x += self.attention(self.norms[0](x), mask=seen)
        x += self.mlp(self.norms[1](x))
        return self.tokens.attend(self.norms[2](x))


def make_engine(settings):
    """`settings` is the table [engine] of the TOML file, and checkpoint_dir."""
    model = Model(nnx.Rngs(settings.get("seed", 0)))
    # OptaxEngine holds the parameters, an nnx.State; structure, random keys and statistics stay with the loss
    structure, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, batch):
        """Sums over the micro-batch, not means: the step divides once by the summed denominator."""
        ids, segments = batch["completion_ids"], batch["segment_ids"]
        logits = nnx.merge(structure, params, rest)(ids, segments, batch["segment_positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        better = batch["completion_mask"] * (batch["advantages"] > 0)
        weight = better[:, 1:] * (segments[:, 1:] == segments[:, :-1])  # never from one trajectory into the next
        return (losses * weight).sum(), weight.sum(), {}

    optimizer = optax.adamw(settings.get("learning_rate", 3e-3))
    return OptaxEngine(loss_fn, params, optimizer, checkpoint_dir=settings["checkpoint_dir"])


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "flax_nnx:make_engine", *sys.argv[1:]]))

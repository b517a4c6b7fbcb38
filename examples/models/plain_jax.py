"""Your own model in plain JAX with an optax optimizer: a transformer of one block.

It learns the completions that did better than the others of their prompt. `python examples/models/plain_jax.py` trains
it in all boundary modes and in the reference loop and compares; for a run of its own, in this directory:
`shmstage run --engine plain_jax:make_engine`.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shmstage import OptaxEngine
from shmstage.cli import main

VOCABULARY, WIDTH, HEADS, LONGEST = 256, 64, 4, 1024


def init(seed):
    random = np.random.default_rng(seed)

    def matrix(*shape):
        return random.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32)

    return {
        "tokens": matrix(VOCABULARY, WIDTH),
        "positions": matrix(LONGEST, WIDTH),
        "qkv": matrix(WIDTH, 3, HEADS, WIDTH // HEADS),
        "mixed": matrix(WIDTH, WIDTH),
        "mlp": {"in": matrix(WIDTH, 4 * WIDTH), "out": matrix(4 * WIDTH, WIDTH)},
    }


def logits(params, batch):
    """float32 [rows, tokens, vocabulary]; a token sees those before it in its own segment: rows are packed."""
    ids, segments = batch["completion_ids"], batch["segment_ids"]
    seen = jnp.tril(segments[:, :, None] == segments[:, None, :])
    x = params["tokens"][ids] + params["positions"][batch["segment_positions"]]
    query, key, value = jnp.einsum("rtd,dshw->srthw", normed(x), params["qkv"])
    mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
    x += mixed.reshape(x.shape) @ params["mixed"]
    x += jax.nn.gelu(normed(x) @ params["mlp"]["in"]) @ params["mlp"]["out"]
    return normed(x) @ params["tokens"].T


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss_fn(params, batch):
    """Sums over the micro-batch, not means: the step divides once by the summed denominator."""
    ids, segments = batch["completion_ids"], batch["segment_ids"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch)[:, :-1], ids[:, 1:])
    better = batch["completion_mask"] * (batch["advantages"] > 0)
    weight = better[:, 1:] * (segments[:, 1:] == segments[:, :-1])  # never from one trajectory into the next
    return (losses * weight).sum(), weight.sum(), {}


def make_engine(settings):
    """`settings` is the table [engine] of the TOML file, and checkpoint_dir."""
    params = init(settings.get("seed", 0))
    optimizer = optax.adamw(settings.get("learning_rate", 3e-3))
    return OptaxEngine(loss_fn, params, optimizer, checkpoint_dir=settings["checkpoint_dir"])


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "plain_jax:make_engine", *sys.argv[1:]]))

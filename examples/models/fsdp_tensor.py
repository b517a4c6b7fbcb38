"""Your own model over a mesh: parameters sharded over fsdp x tensor, micro-batches over fsdp; 8 virtual CPU devices.

It learns the completions that did better than the others of their prompt. `python examples/models/fsdp_tensor.py`
trains it in all boundary modes and in the reference loop and compares; for a run of its own, in this directory:
`shmstage run --engine fsdp_tensor:make_engine`.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shmstage import OptaxEngine
from shmstage.cli import main

VOCABULARY, WIDTH, HEADS, LONGEST = 256, 64, 4, 1024
#: name → shape and how it is cut: heads and hidden width over tensor, the width of the model over fsdp
PARAMETERS = {
    "tokens": ((VOCABULARY, WIDTH), P("tensor", "fsdp")),
    "positions": ((LONGEST, WIDTH), P(None, "fsdp")),
    "qkv": ((WIDTH, 3, HEADS, WIDTH // HEADS), P("fsdp", None, "tensor")),
    "mixed": ((HEADS, WIDTH // HEADS, WIDTH), P("tensor", None, "fsdp")),
    "mlp_in": ((WIDTH, 4 * WIDTH), P("fsdp", "tensor")),
    "mlp_out": ((4 * WIDTH, WIDTH), P("tensor", "fsdp")),
}


def logits(params, batch):
    """float32 [rows, tokens, vocabulary]; a token sees those before it in its own segment: rows are packed."""
    ids, segments = batch["completion_ids"], batch["segment_ids"]
    seen = jnp.tril(segments[:, :, None] == segments[:, None, :])
    x = params["tokens"][ids] + params["positions"][batch["segment_positions"]]
    query, key, value = jnp.einsum("rtd,dshw->srthw", normed(x), params["qkv"])
    mixed = jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])
    x += jnp.einsum("rthw,hwd->rtd", mixed, params["mixed"])
    x += jax.nn.gelu(normed(x) @ params["mlp_in"]) @ params["mlp_out"]
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
    jax.config.update("jax_num_cpu_devices", 8)  # before JAX first looks for devices; says nothing of accelerators
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    random = np.random.default_rng(settings.get("seed", 0))
    params = {
        name: jax.device_put(random.normal(scale=shape[0] ** -0.5, size=shape), NamedSharding(mesh, cut))
        for name, (shape, cut) in PARAMETERS.items()
    }
    optimizer = optax.adamw(settings.get("learning_rate", 3e-3))  # its moments lie as the parameters do
    return OptaxEngine(loss_fn, params, optimizer, mesh, P("fsdp"), checkpoint_dir=settings["checkpoint_dir"])


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).resolve().parent}:{os.environ.get('PYTHONPATH', '')}"
    sys.exit(main(["compare", "--engine", "fsdp_tensor:make_engine", *sys.argv[1:]]))

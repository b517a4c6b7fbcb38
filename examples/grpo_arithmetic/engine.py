"""`engine = "grpo_arithmetic.engine:make_engine"`: the demo's model and loss, rewards among the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_arithmetic.task import TASK
from safetensors import numpy as safetensors_numpy

from shmstage.demo.arithmetic import Problem, TaskConfig, make_problem
from shmstage.demo.loss import LossConfig, clipped_policy_gradient
from shmstage.demo.model import ModelConfig, Params, init
from shmstage.demo.warmup import warm_up
from shmstage.trainer.optax_engine import OptaxEngine

MODEL = ModelConfig(vocabulary=128, d_model=48, layers=2, heads=2, d_ff=192)
WARM_UP_STEPS = 300
#: of the sums in the warm-up so many are right: the form is learned well, the sums are not
RIGHT = 0.25


def make_engine(settings: Mapping[str, Any]) -> OptaxEngine:
    """`policy`: the file that `first_policy` wrote; `learning_rate`, reached after `ramp` steps."""
    loss = LossConfig()

    def loss_fn(
        params: Params, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        total, denominator, sums = clipped_policy_gradient(params, batch, loss)
        # a reward is the return of each of its completion's tokens; the last one of a segment speaks for it
        segments = batch["segment_ids"]
        last = (segments != jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))) & (segments != 0)
        # divided by the denominator like all metrics: reward / completions is the mean reward of the step
        sums |= {"reward": jnp.sum(jnp.where(last, batch["returns"], 0.0)), "completions": jnp.sum(1.0 * last)}
        return total, denominator, sums

    rate, ramp = float(settings.get("learning_rate", 2e-3)), int(settings.get("ramp", 10))
    # the first steps of Adam are as large as its later ones, whatever the gradient: they would undo the warm-up
    schedule = optax.linear_schedule(rate / ramp, rate, ramp)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    return OptaxEngine(loss_fn, load(Path(settings["policy"])), optimizer, checkpoint_dir=settings["checkpoint_dir"])


def first_policy(file: Path, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write the parameters that training starts from: warmed up on solutions most of which are wrong."""

    def badly_solved(rng: np.random.Generator, task: TaskConfig) -> Problem:
        problem = make_problem(rng, task)
        guessed = [
            step if rng.random() < RIGHT else f"{step.partition('=')[0]}={rng.integers(0, 10)}"
            for step in problem.steps
        ]
        return Problem(problem.prompt, tuple(guessed))

    params = warm_up(
        init(jax.random.key(seed), MODEL), np.random.default_rng(seed), TASK, steps=steps, tokens=48,
        report=lambda step, loss: None, problem=badly_solved,
    )  # fmt: skip
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(safetensors_numpy.save(flat))
    partial.replace(file)


def load(file: Path) -> Params:
    return nested(safetensors_numpy.load(file.read_bytes()))


def nested(flat: Mapping[str, np.ndarray[Any, Any]]) -> Params:
    """Parameters by path, as `WeightsReader` lends them, as the model's tree of copies."""
    params: Params = {}
    for name, array in flat.items():
        outer, _, inner = name.partition("/")
        leaf = jnp.asarray(np.array(array))
        if inner:
            params.setdefault(outer, {})[inner] = leaf
        else:
            params[outer] = leaf
    return params

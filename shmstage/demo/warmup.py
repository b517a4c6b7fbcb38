"""A minute of supervised training, so that the policy solves some problems and fails at others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from shmstage.demo.arithmetic import Problem, TaskConfig, encode, make_problem
from shmstage.demo.loss import loss_weights
from shmstage.demo.model import Params, per_token_logps
from shmstage.memory.layout import numpy_dtype
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory

PEAK_LEARNING_RATE = 4e-3
ROWS = 8
FIRST_TERMS = 4
CURRICULUM_SHARE = 0.5
PROBLEMS_PER_WINDOW = 64


def warm_up(
    params: Params,
    rng: np.random.Generator,
    task: TaskConfig,
    *,
    steps: int,
    tokens: int,
    report: Callable[[int, float], None],
    problem: Callable[[np.random.Generator, TaskConfig], Problem] = make_problem,
) -> Params:
    """``params`` after ``steps`` AdamW steps on worked solutions in ``[8, tokens]`` micro-batches.

    Chains begin short and reach the task's length half-way. ``report(step, loss)`` is called every 100 steps with the
    mean negative log-probability of a solution's token. ``problem`` makes what is learned, solution included.
    """
    if not steps:
        return params
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, min(50, steps), max(steps, 51), PEAK_LEARNING_RATE * 0.05
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))
    state = optimizer.init(params)

    @jax.jit
    def train(
        params: Params, state: optax.OptState, batch: Mapping[str, jax.Array]
    ) -> tuple[Params, optax.OptState, jax.Array]:
        def loss_of(params: Params) -> jax.Array:
            weights = loss_weights(batch)
            return -jnp.sum(per_token_logps(params, batch) * weights) / jnp.sum(weights)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    for step, batch in enumerate(_batches(rng, task, steps, tokens, problem), 1):
        params, state, loss = train(params, state, batch)
        if step % 100 == 0 or step == steps:
            report(step, float(loss))
    return params


def _batches(
    rng: np.random.Generator,
    task: TaskConfig,
    steps: int,
    tokens: int,
    problem: Callable[[np.random.Generator, TaskConfig], Problem],
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    layout = microbatch_layout(ROWS, tokens)
    planner = Planner(PlanSettings(rows=ROWS, tokens=tokens))
    held: dict[int, Trajectory] = {}
    made = arrival = 0
    while True:
        progress = min(1.0, made / (CURRICULUM_SHARE * steps))
        terms = FIRST_TERMS + round(progress * (task.max_terms - FIRST_TERMS))
        for _ in range(PROBLEMS_PER_WINDOW):
            held[arrival] = _solved(problem(rng, replace(task, max_terms=terms)), arrival)
            planner.add(arrival, held[arrival].length)
            arrival += 1
        for plan in planner.close_window():
            # Fresh arrays each time: on CPU JAX may go on reading these instead of a copy.
            views = {field.name: np.empty(field.shape, numpy_dtype(field.dtype)) for field in layout.fields}
            fill_microbatch(plan, held, views)
            for done in plan.arrivals:
                del held[done]
            yield views
            made += 1
            if made == steps:
                return


def _solved(problem: Problem, number: int) -> Trajectory:
    prompt, solution = encode(problem.prompt), encode(problem.solution)
    tokens = np.concatenate([prompt, solution])
    zeros = np.zeros(len(tokens), np.float32)
    mask = zeros.copy()
    mask[len(prompt) :] = 1
    return Trajectory(
        trajectory_id=f"solved-{number}", tokens=tokens, loss_mask=mask, advantages=zeros, old_logprobs=zeros
    )

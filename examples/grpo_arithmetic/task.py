"""What is learned, and with which numbers: one place for the trainer, the rollout workers and the source. No jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shmstage.demo.arithmetic import Problem, TaskConfig, make_problem
from shmstage.errors import SettingsError

#: `5a+4=` and `a+4=9;`, and one token that a policy may waste
MAX_TOKENS = 12
SEGMENTS_PER_ROW = 4
#: a worker's version for an answer without rollouts: the pool is gone, with its trainer, and there is no other one yet
NO_WEIGHTS = -1


@dataclass(frozen=True)
class Rollouts:
    """The `[source]` table. A batch is what one step trains: `prompts_per_batch` prompts of `group_size` completions.

    `max_staleness` n: what step k trains was sampled with weights of a version from k-1-n to k-1; version v are the
    weights after update v, 0 the first ones. `stop_at`: the input ends when the mean reward of `stop_after` batches
    running has reached it; 0: never. `kill_at` names a prompt whose worker is killed at it, once; -1: none.
    """

    workers: int = 2
    prompts_per_batch: int = 32
    prompts_per_call: int = 16
    group_size: int = 8
    max_staleness: int = 1
    seed: int = 0
    stop_at: float = 0.0
    stop_after: int = 5
    max_restarts: int = 3
    weights_timeout_s: float = 300.0
    call_timeout_s: float = 300.0
    kill_at: int = -1

    def __post_init__(self) -> None:
        least: dict[str, float] = dict.fromkeys(("seed", "max_staleness", "stop_at", "max_restarts"), 0)
        least |= {"kill_at": -1, "group_size": 2, "weights_timeout_s": 0.001, "call_timeout_s": 0.001}
        for field in fields(self):
            value, low = getattr(self, field.name), least.get(field.name, 1)
            kinds, said = ((int,), "a whole number") if field.type == "int" else ((int, float), "a number")
            if type(value) not in kinds or not value >= low:
                raise SettingsError(f"source setting {field.name} = {value!r}: give {said} of at least {low}")
        if self.prompts_per_batch % self.prompts_per_call:
            raise SettingsError(
                f"prompts_per_batch = {self.prompts_per_batch} is no multiple of prompts_per_call = "
                f"{self.prompts_per_call}: every call has the same shape"
            )

    @property
    def trajectories(self) -> int:
        return self.prompts_per_batch * self.group_size

    def oldest_version(self, batch: int) -> int:
        """Batch b, from 0, is trained in step b + 1: the oldest weights that may sample it."""
        return max(0, batch - self.max_staleness)


def rollouts_of(settings: Mapping[str, Any]) -> Rollouts:
    """The checked table. Raises `SettingsError`."""
    known = {field.name for field in fields(Rollouts)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise SettingsError(f"unknown source settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return Rollouts(**settings)


def shape_of(rollouts: Rollouts, microbatches_per_step: int) -> dict[str, int]:
    """Settings of the run with which a batch fills a step exactly, whatever lengths its completions have.

    A row takes `SEGMENTS_PER_ROW` completions of the greatest length, and never more of them. With less room, or more
    rows, what is left of a batch would wait for the next one, which is not sampled before this one is trained.
    """
    rows, rest = divmod(rollouts.trajectories, SEGMENTS_PER_ROW * microbatches_per_step)
    if rest:
        raise SettingsError(
            f"{rollouts.trajectories} trajectories do not divide into {microbatches_per_step} micro-batches of rows of "
            f"{SEGMENTS_PER_ROW}"
        )
    return {
        "rows": rows,
        "tokens": SEGMENTS_PER_ROW * MAX_TOKENS,
        "max_segments_per_row": SEGMENTS_PER_ROW,
        "microbatches_per_step": microbatches_per_step,
    }


def fields_of(rollouts: Rollouts) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What one call gives back: `prompts_per_call` groups, padded to the greatest length."""
    shape = (rollouts.prompts_per_call, rollouts.group_size)
    return {
        "call_and_version": ("int64", (2,)),
        "tokens": ("int32", (*shape, MAX_TOKENS)),
        "logps": ("float32", (*shape, MAX_TOKENS)),
        "length": ("int32", shape),
        "prompt_length": ("int32", shape),
        "reward": ("float32", shape),
        "advantage": ("float32", shape),
    }


TASK = TaskConfig(min_terms=2, max_terms=2, max_term=3, max_total=4)


def problem_of(seed: int, prompt: int) -> Problem:
    """Prompt number `prompt` of the run, the same in every process."""
    return make_problem(np.random.default_rng((seed, prompt)), TASK)

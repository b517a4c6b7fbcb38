"""Input for benchmarks: micro-batches of a given shape whose rows are full, and a hook that takes its time.

What arrives when: all trajectories are in the orchestrator's memory before the first step, as in the reference's rig,
which replays frozen ones. So nobody ever waits for a rollout, and a boundary shows the boundary. What the reference
calls the payload's arrival, from the orchestrator to the trainer's host, is the business of whoever carries it.

``source = "shmstage.testing.simulated_input:make_source"``, ``hooks = "shmstage.testing.simulated_input:make_hooks"``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from shmstage.errors import SettingsError
from shmstage.packing.trajectory import Group, Trajectory

GROUP_SIZE = 8


@final
@dataclass(frozen=True)
class InputSettings:
    """The ``[source]`` table: ``microbatches`` different ones of ``[rows, tokens]``; ``layers`` = 0: no routing.

    ``routings``: how many trajectories have routing of their own, which the others have again (all else still tells
    them apart): memory for very large ones; 0: all.
    """

    rows: int
    tokens: int
    microbatches: int = 3
    layers: int = 0
    top_k: int = 0
    experts: int = 0
    routings: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.routings < 0:
            raise SettingsError(f"[source] routings = {self.routings}; give 0 or more")
        if self.layers and not 0 < 7 * self.top_k <= self.experts:
            raise SettingsError(f"[source] experts = {self.experts}: top_k = {self.top_k} needs 7 * top_k or more")


def make_source(settings: Mapping[str, Any]) -> SimulatedSource:
    """The factory. Raises ``SettingsError``."""
    try:
        return SimulatedSource(InputSettings(**settings))
    except TypeError as error:
        raise SettingsError(f"[source] {error}; want {', '.join(InputSettings.__annotations__)}") from None


@final
class SimulatedSource:
    """The same trajectories in any process; each fills a row."""

    replayable = True

    def __init__(self, settings: InputSettings) -> None:
        count = settings.microbatches * settings.rows
        own = min(settings.routings or count, count) if settings.layers else 0
        routings = [_routing(settings, number) for number in range(own)]
        made = [_trajectory(settings, number, routings[number % own] if own else None) for number in range(count)]
        self._groups = [
            Group(f"g{start}", start // settings.rows, tuple(made[start : start + GROUP_SIZE]))
            for start in range(0, count, GROUP_SIZE)
        ]

    def groups(self, cursor: int) -> Iterator[Group]:
        return iter(self._groups[cursor:])


def _routing(settings: InputSettings, number: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    random = np.random.default_rng([settings.seed, number, 1])
    first = random.integers(0, settings.experts, (settings.tokens, settings.layers, 1), np.int16)
    ids = first + 7 * np.arange(settings.top_k, dtype=np.int16)
    return np.remainder(ids, np.int16(settings.experts), out=ids)


def _trajectory(
    settings: InputSettings, number: int, routing: np.ndarray[Any, np.dtype[np.int16]] | None
) -> Trajectory:
    random = np.random.default_rng([settings.seed, number])
    n = settings.tokens
    mask = np.ones(n, np.float32)
    mask[: n // 4] = 0.0
    return Trajectory(
        trajectory_id=f"t{number}",
        group_id=f"g{number - number % GROUP_SIZE}",
        batch_index=number // settings.rows,
        tokens=random.integers(0, 50_000, n, np.int32),
        loss_mask=mask,
        advantages=random.standard_normal(n, np.float32),
        old_logprobs=-random.random(n, np.float32),
        routing=routing,
        experts=settings.experts if settings.layers else 0,
    )


def make_hooks(settings: Mapping[str, Any]) -> SlowBookkeeping:
    """The factory; one setting, ``bookkeeping_s``."""
    return SlowBookkeeping(float(settings.get("bookkeeping_s", 0.0)))


@final
class SlowBookkeeping:
    """What a program does at the end of a step: metrics, logs, exporters."""

    def __init__(self, bookkeeping_s: float) -> None:
        self._bookkeeping_s = bookkeeping_s

    def on_step_end(self, line: Mapping[str, Any]) -> None:
        time.sleep(self._bookkeeping_s)

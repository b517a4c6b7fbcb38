"""One random path after the other through runs too long to be walked exhaustively, against the same invariants."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shmstage.settings import BOUNDARIES
from walk import facts as at
from walk.cases import DISTURBANCES, Case
from walk.facts import described
from walk.invariants import ViolationError
from walk.machine import Machine
from walk.world import World

#: how often a disturbance is taken where one is possible
DISTURBED = 0.01


def random_case(dice: random.Random, *, most_steps: int = 12, most_microbatches: int = 9) -> Case:
    """Any configuration at all."""
    checkpoint_every = dice.choice((0, 1, 3))
    return Case(
        dice.choice(BOUNDARIES), dice.randint(1, most_steps), dice.randint(1, most_microbatches),
        trainer=dice.choice(("tokens", "blocks", "waits")), replay=dice.random() < 0.5,
        late=dice.choice(("none", "recompute", "reference", "both")), checkpoint_every=checkpoint_every,
        sync=dice.choice(("off", "async", "sync")), known_end=dice.random() < 0.7, free_end=dice.random() < 0.2,
        slots=dice.choice((2, 3)), buffers=dice.choice((2, 3)), hook=bool(checkpoint_every) and dice.random() < 0.3,
        eval_every=dice.choice((0, 0, 2)), deadline=dice.random() < 0.2, tight=dice.random() < 0.2,
        disturbances=frozenset(DISTURBANCES), budget=dice.randint(0, 3), fine=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Path:
    """How a path ended and how many events it took."""

    events: int
    end: str


def random_path(case: Case, dice: random.Random) -> Path:
    """Follow one path to its end. Raises ``ViolationError``."""
    world = World(case, Machine())
    state = world.begin()
    trace: list[str] = []
    while True:
        budget = state[at.BUDGET] if len(state) > 1 else 0
        try:
            steps = world.successors(state)
        except ViolationError as error:
            error.trace = [*trace, described(state)]
            raise
        if not steps:
            return Path(len(trace), state[0])
        plain = [step for step in steps if len(step[1]) == 1 or step[1][at.BUDGET] == budget]
        early_end = [step for step in plain if step[0] != "end of input" or dice.random() < DISTURBED]
        label, state = dice.choice((early_end or plain or steps) if dice.random() > DISTURBED else steps)
        trace.append(label)

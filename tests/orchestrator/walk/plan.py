"""Which configurations are walked. Each group is a list of cases; those that share a schedule configuration are next
to each other, because they share what the machine has remembered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from shmstage.settings import Boundary, WeightSync
from walk.cases import DISTURBANCES, Case, Late, Trainer

Size = tuple[int, int]

SIZES: tuple[Size, ...] = tuple(product((1, 2, 3), (1, 2, 3)))
SMALL: tuple[Size, ...] = ((1, 1), (2, 2))
LATES: tuple[Late, ...] = ("none", "recompute", "reference", "both")
ALL = frozenset(DISTURBANCES)


def product_of_settings(mode: Boundary, sizes: tuple[Size, ...], *, known_end: bool = True) -> Iterator[Case]:
    """The whole cross product, undisturbed but for an input that may end anywhere."""
    syncs: tuple[WeightSync, ...] = ("off", "async", "sync")
    trainers: tuple[Trainer, ...] = ("tokens", "blocks")
    for (steps, microbatches), late, checkpoint_every, sync in product(sizes, LATES[:3], (0, 1), syncs):
        for trainer, replay in product(trainers, (False, True)):
            yield Case(
                mode, steps, microbatches, trainer=trainer, replay=replay, late=late,
                checkpoint_every=checkpoint_every, sync=sync, known_end=known_end,
            )  # fmt: skip


#: (checkpoint_every, sync, hook): what is owed at a boundary
_DUTIES: tuple[tuple[int, WeightSync, bool], ...] = (
    (0, "off", False), (1, "async", True), (2, "sync", False), (1, "off", False),
)  # fmt: skip
#: (trainer, replay, slots, buffers, known_end, eval_every, deadline, tight): what surrounds it
_AROUND: tuple[tuple[Trainer, bool, int, int, bool, int, bool, bool], ...] = (
    ("tokens", False, 3, 2, True, 0, False, False),
    ("tokens", True, 2, 2, False, 1, False, True),
    ("blocks", True, 3, 3, True, 0, True, False),
    ("waits", False, 2, 3, False, 2, True, True),
)


def what_befalls(mode: Boundary, size: Size) -> frozenset[str]:
    """All that can go wrong but for what changes nothing there and doubles the states.

    A reply that comes twice is dropped by the client whatever the run's length; without staging nobody asks the latch.
    """
    left_out = set()
    if size[0] * size[1] > 2:
        left_out.add("reply late")
    if not mode.startswith("staged"):
        left_out.add("latch")
    return ALL - left_out


def disturbed(
    mode: Boundary, sizes: tuple[Size, ...], *, lates: tuple[Late, ...] = LATES, budget: int = 1, fine: bool = False
) -> Iterator[Case]:
    """Everything that can go wrong, ``budget`` times on a path.

    Sizes, late fields and duties are crossed; of what is around them each combination gets one, in turn.
    """
    for turn, ((steps, microbatches), late, duties) in enumerate(product(sizes, lates, _DUTIES)):
        checkpoint_every, sync, hook = duties
        trainer, replay, slots, buffers, known_end, eval_every, deadline, tight = _AROUND[(turn + turn // 4) % 4]
        yield Case(
            mode, steps, microbatches, trainer=trainer, replay=replay, late=late, checkpoint_every=checkpoint_every,
            sync=sync, known_end=known_end, slots=slots, buffers=buffers, hook=hook, eval_every=eval_every,
            deadline=deadline, tight=tight, disturbances=what_befalls(mode, (steps, microbatches)), budget=budget,
            fine=fine,
        )  # fmt: skip


def twice_disturbed(mode: Boundary) -> Iterator[Case]:
    """Two things go wrong on one path."""
    yield from disturbed(mode, ((1, 1), (1, 2)), budget=2)
    yield from disturbed(mode, ((2, 1),), lates=("recompute",), budget=2)


def large(mode: Boundary) -> Iterator[Case]:
    """Three steps of three micro-batches with everything that can go wrong once."""
    befalls = what_befalls(mode, (3, 3))
    yield Case(mode, 3, 3, checkpoint_every=2, sync="async", disturbances=befalls, budget=1, replay=True)
    yield Case(
        mode, 3, 3, checkpoint_every=1, sync="sync", hook=True, late="both", disturbances=befalls, budget=1,
        known_end=False,
    )  # fmt: skip

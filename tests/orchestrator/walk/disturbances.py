"""What may befall a run from outside or inside; each spends one of the path's ``budget``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from walk import deliveries, trainer
from walk import facts as at
from walk.facts import Facts, State, Step

if TYPE_CHECKING:
    from walk.world import World


def disturbances(world: World, state: State) -> list[Step]:
    allowed = world.case.disturbances
    steps: list[Step] = []
    if "stop" in allowed and not state[at.STOPPED]:
        steps.append(_event(world, state, "stop", at.STOPPED, "stop"))
    if "memory" in allowed and not state[at.WANTED]:
        steps.append(_event(world, state, "memory wants a checkpoint", at.WANTED, "want_checkpoint"))
    if "latch" in allowed:
        now = world.machine.state(state[at.SCHEDULE]).latch
        for latch in ("on", "after_update", "off"):
            if latch != now:
                steps.append(_event(world, state, f"latch {latch}", at.LATCHED, "latch", latch))
    if "hook ends" in allowed:
        for step in state[at.HOOKS]:
            if deliveries.may_speak(world, state, step):
                w = spent(state)
                deliveries.verdict(w, world, step, False)
                steps.append((f"hook {step} ends the run", tuple(w)))
    if "crash" in allowed:
        steps += _crashes(world, state)
    if not state[at.OUTBOX] and not state[at.GATE]:
        steps += _failures(world, state)
    return steps


def spent(state: State | Facts) -> Facts:
    """A copy of the state with one disturbance less to come."""
    w = list(state)
    w[at.BUDGET] -= 1
    return w


def ignore_duplicate(w: Facts) -> None:
    """A reply with a sequence that was answered before: the client drops it."""
    w[at.DUPLICATE] = 0


def _event(world: World, state: State, label: str, place: int, event: str, *told: str) -> Step:
    w = spent(state)
    w[place] = 1
    world.tell(w, event, *told)
    return label, tuple(w)


def _crashes(world: World, state: State) -> list[Step]:
    """Trainer or orchestrator dies. A checkpoint on its way may have become durable, weights may be known of or not.

    A killed trainer leaves any prefix of what it was writing; a living one finishes it before the choice. A new
    orchestrator learns of published weights from the trainer, a living one from events, so both may be the floor.
    """
    bad = state[at.BAD]
    written = [step for step in state[at.WRITES] if step != bad]
    written += [step for kind, step in state[at.COPIES] if kind == "checkpoint" and step != bad]
    published = [step for kind, step in state[at.COPIES] if kind == "weights" and step != bad]
    published += [name[1] for what, name in state[at.OUTBOX] if what == "ticket" and name[0] == "weights"]
    steps: list[Step] = []
    for restored in sorted({state[at.DURABLE], *written}):
        for floor in sorted({state[at.PUBLISHED], *published}):
            label = f"crash, restored {restored}, published {floor}"
            budget = state[at.BUDGET] - 1
            life = world.life(restored=restored, floor=floor, total=state[at.TOTAL], budget=budget)
            steps.append((label, life))
            if restored in state[at.VERDICTS] and "hook ends" in world.case.disturbances:
                label += ", its hook had ended the run"
                steps.append(world.told(life, label, deliveries.verdict, world, restored, False))
    return steps


def _failures(world: World, state: State) -> list[Step]:
    """The next thing a stream does is not ok."""
    allowed = world.case.disturbances
    heads: list[tuple[Any, Any]] = []
    if "upload failed" in allowed and state[at.UPLOADS]:
        heads.append((state[at.UPLOADS][0], trainer.upload_ready))
    if "token failed" in allowed and state[at.QUEUE] and state[at.QUEUE][0][0] in "FRU":
        heads.append((state[at.QUEUE][0], trainer.compute_ready))
    if "ticket failed" in allowed:
        if state[at.COPIES]:
            heads.append((state[at.COPIES][0], trainer.copy_ready))
        if state[at.WRITES]:
            heads.append((("checkpoint", state[at.WRITES][0]), trainer.write_ready))
    steps: list[Step] = []
    for event, ready in heads:
        w = spent(state)
        ready(world.case, w, fails=True)
        steps.append((f"{deliveries.named(event)} fails", tuple(w)))
    return steps

"""Calls of the trainer: their effect, their return, and how the way there and back can fail."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from shmstage.orchestrator.schedule import SCORE, Command, Kind
from walk import deliveries, disturbances, invariants, trainer
from walk import facts as at
from walk.facts import FAILED, FINISHED, Facts, State, Step
from walk.invariants import require

if TYPE_CHECKING:
    from walk.world import World


def issue(world: World, state: State, command: Command, in_flight: int) -> list[Step]:
    """The schedule's next command is carried out; ``in_flight`` is the schedule's state meanwhile."""
    label = f"{command.kind.value} {command.step}"
    if command.index >= 0:
        label += f".{command.index}{' deferred' if command.defer_update else ''}"
    begun = list(state)
    begun[at.SCHEDULE] = in_flight
    if command.kind is Kind.BOOKKEEP:
        invariants.on_bookkeep(world.case, begun, command.step)
        begun[at.BOOKED] = command.step
        world.tell(begun, "returned", command)
        return [(label, tuple(begun))]
    if command.kind is Kind.FINISH:
        return _finish(world, begun, command)
    steps: list[Step] = []
    for overflows in product((0, 1), repeat=trainer.settle_count(world.case, begun, command)):
        w = list(begun)
        said = f"{label} overflowed={overflows}" if any(overflows) else label
        try:
            trainer.execute(world.case, w, command, overflows)
        except trainer.GateError:
            return [(f"{said} refused", FAILED)]
        executed = list(w)
        world.tell(w, "returned", command)
        steps.append((said, tuple(w)))
        if state[at.BUDGET]:
            steps += _disturbed(world, begun, executed, command, said)
    return steps


def _finish(world: World, w: Facts, command: Command) -> list[Step]:
    """The program waits for tickets and verdicts, saves the last step if it must, and shuts the trainer down."""
    case = world.case
    discards = w[at.ENDING] == "hook"
    while not discards and (w[at.COPIES] or w[at.WRITES] or w[at.OUTBOX]):
        if not w[at.OUTBOX]:
            (trainer.copy_ready if w[at.COPIES] else trainer.write_ready)(case, w)
        elif not deliveries.deliver(world, w):
            return [("finish: a ticket failed", FAILED)]
    steps: list[Step] = []
    if w[at.HOOKS] and w[at.BUDGET] and "hook ends" in case.disturbances:
        ended = list(w)
        deliveries.verdict(ended, world, w[at.HOOKS][0], False)
        steps.append(("finish: the hook ends the run", _over(world, ended, command)))
    while w[at.HOOKS] and not discards:
        deliveries.verdict(w, world, w[at.HOOKS][0], True)
    return [*steps, ("finish", _over(world, w, command))]


def _over(world: World, w: Facts, command: Command) -> State:
    state = world.machine.state(w[at.SCHEDULE])
    require(state.in_flight == command, "ends", f"an event took {command} back")
    world.tell(w, "returned", command)
    require(world.machine.state(w[at.SCHEDULE]).done, "ends", "the schedule goes on after FINISH")
    saved = state.saved
    if w[at.ENDING] != "hook" and not w[at.COUNT]:
        saved = max(saved, w[at.UPDATED])  # Program._save_last
    invariants.on_finished(world.case, w, saved)
    return FINISHED


# --- the way there and back ---------------------------------------------------------------------------------


def _disturbed(world: World, begun: Facts, executed: Facts, command: Command, label: str) -> list[Step]:
    """``begun``: the call is on its way; ``executed``: it took effect and the reply is on its way back."""
    allowed = world.case.disturbances
    steps: list[Step] = []
    if command.kind is Kind.STAGE:
        if "stage lost" in allowed:
            # not begun: the higher sequence of the next command cancels it. Executed: the stage is there, unknown
            for before, said in ((begun, "not begun"), (executed, "executed")):
                w = disturbances.spent(before)
                w[at.UNSTAGED] = 1
                world.tell(w, "stage_lost", command)
                steps.append((f"{label} lost, {said}", tuple(w)))
        if "stage raised" in allowed:
            w = disturbances.spent(begun)
            w[at.ENDING] = "inside" if w[at.COUNT] and not w[at.DEFERRED] else "stage"
            world.tell(w, "stage_raised", command)
            steps.append((f"{label} raised", tuple(w)))
    if "score raised" in allowed and command.kind in SCORE:
        w = disturbances.spent(begun)
        world.tell(w, "returned", command)
        goes_on = world.tell(w, "late_field_failed", command.key)
        w[at.ENDING] = "score"
        steps.append((f"{label} raised", tuple(w) if goes_on else FAILED))
    if "reply lost" in allowed:
        for before, done in ((begun, False), (executed, True)):
            w = disturbances.spent(before)
            w[at.CALL] = (command, done)
            steps.append((f"{label}: {'reply' if done else 'request'} lost", tuple(w)))
    if "reply late" in allowed:
        w = disturbances.spent(executed)
        w[at.DUPLICATE] = 1
        world.tell(w, "returned", command)
        steps.append((f"{label} answered twice", tuple(w)))
    return steps


def retry(world: World, state: State) -> list[Step]:
    """The same sequence again: executed if it never arrived, else joined or answered from the cache."""
    command, done = state[at.CALL]
    steps: list[Step] = []
    choices = 0 if done else trainer.settle_count(world.case, list(state), command)
    for overflows in product((0, 1), repeat=choices):
        w = list(state)
        w[at.CALL] = None
        try:
            if not done:
                trainer.execute(world.case, w, command, overflows)
        except trainer.GateError:
            return [(f"retry of {command.kind.value}: refused", FAILED)]
        world.tell(w, "returned", command)
        how = "answered from the cache" if done else "executed"
        steps.append((f"retry of {command.kind.value}: {how}", tuple(w)))
    return steps

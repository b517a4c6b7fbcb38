"""Events of the trainer on their way to the schedule: when they may come, and what the program makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmstage.orchestrator.schedule import Kind
from walk import facts as at
from walk import invariants, trainer
from walk.cases import Case
from walk.coarse import matters
from walk.facts import FAILED, Facts, State, Step
from walk.invariants import require

if TYPE_CHECKING:
    from walk.world import World

ROLE_KINDS = {"ref": Kind.SCORE_REFERENCE, "act": Kind.SCORE_ACTOR}


def deliverable(world: World, state: State) -> list[Step]:
    """One transition per stream whose next event the schedule may be told now."""
    return (_each if world.case.fine else _those_that_matter)(world, state)


def _each(world: World, state: State) -> list[Step]:
    case = world.case
    if state[at.OUTBOX]:
        w = list(state)
        return [(f"told {named(state[at.OUTBOX][0])}", through(world, w, 1))]
    heads: list[tuple[str, Any, Any]] = []
    if state[at.UPLOADS]:
        heads.append(("ready", state[at.UPLOADS][0], trainer.upload_ready))
    if state[at.QUEUE]:
        what, name = state[at.QUEUE][0]
        if what != "F" or not any(key == name for _, key in state[at.UPLOADS]):
            heads.append(("ready", state[at.QUEUE][0], trainer.compute_ready))
    if state[at.COPIES] and trainer.needed_by_copy(state) not in state[at.QUEUE]:
        heads.append(("copied", state[at.COPIES][0], trainer.copy_ready))
    if state[at.WRITES]:
        heads.append(("durable", ("checkpoint", state[at.WRITES][0]), trainer.write_ready))
    steps = []
    for said, event, ready in heads:
        w = list(state)
        ready(case, w)
        steps.append((f"{said} {named(event)}", through(world, w, len(w[at.OUTBOX]))))
    return steps


def _those_that_matter(world: World, state: State) -> list[Step]:
    case = world.case
    if state[at.OUTBOX]:
        return [(f"told {named(state[at.OUTBOX][0])}", through(world, list(state), 1))]
    steps: list[Step] = []
    for count, item in enumerate(state[at.QUEUE], start=1):
        if matters(case, item):
            w = list(state)
            for _ in range(count):
                trainer.compute_ready(case, w)
            steps.append((f"ready {named(item)}", through(world, w, len(w[at.OUTBOX]))))
            break
    ticket = _copies_up_to_one_that_matters(world, state)
    if ticket is not None:
        steps.append(ticket)
    if case.hook and state[at.WRITES]:
        w = list(state)
        trainer.write_ready(case, w)
        steps.append((f"durable {state[at.WRITES][0]}", through(world, w, len(w[at.OUTBOX]))))
    return steps


def _copies_up_to_one_that_matters(world: World, state: State) -> Step | None:
    case = world.case
    w = list(state)
    for ticket in state[at.COPIES]:
        if not _may_copy(case, w):
            return None
        trainer.copy_ready(case, w)
        if matters(case, ("ticket", ticket)):
            while ticket[0] == "checkpoint" and w[at.WRITES]:
                trainer.write_ready(case, w)
            return f"ticket {named(ticket)}", through(world, w, len(w[at.OUTBOX]))
    return None


def _may_copy(case: Case, w: Facts) -> bool:
    """No event that matters comes before its cause: that one is told first, in a transition of its own."""
    needed = trainer.needed_by_copy(w)
    for item in w[at.QUEUE]:
        if matters(case, item):
            return False
        if item == needed:
            return True
    return True


# --- what the program does with them ------------------------------------------------------------------------


def through(world: World, w: Facts, count: int) -> State:
    """The oldest ``count`` events are taken, in order."""
    for _ in range(count):
        if not deliver(world, w):
            return FAILED
    return tuple(w)


def deliver(world: World, w: Facts) -> bool:
    """The oldest event reaches the program, which tells the schedule; ``False`` if it ends the run at once."""
    what, name = w[at.OUTBOX][0]
    w[at.OUTBOX] = w[at.OUTBOX][1:]
    if what == "F":
        world.tell(w, "finished", *name)
    elif what == "U":
        w[at.LANDED] = name
        world.tell(w, "landed", name)
    elif what == "ticket":
        _on_ticket(world, w, *name)
    elif what in ("up failed", "patch failed"):
        if not world.tell(w, "stage_failed_later", *name):
            return False
        w[at.ENDING] = "inside" if w[at.COUNT] and not w[at.DEFERRED] else "upload"
    elif what == "ticket failed":
        kind, of = name
        if not world.tell(w, "late_field_failed" if kind in ROLE_KINDS else "ticket_failed", of):
            return False
        late = kind in ROLE_KINDS or w[at.UPDATED] > of
        require(late, "stop", f"{kind} {of} failed before update {w[at.UPDATED] + 1}, and the run goes on")
        w[at.ENDING] = w[at.ENDING] or f"{kind} failed"
        _carry_on_without(world, w, kind, of)
    elif what.endswith("failed"):
        return False
    return True


def _on_ticket(world: World, w: Facts, kind: str, name: Any) -> None:
    if kind == "metrics":
        require(w[at.LANDED] >= name, "4 metrics", f"metrics {name} resolved before update {name} landed")
        world.tell(w, "metrics_ready", name)
    elif kind == "checkpoint":
        require(w[at.LANDED] >= name, "5 checkpoint", f"checkpoint {name} is durable before update {name} landed")
        if world.case.hook:
            w[at.HOOKS] += (name,)
    elif kind == "weights":
        require(w[at.LANDED] >= name, "weights", f"weights {name} are published before update {name} landed")
        w[at.PUBLISHED] = name
        world.tell(w, "weights_published", name)
    elif kind in ROLE_KINDS:
        world.tell(w, "late_field_ready", ROLE_KINDS[kind], name)


def _carry_on_without(world: World, w: Facts, kind: str, of: Any) -> None:
    """What the program does so that the run can come to its end without the value of a ticket."""
    if kind == "metrics":
        world.tell(w, "metrics_ready", of)
    elif kind == "checkpoint" and world.case.hook:
        w[at.VERDICTS] = tuple(step for step in w[at.VERDICTS] if step != of)
        world.tell(w, "hook_returned", of, go_on=True)


# --- hooks --------------------------------------------------------------------------------------------------


def verdicts(world: World, state: State) -> list[Step]:
    return [
        world.told(state, f"hook {step} goes on", verdict, world, step, True)
        for step in state[at.HOOKS]
        if may_speak(world, state, step)
    ]


def may_speak(world: World, state: State, step: int) -> bool:
    """A hook is asked once all that is known of its step is there, the evaluation included."""
    owes = "eval" in invariants.owed(world.case, list(state), step)
    return not owes or state[at.UPDATED] > step or "eval" in state[at.DONE]


def verdict(w: Facts, world: World, step: int, go_on: bool) -> None:
    w[at.HOOKS] = tuple(s for s in w[at.HOOKS] if s != step)
    w[at.VERDICTS] = tuple(s for s in w[at.VERDICTS] if s != step)
    world.tell(w, "hook_returned", step, go_on=go_on)
    if not go_on:
        w[at.ENDING] = "hook"


def named(event: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in event)

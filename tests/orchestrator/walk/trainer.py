"""The trainer as BOUNDARY.md and DESIGN.md tell it, not as it is written: commands, streams, refusals.

Readiness is lazy: what a stream does is settled when something sees it (an event is delivered, a call that blocks
returns, a slot is wanted). Until then "ready" and "not yet ready" differ in nothing, and the later choice covers both.
"""

from __future__ import annotations

from shmstage.orchestrator.schedule import Command, Key, Kind
from walk import facts as at
from walk import invariants
from walk.cases import Case
from walk.coarse import matters
from walk.facts import Facts, State
from walk.invariants import violated

WHILE_DEFERRED = (Kind.STAGE, Kind.APPLY_DEFERRED, Kind.PATCH)
TICKETS = {
    Kind.GET_METRICS: "metrics",
    Kind.SAVE_CHECKPOINT: "checkpoint",
    Kind.SYNC_WEIGHTS: "weights",
    Kind.EVAL: "eval",
}
ROLES = {Kind.SCORE_REFERENCE: "ref", Kind.SCORE_ACTOR: "act"}


class GateError(Exception):
    """Refused because device work failed before: the run ends here."""


def execute(case: Case, w: Facts, command: Command, overflows: tuple[int, ...]) -> None:
    """The command takes effect. ``overflows``: for each micro-batch it settles, whether that one overflowed."""
    kind = command.kind
    if w[at.GATE]:
        raise GateError(w[at.GATE])
    if w[at.DEFERRED] and kind not in WHILE_DEFERRED:
        violated("refused", f"{kind} {command.key} while update {w[at.UPDATED] + 1} is deferred: UpdateDeferredError")
    flags = list(overflows)
    if kind in (Kind.FWD_BWD, Kind.FWD_BWD_STAGED):
        _forward(case, w, command, flags)
    elif kind is Kind.STAGE:
        _stage(case, w, command.key)
    elif kind is Kind.APPLY_DEFERRED:
        if not w[at.DEFERRED]:
            violated("refused", "apply_deferred_update: none is deferred")
        invariants.on_apply(case, w)
        w[at.DEFERRED] = 0
        _update(case, w, command.step, flags)
    elif kind is Kind.UPDATE:
        invariants.on_closed(w)
        _update(case, w, command.step, flags)
    elif kind in TICKETS:
        _snapshot(case, w, TICKETS[kind], command.step)
    elif kind in ROLES:
        invariants.on_score(case, w, ROLES[kind], command.key)
        w[at.QUEUE] += (("S", (ROLES[kind], command.key)),)
        w[at.COPIES] += ((ROLES[kind], command.key),)
    else:
        _patch(case, w, command.key)
    if case.trainer == "blocks":
        while w[at.UPLOADS]:
            upload_ready(case, w)
        while w[at.QUEUE]:
            compute_ready(case, w)


def settle_count(case: Case, w: Facts, command: Command) -> int:
    """How many micro-batches this command settles: i-1 at the end of forward call i, the last one in the update."""
    if not case.replay:
        return 0
    if command.kind in (Kind.FWD_BWD, Kind.FWD_BWD_STAGED):
        return (w[at.COUNT] > 0) + (command.is_final and not command.defer_update)
    return int(command.kind in (Kind.APPLY_DEFERRED, Kind.UPDATE))


# --- commands -----------------------------------------------------------------------------------------------


def _forward(case: Case, w: Facts, command: Command, flags: list[int]) -> None:
    key, staged = command.key, w[at.STAGED]
    is_there = bool(staged and staged[0] == key)
    if command.kind is Kind.FWD_BWD_STAGED and not is_there:
        violated("refused", f"fwd_bwd_staged {key}, staged is {staged}: StageMismatchError")
    if is_there and staged[3]:
        w[at.GATE] = f"the upload of {key} failed"
        raise GateError(w[at.GATE])
    invariants.on_forward(case, w, command, is_there)
    if is_there:
        if staged[1]:
            # sent whole over a stage of it: the scores were written after that stage, so they are read again
            _patch(case, w, key)
        w[at.STAGED] = None
    else:
        _upload(case, w, key)
    w[at.QUEUE] += (("F", key),)
    w[at.COUNT] += 1
    w[at.SCORED] = tuple(scored for scored in w[at.SCORED] if scored[1] != key)
    invariants.on_added(w, key[1], 0)
    if case.replay:
        w[at.UNSETTLED] += (key,)
        if len(w[at.UNSETTLED]) > 1:
            _settle(case, w, flags)
    if command.is_final:
        if command.defer_update:
            w[at.DEFERRED] = 1
        else:
            _update(case, w, command.step, flags)


def _stage(case: Case, w: Facts, key: Key) -> None:
    if w[at.STAGED] and w[at.STAGED][0] != key:
        violated("refused", f"stage {key} over the unused {w[at.STAGED][0]}: StageOccupiedError")
    invariants.on_stage(case, w, key)
    _upload(case, w, key)
    w[at.STAGED] = (key, case.recompute, False, False)


def _upload(case: Case, w: Facts, key: Key) -> None:
    if key not in w[at.HELD]:
        violated("7 memory", f"{key} is uploaded from a slot whose lease has ended")
    while len(invariants.buffers_in_use(w)) >= case.buffers:
        _wait_for_a_buffer(case, w)
    w[at.UPLOADS] += (("up", key),)


def _wait_for_a_buffer(case: Case, w: Facts) -> None:
    held = {w[at.STAGED][0]} if w[at.STAGED] else set()
    held.update(w[at.UNSETTLED])
    if not any(item[0] in "FR" and item[1] not in held for item in w[at.QUEUE]):
        violated("deadlock", f"no device buffer can retire: {held} hold all {case.buffers}")
    compute_ready(case, w)


def _update(case: Case, w: Facts, step: int, flags: list[int]) -> None:
    while any(kind in ("checkpoint", "weights") for kind, _ in w[at.COPIES]):
        copy_ready(case, w)  # the update donates what they copy
    while w[at.UNSETTLED]:
        _settle(case, w, flags, keep=0)
    invariants.on_update(case, w, step)
    w[at.QUEUE] += (("U", step),)
    w[at.UPDATED] = step
    w[at.COUNT] = 0
    w[at.LAST_ADDED] = (-1, 0)
    w[at.DONE] = ()


def _settle(case: Case, w: Facts, flags: list[int], keep: int = 1) -> None:
    """Read the overflow flag of the oldest unsettled micro-batch, which waits for it, and replay it if it must be."""
    key = w[at.UNSETTLED][0]
    while ("F", key) in w[at.QUEUE]:
        compute_ready(case, w)
    w[at.UNSETTLED] = w[at.UNSETTLED][1:]
    if flags.pop(0):
        invariants.on_added(w, key[1], 1)
        if case.fine:
            w[at.QUEUE] += (("R", key),)


def _snapshot(case: Case, w: Facts, kind: str, step: int) -> None:
    invariants.on_duty(case, w, kind, step)
    w[at.DONE] += (kind,)
    w[at.COPIES] += ((kind, step),)
    if kind == "checkpoint" and case.hook:
        w[at.VERDICTS] += (step,)
    if kind == "eval":
        w[at.QUEUE] += (("E", step),)
    if case.trainer == "waits":
        while w[at.COPIES]:
            copy_ready(case, w)


def _patch(case: Case, w: Facts, key: Key) -> None:
    staged = w[at.STAGED]
    if not staged or staged[0] != key:
        violated("refused", f"patch_staged {key}, staged is {staged}: StageMismatchError")
    if ("act", key) not in w[at.SCORED]:
        violated("1 same", f"{key} is patched before its scores lie in the slot")
    if key not in w[at.HELD]:
        violated("7 memory", f"{key} is patched from a slot whose lease has ended")
    w[at.UPLOADS] += (("patch", key),)
    w[at.STAGED] = (key, False, True, staged[3])


# --- streams ------------------------------------------------------------------------------------------------


def compute_ready(case: Case, w: Facts, fails: bool = False) -> None:
    """The head of the compute queue is over. With ``fails`` it is not ok, nor is what follows of its step."""
    what, name = w[at.QUEUE][0]
    if what == "F":
        while ("up", name) in w[at.UPLOADS] or ("patch", name) in w[at.UPLOADS]:
            upload_ready(case, w)
    w[at.QUEUE] = w[at.QUEUE][1:]
    if what in "SE":
        if what == "S" and name[1] not in w[at.HELD]:
            violated("7 memory", f"the slot of {name[1]} is gone before its scores are written")
        return
    step = name if what == "U" else name[0]
    if fails:
        w[at.BAD], w[at.GATE] = step, f"{what} {name} failed"
    failed = w[at.BAD] == step
    _emit(case, w, f"{what} failed" if failed else what, name)


def upload_ready(case: Case, w: Facts, fails: bool = False) -> None:
    """The head of the upload stream is over, and with it the lease, unless late fields are still to be read."""
    what, key = w[at.UPLOADS][0]
    w[at.UPLOADS] = w[at.UPLOADS][1:]
    staged = w[at.STAGED]
    waits = bool(staged and staged[0] == key)
    if what == "patch" or not (waits and staged[1]):
        _end_lease(w, key)
    if fails and waits:
        w[at.STAGED] = (key, staged[1], staged[2], True)
    elif fails:
        w[at.BAD], w[at.GATE] = key[0], f"upload of {key} failed"
    _emit(case, w, f"{what} failed" if fails else what, key)


def _end_lease(w: Facts, key: Key) -> None:
    w[at.HELD] = tuple(held for held in w[at.HELD] if held != key)


def copy_ready(case: Case, w: Facts, fails: bool = False) -> None:
    """The head of the copying thread's work is over, in order; it begins when what it copies is ready."""
    kind, name = w[at.COPIES][0]
    needs = _needs(kind, name)
    while needs in w[at.QUEUE]:
        compute_ready(case, w)
    w[at.COPIES] = w[at.COPIES][1:]
    if fails or (w[at.BAD] and name == w[at.BAD]):
        _emit(case, w, "ticket failed", (kind, name))
    elif kind == "checkpoint":
        w[at.WRITES] += (name,)
    else:
        if kind in ("ref", "act"):
            w[at.SCORED] += ((kind, name),)
        _emit(case, w, "ticket", (kind, name))


def needed_by_copy(w: Facts | State) -> tuple[str, object]:
    """The device work that the oldest ticket's copy waits for, as it stands in the queue."""
    return _needs(*w[at.COPIES][0])


def _needs(kind: str, name: object) -> tuple[str, object]:
    if kind in ("ref", "act"):
        return ("S", (kind, name))
    return ("E" if kind == "eval" else "U", name)


def write_ready(case: Case, w: Facts, fails: bool = False) -> None:
    """The oldest checkpoint being written is durable."""
    step = w[at.WRITES][0]
    w[at.WRITES] = w[at.WRITES][1:]
    if fails:
        _emit(case, w, "ticket failed", ("checkpoint", step))
        return
    w[at.DURABLE] = max(w[at.DURABLE], step)
    _emit(case, w, "ticket", ("checkpoint", step))


def _emit(case: Case, w: Facts, what: str, name: object) -> None:
    """An event goes out, if anybody cares."""
    if matters(case, (what, name)):
        w[at.OUTBOX] += ((what, name),)
    elif what == "ticket" and isinstance(name, tuple) and name[0] == "weights":
        w[at.PUBLISHED] = name[1]

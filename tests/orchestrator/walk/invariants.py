"""The invariants of the contract, each a monitor with a name: it looks at what is about to happen and objects."""

from __future__ import annotations

from typing import NoReturn

from shmstage.orchestrator.schedule import Command, Key, Kind
from walk import facts as at
from walk.cases import Case
from walk.facts import Facts, State

#: number in the contract, then what was added to it; the keys name violations
INVARIANTS = {
    "1 same": "the same micro-batches, late fields included, in the same order with the same denominators",
    "2 update": "exactly one update per step, none on a step with a failed token, none twice",
    "3 after": "every micro-batch of step k+1 enters its forward pass after update k",
    "4 metrics": "get_metrics(k) takes effect after update k and before step k+1's first forward call",
    "5 checkpoint": "a checkpoint and its stamp are of update k landed",
    "6 staged": "a staged micro-batch is trained once and unchanged",
    "7 memory": "a slot is rewritten only after its lease ended, a device buffer only after retire",
    "8 sums": "gradients are added up in the serial loop's order, replays included",
    "9 serial": "serial is the reference loop",
    "deadlock": "a run that is not over has something that can happen",
    "ends": "every run ends: no event leads back",
    "source": "neither a deferred update nor a step's books wait for the input",
    "books": "every completed step is booked once, in order, when it is complete",
    "refused": "the trainer has nothing to refuse",
    "left": "nothing stays deferred, unsaved or unpublished at the end",
    "weights": "versions go up, none below the floor, none before the hook or out of turn",
    "hook": "update k+1 waits for the verdict on checkpoint k",
    "planned": "a stage is planned where the contract says, and nowhere else",
    "stop": "after a stop or a failure nothing new is begun",
}


#: what became of memory's wish for a checkpoint: not yet at a boundary, due at this one, granted
ASKED, DUE, SAVED = 1, 2, 3


class ViolationError(AssertionError):
    """An invariant does not hold; ``trace`` is filled in by the walker."""

    def __init__(self, invariant: str, detail: str) -> None:
        assert invariant in INVARIANTS, invariant
        super().__init__(f"{invariant} ({INVARIANTS[invariant]}): {detail}")
        self.invariant = invariant
        self.trace: list[str] = []


def violated(invariant: str, detail: str) -> NoReturn:
    raise ViolationError(invariant, detail)


def require(holds: bool, invariant: str, detail: str) -> None:
    if not holds:
        raise ViolationError(invariant, detail)


def size_of_step(case: Case, w: Facts, step: int) -> int:
    """Micro-batches of ``step`` in the serial loop, which trains every micro-batch of the input in order."""
    if w[at.TOTAL] < 0:
        return case.microbatches
    return max(0, min(case.microbatches, w[at.TOTAL] - (step - 1) * case.microbatches))


# --- the input ----------------------------------------------------------------------------------------------


def on_packed(case: Case, w: Facts, key: Key) -> None:
    require(len(w[at.HELD]) < case.slots, "7 memory", f"{key} is packed into a slot that {w[at.HELD]} hold")
    if case.mode == "serial":
        # the reference loop keeps step k's books before it packs anything of step k+1
        require(w[at.BOOKED] >= key[0] - 1, "9 serial", f"{key} is packed before step {w[at.BOOKED] + 1} is booked")
    ahead = (w[at.UPDATED] + 2 + w[at.DEFERRED], 0)
    require(key <= ahead, "7 memory", f"{key} is packed more than a step ahead, {ahead}")


# --- micro-batches ------------------------------------------------------------------------------------------


def on_stage(case: Case, w: Facts, key: Key) -> None:
    require(case.stages, "9 serial", f"{key} is staged in mode {case.mode}")
    ends = w[at.STOPPED] or (w[at.ENDING] and (key[1] == 0 or w[at.ENDING] == "inside"))
    require(not ends, "stop", f"{key} is staged although the run ends")
    require(not w[at.UNSTAGED], "planned", f"{key} is staged although staging was switched off for good")
    trained = (w[at.UPDATED] + 1, w[at.COUNT])
    after = (w[at.UPDATED] + 2, 0) if w[at.DEFERRED] else trained
    require(key == after, "1 same", f"{key} is staged, {after} comes next")
    if key[1] == 0 and not w[at.DEFERRED]:
        first_at_boundary = not w[at.DONE] and w[at.UPDATED] > w[at.BASE]
        require(first_at_boundary, "planned", f"{key} is staged after its turn; it is to be sent whole")
    if case.reference:
        require(("ref", key) in w[at.SCORED], "1 same", f"{key} is staged without its reference log-probs")


def on_forward(case: Case, w: Facts, command: Command, staged: bool) -> None:
    """``staged``: its arrays were on the devices before."""
    key = command.key
    step = w[at.UPDATED] + 1
    require(not w[at.STOPPED], "stop", f"{key} is sent after a stop")
    ends = w[at.ENDING] in ("inside", "hook") or (w[at.ENDING] and w[at.COUNT] == 0)
    require(not ends, "stop", f"{key} is sent although the run ends")
    require(not w[at.DEFERRED], "3 after", f"{key} is sent while update {step} is deferred")
    require(key == (step, w[at.COUNT]), "1 same", f"{key} is sent, {(step, w[at.COUNT])} comes next")
    require(not w[at.BAD], "2 update", f"{key} goes on after a failed token was known")
    require(
        command.is_final == (key[1] == case.microbatches - 1), "1 same", f"{key} is marked final = {command.is_final}"
    )
    if w[at.COUNT] == 0 and step > w[at.BASE] + 1:
        _step_before_is_over(case, w, step - 1)
    if case.reference:
        require(("ref", key) in w[at.SCORED], "1 same", f"{key} is sent without its reference log-probs")
    if case.recompute:
        require(("act", key) in w[at.SCORED], "1 same", f"{key} is sent without log-probs under weights {step - 1}")
    undisturbed = not w[at.UNSTAGED] and not w[at.LATCHED] and not w[at.ENDING]
    if command.kind is Kind.FWD_BWD_STAGED:
        require(staged, "6 staged", f"{key} is sent as staged and is not")
        if case.recompute:
            require(w[at.STAGED][2], "1 same", f"the staged {key} was not patched")
    elif case.stages and undisturbed:
        require(w[at.COUNT] == 0, "planned", f"{key} is sent whole; inside a step staged modes stage")
        require(not w[at.PROMISED], "planned", f"{key} was packed in time and is not staged")
    if command.defer_update:
        require(command.is_final, "planned", f"{key} is deferred and is not the last of its step")
        _may_defer(case, w, key)
    if command.is_final:
        in_time = (step + 1, 0) in w[at.HELD] and undisturbed
        must_defer = in_time and case.mode == "staged_before_update"
        require(command.defer_update or not must_defer, "planned", f"{key} is not deferred, {step + 1}.0 is packed")
        w[at.PROMISED] = int(in_time and case.stages)
        on_closed(w)


def on_closed(w: Facts) -> None:
    """The last call of a step: a checkpoint that memory asked for before it is due at this boundary."""
    if w[at.WANTED] == ASKED:
        w[at.WANTED] = DUE


def on_apply(case: Case, w: Facts) -> None:
    """A planned stage goes before the update; it is waited for until L is known to be finished or the input to end."""
    step = w[at.UPDATED] + 1
    if w[at.STOPPED] or w[at.ENDING] or w[at.UNSTAGED] or w[at.STAGED]:
        return
    require((step + 1, 0) not in w[at.HELD], "planned", f"update {step} goes before the stage of {step + 1}.0")
    last = ("F", (step, w[at.COUNT] - 1))
    finished = last not in w[at.QUEUE] and last not in w[at.OUTBOX]
    gave_up = finished or bool(w[at.END]) or case.deadline
    require(gave_up, "planned", f"the stage of {step + 1}.0 is given up before {last} finished")


def _may_defer(case: Case, w: Facts, key: Key) -> None:
    require(case.mode == "staged_before_update", "9 serial", f"{key} is deferred in mode {case.mode}")
    require(not (case.known_end and key[0] == case.steps), "planned", "the last step is deferred")
    known_empty = w[at.END] and w[at.PACKED] <= key[0] * case.microbatches
    require(not known_empty, "planned", f"{key} is deferred although the source is known to be exhausted")
    require(not w[at.STOPPED] and not w[at.ENDING], "planned", f"{key} is deferred although the run ends")


def _step_before_is_over(case: Case, w: Facts, step: int) -> None:
    """Before the first forward call after ``step``: what the contract's table puts between."""
    for kind in owed(case, w, step):
        invariant = "4 metrics" if kind == "metrics" else "weights" if kind == "weights" else "5 checkpoint"
        require(kind in w[at.DONE], invariant, f"step {step + 1} begins before {kind} of step {step}")
    if case.sync == "sync" and step >= w[at.FLOOR]:
        require(w[at.PUBLISHED] >= step, "weights", f"step {step + 1} begins before weights {step} are published")
    require(w[at.WANTED] != DUE, "5 checkpoint", f"step {step + 1} begins without the checkpoint that memory asked for")
    if case.mode == "serial":
        require(w[at.BOOKED] >= step, "9 serial", f"step {step + 1} begins before step {step} is booked")


def owed(case: Case, w: Facts, step: int) -> list[str]:
    """What ``step`` owes after its update, in order."""
    due = ["metrics"]
    if case.checkpoint_every and step % case.checkpoint_every == 0:
        due.append("checkpoint")
    if case.sync != "off" and step >= w[at.FLOOR]:
        due.append("weights")
    if case.eval_every and step % case.eval_every == 0:
        due.append("eval")
    return due


def on_added(w: Facts, index: int, replayed: int) -> None:
    """The serial loop's order: 0, 1, replay of 0, 2, replay of 1, ..., replay of the last; then the update.

    Each step is checked addition by addition, so by induction the whole run's sums and parameters are the serial
    ones, and no history has to be kept.
    """
    last = w[at.COUNT] - 1
    right = index == last
    if replayed:
        before = w[at.LAST_ADDED]
        right = before == (index + 1, 0) or (index == last and before in ((index, 0), (index - 1, 1)))
    require(right, "8 sums", f"addition {index} (replay {replayed}) after {w[at.LAST_ADDED]}")
    w[at.LAST_ADDED] = (index, replayed)


def on_update(case: Case, w: Facts, step: int) -> None:
    require(step == w[at.UPDATED] + 1, "2 update", f"update {step} after update {w[at.UPDATED]}")
    require(w[at.COUNT] > 0, "2 update", f"update {step} of nothing")
    whole = size_of_step(case, w, step)
    require(w[at.COUNT] == whole, "1 same", f"update {step} after {w[at.COUNT]} of {whole} micro-batches")
    if w[at.COUNT] < case.microbatches:
        require(w[at.END], "1 same", f"update {step} before its {case.microbatches} micro-batches came")
    require(w[at.BAD] != step, "2 update", f"update {step} although a token of it failed")
    require(not w[at.VERDICTS], "hook", f"update {step} before the verdict on checkpoint {w[at.VERDICTS]}")


# --- snapshots ----------------------------------------------------------------------------------------------

_ORDER = ("metrics", "checkpoint", "weights", "eval")


def on_duty(case: Case, w: Facts, kind: str, step: int) -> None:
    """Metrics, checkpoint, weights, evaluation: of the last update, before the next step begins, in that order."""
    invariant = "4 metrics" if kind == "metrics" else "weights" if kind == "weights" else "5 checkpoint"
    require(step == w[at.UPDATED], invariant, f"{kind} {step} after update {w[at.UPDATED]}")
    require(not w[at.DEFERRED], invariant, f"{kind} {step} while an update is deferred")
    require(w[at.COUNT] == 0, invariant, f"{kind} {step} after step {step + 1} began")
    require(kind not in w[at.DONE], invariant, f"{kind} {step} twice")
    later = [done for done in w[at.DONE] if _ORDER.index(done) > _ORDER.index(kind)]
    # a checkpoint that a failure adds to an open boundary may come after what was done already
    require(not later or bool(w[at.ENDING]), invariant, f"{kind} {step} after {later}")
    if kind == "weights":
        require(step >= w[at.FLOOR], "weights", f"weights {step} below the published {w[at.FLOOR]}")
    if kind == "checkpoint":
        require(step != w[at.BAD], "5 checkpoint", f"checkpoint {step} of a step with a failed token")
        settings = "checkpoint" in owed(case, w, step)
        due = settings or w[at.WANTED] in (ASKED, DUE) or w[at.ENDING]
        require(bool(due), "5 checkpoint", f"checkpoint {step} that nobody asked for")
        if w[at.WANTED] == DUE or (w[at.WANTED] == ASKED and not settings):
            w[at.WANTED] = SAVED


def on_score(case: Case, w: Facts, role: str, key: Key) -> None:
    once = (role, key) not in w[at.SCORED] and (role, key) not in w[at.COPIES]
    require(once, "1 same", f"{key} is scored twice as {role}")
    readable = key in w[at.HELD] or bool(w[at.STAGED] and w[at.STAGED][0] == key)
    require(readable, "7 memory", f"{key} is scored after its lease")
    if role == "act":
        right = key == (w[at.UPDATED] + 1, w[at.COUNT]) and not w[at.DEFERRED]
        require(right, "1 same", f"{key} is scored under weights {w[at.UPDATED]}, deferred = {w[at.DEFERRED]}")


# --- the host -----------------------------------------------------------------------------------------------


def on_bookkeep(case: Case, w: Facts, step: int) -> None:
    require(step == w[at.BOOKED] + 1, "books", f"step {step} is booked after step {w[at.BOOKED]}")
    require(w[at.LANDED] >= step, "books", f"step {step} is booked before its update landed")
    metrics = ("metrics", step)
    on_their_way = metrics in w[at.COPIES] or ("ticket", metrics) in w[at.OUTBOX]
    require(not on_their_way, "books", f"step {step} is booked before its metrics are there")
    require(w[at.BAD] != step, "2 update", f"step {step} is booked although a token of it failed")
    if w[at.UPDATED] == step and not w[at.ENDING]:
        missing = [kind for kind in owed(case, w, step) if kind not in w[at.DONE]]
        require(not missing, "books", f"step {step} is booked before {missing}")
        if case.mode != "serial" and not w[at.STOPPED] and w[at.COUNT] == 0:
            first = (step + 1, 0)
            there = first in w[at.HELD] or bool(w[at.STAGED])
            require(not there, "books", f"the devices wait for the books of step {step}: {first} is there and not sent")


def on_waiting(case: Case, w: Facts | State) -> None:
    """The schedule has nothing to do now."""
    nothing_comes = w[at.END] and w[at.PACKED] <= (w[at.UPDATED] + 1) * case.microbatches
    waits = w[at.DEFERRED] and nothing_comes and not w[at.VERDICTS]
    require(not waits, "source", f"update {w[at.UPDATED] + 1} waits for a stage after the end of input")


def on_silence(case: Case, w: Facts) -> None:
    """Nothing can happen but that the input goes on."""
    require(not w[at.DEFERRED] or case.deadline, "source", f"update {w[at.UPDATED] + 1} waits for the input")
    if not w[at.DEFERRED] and w[at.COUNT] == 0:
        require(w[at.BOOKED] == w[at.UPDATED], "source", f"the books of step {w[at.UPDATED]} wait for the input")


def on_finished(case: Case, w: Facts, saved: int) -> None:
    """The schedule is done and the program has saved what it saves; ``saved`` is the newest checkpoint asked for."""
    discards = w[at.ENDING] == "hook"
    require(discards or not w[at.DEFERRED], "left", "an update is still deferred")
    require(w[at.BOOKED] == w[at.UPDATED], "left", f"step {w[at.UPDATED]} was completed, step {w[at.BOOKED]} booked")
    is_saved = discards or bool(w[at.COUNT]) or saved == w[at.UPDATED]
    require(is_saved, "left", f"checkpoint {w[at.UPDATED]} was not asked for")
    if w[at.UPDATED] > w[at.BASE] and not w[at.COUNT] and not w[at.ENDING]:
        missing = [kind for kind in owed(case, w, w[at.UPDATED]) if kind not in w[at.DONE]]
        require(not missing, "left", f"{missing} {w[at.UPDATED]} left out")
    if not w[at.STOPPED] and not w[at.ENDING]:
        total = w[at.TOTAL] if w[at.TOTAL] >= 0 else case.steps * case.microbatches
        trained = min(w[at.UPDATED] * case.microbatches, total) + w[at.COUNT]
        require(w[at.COUNT] == 0 and trained == total, "1 same", f"{trained} of {total} micro-batches were trained")


def buffers_in_use(w: Facts) -> set[Key]:
    """Keys whose device buffer has not retired: staged, unsettled, or with work on the queue or on its way up."""
    used = {item[1] for item in w[at.QUEUE] if item[0] in "FR"}
    used.update(key for what, key in w[at.UPLOADS] if what == "up")
    used.update(w[at.UNSETTLED])
    if w[at.STAGED]:
        used.add(w[at.STAGED][0])
    return used

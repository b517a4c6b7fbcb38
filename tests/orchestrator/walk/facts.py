"""The state of a walk, one flat tuple, and the names of its places.

Keys are (step, index). Device work is ("F"|"R"|"S"|"E"|"U", ...): forward, replay, scoring, evaluation, update.
"""

from __future__ import annotations

from typing import Any

#: a state under construction
Facts = list[Any]
State = tuple[Any, ...]
Step = tuple[str, State]

#: ends of runs: nothing follows
FINISHED: State = ("finished",)
FAILED: State = ("failed",)

_NAMES = (
    "SCHEDULE",  # number of the schedule's state (machine.py)
    # the input
    "PACKED",  # micro-batches packed so far, counted over the whole run
    "TOTAL",  # micro-batches the source holds; -1 while that is open
    "END",  # the end of input was told
    "HELD",  # keys whose slots are leased or in transit, in order of packing
    # the trainer, as commands see it
    "UPDATED",  # last step whose update was dispatched
    "COUNT",  # micro-batches dispatched since
    "DEFERRED",  # an update is held back
    "STAGED",  # (key, keeps its lease, patched, upload failed) or None
    "UNSETTLED",  # keys the engine may still replay
    "SCORED",  # (role, key) whose late field lies in the slot
    "GATE",  # "" or why only restore and shutdown are accepted
    "BAD",  # step with a failed token, or 0
    # its streams
    "QUEUE",  # compute, in order of dispatch
    "UPLOADS",  # ("up"|"patch", key)
    "COPIES",  # tickets whose copy is not over: (kind, step or key)
    "WRITES",  # checkpoints copied and not durable
    "OUTBOX",  # events emitted and not delivered
    "DURABLE",  # newest durable checkpoint
    # what the program knows and has done
    "LANDED",  # last update known to have landed
    "PUBLISHED",  # last weights version known to be published
    "DONE",  # what was asked for since the last update, in order: metrics, checkpoint, weights, evaluation
    "HOOKS",  # steps whose hook runs
    "VERDICTS",  # saved steps whose hook has not spoken
    "BOOKED",  # last step whose books are closed
    "PROMISED",  # the next step's first micro-batch lay packed when the last call of this one was sent
    "LAST_ADDED",  # (index, replayed) of the last addition to the gradients of the open step
    # the run
    "BASE",  # step restored at the beginning of this life
    "FLOOR",  # no weights below this version
    "BUDGET",  # disturbances left
    "STOPPED",  # a signal came
    "ENDING",  # "" or why the run ends early
    "UNSTAGED",  # staging was switched off for good
    "WANTED",  # memory asks for a checkpoint
    "LATCHED",  # the latch was flipped
    "CALL",  # a call whose reply was lost: (command, what the trainer had done), or None
    "DUPLICATE",  # a second copy of an old reply is on its way
)
(
    SCHEDULE, PACKED, TOTAL, END, HELD, UPDATED, COUNT, DEFERRED, STAGED, UNSETTLED, SCORED, GATE, BAD, QUEUE,
    UPLOADS, COPIES, WRITES, OUTBOX, DURABLE, LANDED, PUBLISHED, DONE, HOOKS, VERDICTS, BOOKED, PROMISED,
    LAST_ADDED, BASE, FLOOR, BUDGET, STOPPED, ENDING, UNSTAGED, WANTED, LATCHED, CALL, DUPLICATE,
) = range(len(_NAMES))  # fmt: skip

_EMPTY: dict[str, Any] = {
    "HELD": (), "STAGED": None, "UNSETTLED": (), "SCORED": (), "GATE": "", "QUEUE": (), "UPLOADS": (), "COPIES": (),
    "WRITES": (), "OUTBOX": (), "DONE": (), "HOOKS": (), "VERDICTS": (), "LAST_ADDED": (-1, 0), "ENDING": "",
    "CALL": None,
}  # fmt: skip


def fresh(**known: Any) -> Facts:
    """Facts of a run that has not begun, but for ``known``."""
    return [known.get(name, _EMPTY.get(name, 0)) for name in _NAMES]


def described(state: State) -> str:
    """What differs from a run that has not begun, for error messages."""
    return ", ".join(
        f"{name}={value}" for name, value, empty in zip(_NAMES, state, fresh(), strict=True) if value != empty
    )

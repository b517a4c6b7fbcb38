"""Which events can change a decision. Coarse cases leave the others out; ``fine`` cases tell every one, alone.

Left out: readiness of a micro-batch that is not the last of its step, or in modes that do not stage; of an upload; of a
replay, which can only make a wait for a buffer longer; tickets of evaluations; of checkpoints without a hook; of
weights unless the sync is synchronous. The schedule compares ``finished`` only with a step's last micro-batch, while a
planned stage waits for its micro-batch, and ``published`` only in synchronous mode; of the rest it is never told.
"""

from __future__ import annotations

from typing import Any

from walk.cases import Case


def matters(case: Case, event: tuple[str, Any]) -> bool:
    """Whether the schedule may decide otherwise after it."""
    what, name = event
    if case.fine or what == "U":
        return True
    if what == "F":
        return case.stages and bool(name[1] == case.microbatches - 1)
    if what == "ticket":
        kind = name[0]
        if kind == "weights":
            return case.sync == "sync"
        return case.hook if kind == "checkpoint" else kind != "eval"
    return what.endswith("failed")

"""``OUT/begun.json``: what a run's first attempt found, and how many there were; its restarts read it.

The launcher removes it when it starts: a resumed run begins anew, a restarted one goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shmstage.events import write_json

NAME = "begun.json"


@dataclass(frozen=True, slots=True)
class Beginning:
    """``attempt`` counts from 1; the rest is of the first attempt since the launcher started."""

    attempt: int
    first_step: int
    initial_param_digest: str


def begin_attempt(out: Path, *, seen: int, first_step: int, param_digest: Callable[[], str]) -> Beginning:
    """Note that another attempt begins. ``seen`` is the highest attempt among the step lines.

    ``param_digest`` is asked in the first attempt only: later ones start from parameters that were trained already.
    """
    path = out / NAME
    if path.exists():
        before = Beginning(**json.loads(path.read_text()))
        begun = replace(before, attempt=max(before.attempt, seen) + 1)
    else:
        begun = Beginning(seen + 1, first_step, param_digest())
    write_json(path, asdict(begun))
    return begun

"""``OUT/begun.json``: what a run's first attempt found, and how many there were; its restarts read it.

The launcher removes it when it starts: a resumed run begins anew, a restarted one goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shmstage.errors import SettingsError, shown
from shmstage.records import is_count, read_json, write_json

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
    Raises ``SettingsError`` if the file holds something else.
    """
    path = out / NAME
    before = _begun_before(path)
    if before is not None:
        begun = replace(before, attempt=max(before.attempt, seen) + 1)
    else:
        begun = Beginning(seen + 1, first_step, param_digest())
    write_json(path, asdict(begun))
    return begun


def _begun_before(path: Path) -> Beginning | None:
    try:
        record = read_json(path, "remove it and --resume")
    except FileNotFoundError:
        return None
    attempt, first_step, digest = (record.get(key) for key in ("attempt", "first_step", "initial_param_digest"))
    if not is_count(attempt) or not is_count(first_step) or type(digest) is not str:
        raise SettingsError(f"{path} does not say how the run began: {shown(record)}; remove it and --resume")
    return Beginning(attempt, first_step, digest)

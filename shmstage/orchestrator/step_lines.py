"""``steps.jsonl`` as the record of what is done: a step counts when its checkpoint is durable *and* its line here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError
from shmstage.records import is_count, read_json_lines


def read_step_lines(path: Path) -> list[dict[str, Any]]:
    """All whole step lines. Raises ``SettingsError`` for a file that holds something else."""
    lines = read_json_lines(path)
    for number, line in enumerate(lines, 1):
        if not all(is_count(line.get(key)) for key in ("step", "attempt")):
            raise SettingsError(
                f"{path} line {number} is no step line: step or attempt is no count; restore the file or choose "
                "another --out"
            )
    return lines


def last_step(path: Path) -> int | None:
    """The last step that has its line: 0 if none has, ``None`` without a file, when nobody can tell.

    Bookkeeping comes after the checkpoint. Who is killed between the two leaves a checkpoint without its line;
    restoring an older one trains that step again, to the same bits, and the line is written.
    """
    if not path.exists():
        return None
    return max((line["step"] for line in read_step_lines(path)), default=0)


def roll_back(path: Path, *, to_step: int) -> int:
    """Drop the lines of steps that no checkpoint covers: they are trained again. Returns the highest attempt seen."""
    lines = read_step_lines(path)  # a torn last line, left by a kill, is dropped with the rest
    kept = [line for line in lines if line["step"] <= to_step]
    if path.exists():
        # in one piece: somebody may be following the file
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        partial.replace(path)
    return max((line["attempt"] for line in lines), default=0)

"""How far a run is and how fast it goes, from the last lines of its ``steps.jsonl``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: rates are taken over so many steps at most
LINES = 20
#: lines that name thousands of trajectories are long; more than this is not read for a look
TAIL_NBYTES = 16 << 20
_KEYS = (
    "step", "attempt", "mode", "loss", "tokens", "bytes", "step_s", "boundary_idle_s", "upload_s", "exposed_s",
    "slot_wait_s", "data_wait_s", "staged", "not_staged_because", "latch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """``last``: what matters of the newest step line. Rates are per second, over ``steps_measured`` steps.

    ``seconds_ago``: since that line was written; ``None`` if the clock was set back meanwhile.
    """

    last: dict[str, Any]
    seconds_ago: float | None
    steps_measured: int
    steps_per_s: float
    tokens_per_s: float
    bytes_per_s: float


def read_progress(path: Path) -> Progress | None:
    """``None`` if no step was completed or the file holds something else. Raises ``OSError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            written_s = os.fstat(file.fileno()).st_mtime
            lines = _last_lines(_tail(file.fileno(), os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        return None
    return progress_of(lines, time.time() - written_s)


def progress_of(lines: Sequence[dict[str, Any]], seconds_ago: float) -> Progress | None:
    """Pure. ``lines`` are whole step lines, oldest first."""
    if not lines:
        return None
    last = lines[-1]
    same = [line for line in lines[-LINES:] if line["attempt"] == last["attempt"]]
    spent_s = sum(float(line["step_s"]) for line in same)
    per_s = 1 / spent_s if spent_s > 0 else 0.0
    return Progress(
        last={key: last.get(key) for key in _KEYS},
        seconds_ago=seconds_ago if seconds_ago >= 0 else None,
        steps_measured=len(same),
        steps_per_s=len(same) * per_s,
        tokens_per_s=sum(int(line["tokens"]) for line in same) * per_s,
        bytes_per_s=sum(int(line["bytes"]) for line in same) * per_s,
    )


def _tail(descriptor: int, size: int) -> bytes:
    """The end of the file that holds ``LINES`` whole lines, if ``TAIL_NBYTES`` hold so many."""
    found = b""
    while (begin := size - len(found)) > 0 and len(found) < TAIL_NBYTES and found.count(b"\n") <= LINES:
        nbytes = min(begin, 1 << 18)
        block = os.pread(descriptor, nbytes, begin - nbytes)
        if len(block) < nbytes:  # cut off meanwhile
            return b""
        found = block + found
    return found


def _last_lines(tail: bytes) -> list[dict[str, Any]]:
    """The whole step lines at the end of ``tail``; a torn last line is left out, and what lies before an odd one."""
    found: list[dict[str, Any]] = []
    for text in reversed(tail.split(b"\n")[:-1][-LINES:]):
        try:
            line = json.loads(text)
            int(line["step"]), int(line["attempt"]), int(line["tokens"]), int(line["bytes"]), float(line["step_s"])
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        found.insert(0, line)
    return found

"""Follows ``steps.jsonl`` while somebody else writes it, rolls it back, writes it anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, final

from shmstage.errors import shown
from shmstage.records import is_count, open_regular, parse_record


@final
class StepFollower:
    """``new`` gives each step line once: a restart copies the lines that stay into a new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._last = (0, 0)

    def new(self) -> list[dict[str, Any]]:
        """Lines that were not given before, in order. Raises ``ValueError`` for what is no step line."""
        if not self._path.exists():
            return []
        with open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            read = file.read()
        whole, newline, _ = read.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        found = []
        for text in whole.split(b"\n") if whole else ():
            line = parse_record(text)
            number = _number(line)
            if number > self._last:
                self._last = number
                found.append(line)
        return found


def _number(line: dict[str, Any]) -> tuple[int, int]:
    """What orders step lines: a later attempt's come after all of an earlier one's."""
    attempt, step = line.get("attempt"), line.get("step")
    if not is_count(attempt) or not is_count(step):
        raise ValueError(f"{shown(line, 60)} is no step line")
    return attempt, step

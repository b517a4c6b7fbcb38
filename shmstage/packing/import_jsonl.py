"""Records out of a file of JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from shmstage.errors import TrajectoryError, shown
from shmstage.packing.import_rows import Row

#: the longest line: a file without line ends is not read to its end
LINE_LIMIT_NBYTES = 1 << 30


def jsonl_rows(file: Path) -> Iterator[Row]:
    """The lines that are not blank. Raises `TrajectoryError` naming file and line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_LIMIT_NBYTES + 1), b""), start=1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                if len(line) > LINE_LIMIT_NBYTES:
                    raise TrajectoryError(f"{where}: longer than {LINE_LIMIT_NBYTES} bytes; write one object a line")
                yield Row(where, number, _parse(line, where))
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read: {error.strerror}; give a file of JSON lines") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{where}: not a JSON object: {error}; write one object a line") from None
    if not isinstance(value, dict):
        raise TrajectoryError(f"{where}: wants a JSON object, got {shown(value)}; write one object a line")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")

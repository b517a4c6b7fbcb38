"""Records on disk: JSON lines that never end a step, JSON files replaced in one piece, and why a process failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, final

from shmstage.errors import RunFailedError, ShmstageError, by_name


@final
class JsonLines:
    """Append-only JSON lines, flushed per record so that a killed process leaves whole lines.

    ``write`` never raises: the first failure is said once on stderr, later ones are counted in ``failures``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record, allow_nan=True) + "\n")
            self._file.flush()
        except (OSError, ValueError, TypeError) as error:
            self.failures += 1
            if self.failures == 1:
                with contextlib.suppress(OSError):  # the log may lie on the same full disk
                    print(f"shmstage: {self.path}: record lost ({error}); the run goes on", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace ``path`` in one piece; a reader sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file; a torn last line (the writer was killed) is left out."""
    records = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def failure_path(out: Path, role: str) -> Path:
    return out / f"{role}.failure.json"


def read_failure(out: Path, role: str) -> ShmstageError | None:
    """What ``write_failure`` left, as an error of the same class; ``None`` if the child left nothing."""
    path = failure_path(out, role)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    cls = by_name().get(record["kind"])
    if cls is None:
        return RunFailedError(f"{record['kind']}: {record['text']}; traceback in {out / role}.log")
    return cls(record["text"])


def write_failure(out: Path, role: str, error: BaseException) -> int:
    """Leave the reason a child ended where its launcher finds it; returns the exit code that says the same."""
    known = isinstance(error, ShmstageError)
    code = error.exit_code if isinstance(error, ShmstageError) else 5
    text = " ".join(str(error).split()) or type(error).__name__
    record = {"role": role, "kind": type(error).__name__, "text": text, "exit_code": code, "known": known}
    write_json(failure_path(out, role), {**record, "wall_s": time.time()})
    return code

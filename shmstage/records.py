"""Records on disk: JSON lines that never end a step, JSON files replaced in one piece, and why a process failed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, final

from shmstage.errors import RunFailedError, SettingsError, ShmstageError, by_name, named, shown

#: the longest JSON record that is read, in a file of its own or as one line; what we write is far below it
RECORD_LIMIT_NBYTES = 16 << 20
_FAILURE_CHARACTERS = 2000


@final
class JsonLines:
    """Append-only JSON lines, flushed per record: a killed process leaves whole lines and perhaps a torn last one.

    That one is cut off before anything is added. Nothing here raises once it is made: the first failure is said once on
    stderr, later ones are counted in ``failures``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = 0
        _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> bool:
        """True if the record is in the file."""
        return self._append(lambda: json.dumps(record, allow_nan=True) + "\n")

    def write_lines(self, text: str) -> bool:
        """Whole lines that are JSON already; true if they are in the file."""
        return self._append(lambda: text)

    def _append(self, text: Callable[[], str]) -> bool:
        try:
            self._file.write(text())
            self._file.flush()
        except (OSError, ValueError, TypeError) as error:
            self.failures += 1
            if self.failures == 1:
                with contextlib.suppress(OSError):  # the log may lie on the same full disk
                    print(f"shmstage: {self.path}: record lost ({error}); the run goes on", file=sys.stderr, flush=True)
            return False
        return True

    def sync(self) -> bool:
        """True if everything written is on the disk: it survives a loss of power."""
        try:
            os.fsync(self._file.fileno())
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be flushed has been counted already
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        keep = size
        while keep > 0:
            begin = max(0, keep - 65536)
            file.seek(begin)
            newline = file.read(keep - begin).rfind(b"\n")
            keep = begin + newline + 1 if newline >= 0 else begin
            if newline >= 0:
                break
        if keep < size:
            file.truncate(keep)


def write_json(path: Path, value: dict[str, Any], *, mode: int = 0o666) -> None:
    """Replace ``path`` in one piece; a reader sees the old file or the new one. ``mode`` is subject to the umask."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)  # of a process that was killed while it wrote, and had the same pid
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises ``OSError``; what is no file, a pipe for one, is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def parse_record(text: bytes) -> dict[str, Any]:
    """The JSON object that ``text`` is. Raises ``ValueError`` for anything else."""
    if len(text) > RECORD_LIMIT_NBYTES:
        raise ValueError(f"longer than {RECORD_LIMIT_NBYTES} bytes")
    try:
        record = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if type(record) is not dict:
        raise ValueError(f"no JSON object: {shown(text, 60)}")
    return record


def is_count(value: object) -> TypeGuard[int]:
    """A step, an attempt: an integer from 0 that is exact in every JSON reader and may still be counted up."""
    return type(value) is int and 0 <= value < 1 << 53


def read_json(path: Path, remedy: str = "choose another --out") -> dict[str, Any]:
    """What ``write_json`` wrote. Raises ``FileNotFoundError``, or ``SettingsError`` for what no record can be."""
    try:
        with open_regular(path) as file:
            nbytes = min(os.fstat(file.fileno()).st_size, RECORD_LIMIT_NBYTES)  # a buffer of the limit would be made
            return parse_record(file.read(nbytes + 1))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path} cannot be read: {reason}; {remedy}") from None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole records of a JSON-lines file; a torn last line (the writer was killed) is left out.

    Raises ``SettingsError`` naming the line if the file holds anything else.
    """
    records: list[dict[str, Any]] = []
    try:
        with open_regular(path) as file:
            while line := file.readline(RECORD_LIMIT_NBYTES + 1):
                if not line.endswith(b"\n") and len(line) <= RECORD_LIMIT_NBYTES:
                    break
                records.append(parse_record(line))
    except FileNotFoundError:
        return records
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}; remove it or choose another --out") from None
    except ValueError:
        raise SettingsError(
            f"{path} line {len(records) + 1} is no JSON record: {line[:40]!r}; restore the file or choose another --out"
        ) from None
    return records


def failure_path(out: Path, role: str) -> Path:
    return out / f"{role}.failure.json"


def read_failure(out: Path, role: str, pid: int | None = None) -> ShmstageError | None:
    """What ``write_failure`` left, as an error of the same class; ``None`` if the child left nothing.

    With ``pid``, what another process left says nothing: a child of an earlier start may end late.
    """
    try:
        record = read_json(failure_path(out, role), f"see {out / role}.log")
    except FileNotFoundError:
        return None
    except SettingsError as error:  # whoever asks wants to know why a child ended, not why a record is damaged
        return RunFailedError(str(error))
    if pid is not None and record.get("pid") != pid:
        return None
    kind, text = record.get("kind"), record.get("text")
    if type(kind) is not str or type(text) is not str:
        return RunFailedError(f"{failure_path(out, role)} gives no reason: {shown(record)}; see {out / role}.log")
    text = "".join(letter if letter.isprintable() else " " for letter in text[:_FAILURE_CHARACTERS])
    cls = by_name().get(kind)
    if cls is None:
        return RunFailedError(f"{named(kind)}: {text}; traceback in {out / role}.log")
    return cls(text)


def write_failure(out: Path, role: str, error: BaseException) -> int:
    """Leave the reason a child ended where its launcher finds it; returns the exit code that says the same."""
    known = isinstance(error, ShmstageError)
    code = error.exit_code if isinstance(error, ShmstageError) else 5
    text = " ".join(str(error).split()) or type(error).__name__
    record = {"role": role, "pid": os.getpid(), "kind": type(error).__name__, "text": text, "exit_code": code}
    try:
        write_json(failure_path(out, role), {**record, "known": known, "wall_s": time.time()})
    except OSError as full:
        with contextlib.suppress(OSError):  # the log lies on the same disk
            print(f"{failure_path(out, role)}: {full}", file=sys.stderr, flush=True)
    return code

"""The events of a run's processes, read back: `OUT/events/*.jsonl`, also after a kill, also while the run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError, shown
from shmstage.events import FOLDER, SCHEMA
from shmstage.records import RECORD_LIMIT_NBYTES, open_regular, parse_record

_OPTIONAL = {"end": 0, "step": -1, "index": -1}
_OWN = frozenset({"t", "event", "lane", "id", *_OPTIONAL})


@dataclass(frozen=True, slots=True)
class Event:
    """`t` and `end` in ns on the monotonic clock of its process; `end` 0: an instant. `step`, `index` -1: of none."""

    t: int
    end: int
    event: str
    lane: str
    step: int
    index: int
    id: str
    figures: Mapping[str, Any]


@dataclass(slots=True)
class ProcessEvents:
    """One start of one process. Wall time in ns = monotonic + `wall_offset_ns`.

    `dropped`: events that could not be written, or came faster. `beginning_lost`: newer ones took its place. `unread`:
    lines that are no events, of a damaged file.
    """

    process: str
    pid: int
    start: int
    run: str
    wall_offset_ns: int
    events: list[Event] = field(default_factory=list)
    dropped: int = 0
    beginning_lost: bool = False
    unread: int = 0


def read_events(out: Path) -> list[ProcessEvents]:
    """All starts of all processes, in order of file and time; empty without events.

    Raises `SettingsError` for a file of another schema or one that cannot be read; a torn last line is left out.
    """
    found: list[ProcessEvents] = []
    # a writer that ended between renaming its file and beginning a new one left the old one alone
    names = {path.name.removesuffix(".jsonl").removesuffix(".old") for path in (out / FOLDER).glob("*.jsonl")}
    for name in sorted(names):
        path, old = out / FOLDER / f"{name}.jsonl", out / FOLDER / f"{name}.old.jsonl"
        of_file = _read_both(old, path)
        if of_file and (old.exists() or not of_file[0].run):
            of_file[0].beginning_lost = True
        found += of_file
    return found


def _read_both(old: Path, path: Path) -> list[ProcessEvents]:
    """Both as they were at one time: a living writer may rename one over the other meanwhile."""
    for last_try in (False, False, True):
        seen = _which(old)
        of_file: list[ProcessEvents] = []
        try:
            for part in (old, path):
                if part.exists():
                    _read_file(part, of_file)
        except SettingsError:
            if last_try or _which(old) == seen:
                raise
            continue
        if _which(old) == seen:
            break
    return of_file


def _which(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def _read_file(path: Path, starts: list[ProcessEvents]) -> None:
    for record in _records(path):
        if record is None:
            if starts:
                starts[-1].unread += 1
        elif "schema" in record:
            _begin(path, record, starts)
        elif record.get("event") == "dropped" and starts:
            _drop(record.get("events"), starts[-1])
        elif starts:
            _add(record, starts[-1])


def _begin(path: Path, head: dict[str, Any], starts: list[ProcessEvents]) -> None:
    if head["schema"] != SCHEMA:
        raise SettingsError(f"{path}: events of schema {shown(head['schema'])}; this shmstage reads schema {SCHEMA}")
    try:
        begun = ProcessEvents(
            str(head["process"]), int(head["pid"]), int(head["start"]), str(head["run"]),
            round(float(head["wall_s"]) * 1e9) - int(head["monotonic_ns"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"{path}: the head of its events is damaged ({error!r}); remove the file") from None
    same = starts and (starts[-1].pid, starts[-1].start) == (begun.pid, begun.start)
    if not same:  # the same process goes on in a new file
        starts.append(begun)


def _drop(events: object, process: ProcessEvents) -> None:
    if type(events) is int and 0 <= events < 1 << 63:
        process.dropped += events
    else:
        process.unread += 1


def _add(record: dict[str, Any], process: ProcessEvents) -> None:
    figures = {key: value for key, value in record.items() if key not in _OWN}
    numbers: list[Any] = [record.get("t"), *(record.get(key, absent) for key, absent in _OPTIONAL.items())]
    texts: list[Any] = [record.get("event"), record.get("lane"), record.get("id", "")]
    whole = all(type(number) is int and abs(number) < 1 << 63 for number in numbers)
    if not whole or not all(type(text) is str for text in texts) or 0 != numbers[1] < numbers[0]:
        process.unread += 1
        return
    t, end, step, index = numbers
    name, lane, identity = texts
    process.events.append(Event(t, end, name, lane, step, index, identity, figures))


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """`None` for a whole line that is no record."""
    try:
        with open_regular(path) as file:
            while line := file.readline(RECORD_LIMIT_NBYTES + 1):
                if not line.endswith(b"\n") and len(line) <= RECORD_LIMIT_NBYTES:
                    return
                try:
                    yield parse_record(line)
                except ValueError:
                    yield None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None

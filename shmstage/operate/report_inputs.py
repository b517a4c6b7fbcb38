"""A run's files → what its report is made from. Tolerant: a run that was killed or is still going has a report, too."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError, shown
from shmstage.memory.inspect import printable
from shmstage.operate.run_status import RunStatus, status_of
from shmstage.records import RECORD_LIMIT_NBYTES, open_regular, parse_record, read_json
from shmstage.timeline.reading import ProcessEvents, read_events
from shmstage.timeline.run_record import RunRecord, StepFigures, step_figures


def record_of(name: str) -> RunRecord:
    """Of the run that ``name`` means, as ``shmstage status`` takes it.

    Raises ``SettingsError`` if there is no such run, or nothing of it on disk.
    """
    status = status_of(name)
    if status.out is None:
        raise SettingsError(f"run {shown(name)} has no OUT directory here, only shared memory; see `shmstage status`")
    notes = list(status.notes)
    lines = _step_lines(status.out / "steps.jsonl", notes)
    summary = _summary(status.out / "summary.json", notes)
    return RunRecord(
        run=status.run or status.out.name, out=printable(str(status.out)), state=status.verdict.state,
        verdict=status.verdict.text, boundary=_boundary(status.out), steps_planned=status.steps, lines=lines,
        summary=summary, processes=_events(status.out, notes), restarts=status.restarts or {},
        failures=_failures(status), notes=notes,
    )  # fmt: skip


def _failures(status: RunStatus) -> dict[str, str]:
    """A run that has ended well has none, whatever an earlier try left."""
    return dict(status.failures or {}) if status.verdict.state != "finished" else {}


def _step_lines(path: Path, notes: list[str]) -> list[StepFigures]:
    """One line after the other: each may name thousands of trajectories, and there may be a hundred thousand."""
    found: list[StepFigures] = []
    odd = 0
    try:
        with open_regular(path) as file:
            while line := file.readline(RECORD_LIMIT_NBYTES + 1):
                if not line.endswith(b"\n") and len(line) <= RECORD_LIMIT_NBYTES:
                    break  # torn: the writer was killed, or is at it
                figures = None
                with contextlib.suppress(ValueError):
                    figures = step_figures(parse_record(line))
                if figures is None:
                    odd += 1
                else:
                    found.append(figures)
    except FileNotFoundError:
        pass
    except OSError as error:
        notes.append(f"steps.jsonl cannot be read: {error.strerror}")
    if odd:
        notes.append(f"{odd} lines of steps.jsonl are no step lines and are left out")
    return found


def _summary(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        return read_json(path, "the figures here are of the step lines")
    except FileNotFoundError:
        return None
    except SettingsError as error:
        notes.append(printable(str(error)))
        return None


def _events(out: Path, notes: list[str]) -> list[ProcessEvents]:
    try:
        found = read_events(out)
    except SettingsError as error:
        notes.append(f"no events are used: {printable(str(error))}")
        return []
    if not found:
        notes.append("no events were written: boundaries are drawn from the step lines, memory is not known")
    return found


def _boundary(out: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((out / "run.json").read_bytes())["settings"]["boundary"])
    return ""

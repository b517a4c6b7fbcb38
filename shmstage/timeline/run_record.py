"""What a report is made from: one run as its files tell it, in plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shmstage.timeline.boundaries import step_of_line
from shmstage.timeline.microbatches import StepInstants
from shmstage.timeline.reading import ProcessEvents

#: figures of a step line in seconds; those that are no number are not known
_SECONDS = ("step_s", "boundary_idle_s", "pack_s", "slot_wait_s", "data_wait_s", "upload_s", "exposed_s")
MODES = ("serial", "pipelined", "staged_after_update", "staged_before_update")


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What of a step line the report shows; ``seconds`` holds what is known of ``_SECONDS``."""

    step: int
    attempt: int
    mode: str
    seconds: Mapping[str, float]
    microbatches: int
    tokens: int
    nbytes: int
    staged: bool
    not_staged_because: str
    latch: tuple[str, str]
    instants: StepInstants | None

    @property
    def idle_s(self) -> float | None:
        """Of the boundary before this step."""
        return self.seconds.get("boundary_idle_s")


def step_figures(line: Mapping[str, Any]) -> StepFigures | None:
    """``None`` for a record that is no step line."""
    step, attempt = line.get("step"), line.get("attempt")
    if type(step) is not int or type(attempt) is not int or not 0 <= step < 1 << 53:
        return None
    seconds = {name: value for name in _SECONDS if (value := _number(line.get(name))) is not None}
    latch = line.get("latch")
    level, reason = (latch.get("level"), latch.get("reason")) if isinstance(latch, Mapping) else ("", "")
    return StepFigures(
        step=step, attempt=attempt, mode=str(line.get("mode", "")), seconds=seconds,
        microbatches=_count(line.get("microbatches")), tokens=_count(line.get("tokens")),
        nbytes=_count(line.get("bytes")), staged=line.get("staged") is True,
        not_staged_because=str(line.get("not_staged_because") or ""), latch=(str(level), str(reason)),
        instants=step_of_line(line),
    )  # fmt: skip


def _number(value: object) -> float | None:
    # a damaged file may hold an integer that no float can be; a comparison is false of nan
    return float(value) if isinstance(value, int | float) and abs(value) < 1 << 63 else None


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """``state`` and ``verdict``: how it is, in a word and a sentence. ``summary`` is ``None`` until it has ended well.

    ``notes`` say what is odd about its files. ``failures``: role → what it said. ``processes``: its events, none if it
    wrote none.
    """

    run: str
    out: str
    state: str
    verdict: str
    boundary: str
    steps_planned: int | None = None
    lines: Sequence[StepFigures] = ()
    summary: Mapping[str, Any] | None = None
    processes: Sequence[ProcessEvents] = ()
    restarts: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def mode(self) -> str:
        return self.lines[-1].mode if self.lines else self.boundary


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians and maxima in seconds. ``source``: the file they stand in."""

    steps: int
    staged_boundaries: int | None
    idle_median: float | None
    idle_max: float | None
    step_median: float | None
    step_max: float | None
    source: Literal["summary.json", "steps.jsonl"]

    @property
    def idle_share(self) -> float | None:
        if self.idle_median is None or not self.step_median:
            return None
        return self.idle_median / self.step_median


def figures_of(record: RunRecord) -> tuple[Figures, list[str]]:
    """Of ``summary.json`` where there is one; and a warning where the step lines say something else."""
    counted = _counted(record.lines)
    if record.summary is None:
        return counted, []
    told = _told(record.summary)
    names = {
        "steps": "steps", "staged_boundaries": "staged boundaries", "idle_median": "median boundary idle",
        "idle_max": "largest boundary idle", "step_median": "median step time", "step_max": "longest step",
    }  # fmt: skip
    odd = [
        f"{text}: summary.json says {getattr(told, name)}, the step lines give {getattr(counted, name)}"
        for name, text in names.items()
        if getattr(told, name) != getattr(counted, name)
    ]
    return told, odd


def _counted(lines: Sequence[StepFigures]) -> Figures:
    idle = [line.idle_s for line in lines if line.idle_s is not None]
    steps = [line.seconds["step_s"] for line in lines if "step_s" in line.seconds]
    return Figures(
        len(lines), sum(line.staged for line in lines if line.idle_s is not None), median(idle), largest(idle),
        median(steps), largest(steps), "steps.jsonl",
    )  # fmt: skip


def _told(summary: Mapping[str, Any]) -> Figures:
    def number(name: str, part: str) -> float | None:
        whole = summary.get(name)
        return _number(whole.get(part)) if isinstance(whole, Mapping) else None

    return Figures(
        _count(summary.get("steps")), _count(summary.get("staged_boundaries")), number("boundary_idle_s", "median"),
        number("boundary_idle_s", "max"), number("step_s", "median"), number("step_s", "max"), "summary.json",
    )  # fmt: skip


def median(values: Sequence[float]) -> float | None:
    """Rounded to microseconds, as ``summary.json`` has it."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return round(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2, 6)


def largest(values: Sequence[float]) -> float | None:
    return round(max(values), 6) if values else None

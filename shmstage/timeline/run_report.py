"""One run → what its page shows, as plain values: series, lanes of chosen boundaries, legs, memory, warnings. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any, Final

from shmstage.timeline.boundaries import Boundary, attempts_of_steps, boundaries_of
from shmstage.timeline.lanes import lanes_of
from shmstage.timeline.legs import LEGS, Leg, legs_of
from shmstage.timeline.microbatches import Attempt, aligned, attempts_of
from shmstage.timeline.run_record import Figures, RunRecord, StepFigures, figures_of
from shmstage.timeline.sampling import SPANS_KEPT, groups, kept, thinned

#: events and step lines tell of one boundary when F was dispatched at the same time in both
SAME_NS: Final = 5_000_000
#: idle of a step line and of the events may differ by rounding
ROUNDING_NS: Final = 1_000
#: what is said at most of one kind, with a word on how many more there are
SAID: Final = 50


@dataclass(frozen=True, slots=True)
class LegTotal:
    """Of all boundaries of a run, in seconds. ``hidden_s``: under way while the devices were not waiting for it."""

    leg: Leg
    idle_s: float
    median_idle_s: float
    whole_s: float
    median_whole_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.whole_s - self.idle_s)


@dataclass(slots=True)
class RunReport:
    """``series``, ``memory`` and ``boundaries`` are what the page's script draws from."""

    record: RunRecord
    figures: Figures
    warnings: list[str]
    legs: list[LegTotal]
    measured: int
    with_events: int
    latch: list[tuple[int, int, str, str]]
    attempts: list[tuple[int, int, int]]
    series: dict[str, Any]
    memory: dict[str, Any]
    boundaries: dict[int, dict[str, Any]] = field(default_factory=dict)


def report_of(record: RunRecord, spans_kept: int = SPANS_KEPT) -> RunReport:
    """Everything of one run. ``spans_kept``: spans of lanes at most, so that the page stays small."""
    figures, odd = figures_of(record)
    attempts = attempts_of(record.processes)
    found, with_events = _boundaries(record.lines, attempts)
    decomposed = [legs_of(boundary) for boundary in found]
    in_idle = [legs.idle_ns for legs in decomposed]
    report = RunReport(
        record=record, figures=figures,
        warnings=[*_warnings(record), *odd, *_disagreements(record.lines, found)],
        legs=[_total(leg, [i[leg] for i in in_idle], [d.whole_ns[leg] for d in decomposed]) for leg in LEGS],
        measured=len(found), with_events=with_events,
        latch=list(_latch(record.lines)), attempts=list(_attempts(record.lines)),
        series=_series(record.lines, found, in_idle), memory=_memory(record),
    )  # fmt: skip
    spans = 0
    for position in kept([boundary.idle.idle_ns for boundary in found]):
        drawn = lanes_of(found[position])
        spans += sum(len(row) for rows in drawn["lanes"].values() for row in rows)
        if spans > spans_kept:
            break
        report.boundaries[drawn["step"]] = drawn
    return report


def _boundaries(lines: Sequence[StepFigures], attempts: Sequence[Attempt]) -> tuple[list[Boundary], int]:
    """One per step line that has a boundary before it: of the events where they tell of it, else of the lines.

    Boundaries after the last line are of the events alone: a run that was killed wrote no line of them.
    """
    told: dict[int, list[Boundary]] = defaultdict(list)
    for attempt in attempts:
        for boundary in boundaries_of(attempt):
            told[boundary.after.step].append(boundary)
    steps = [(line.attempt, line.instants) for line in lines if line.instants is not None]
    noted = {b.after.step: b for attempt in attempts_of_steps(steps) for b in boundaries_of(attempt)}
    found, with_events = [], 0
    for line in lines:
        if line.idle_s is None:
            continue  # the first of its attempt: an earlier attempt's boundary is not its own
        own = noted.get(line.step)
        same = next((b for b in told[line.step] if own is None or _is_same(b, own)), None)
        if same is not None or own is not None:
            found.append(same or own)
            with_events += same is not None
    last = lines[-1].step if lines else 0
    beyond = [told[step][-1] for step in sorted(told) if step > last and told[step]]
    return [boundary for boundary in (*found, *beyond) if boundary is not None], with_events + len(beyond)


def _is_same(told: Boundary, noted: Boundary) -> bool:
    if len(told.before.microbatches) != len(noted.before.microbatches):
        return False  # events were lost: the last micro-batch may not be the last
    return abs(told.at.first_dispatched - noted.at.first_dispatched) <= SAME_NS


def _total(leg: Leg, idle_ns: Sequence[int], whole_ns: Sequence[int]) -> LegTotal:
    if not idle_ns:
        return LegTotal(leg, 0.0, 0.0, 0.0, 0.0)
    return LegTotal(leg, sum(idle_ns) / 1e9, median(idle_ns) / 1e9, sum(whole_ns) / 1e9, median(whole_ns) / 1e9)


# --- along the steps ----------------------------------------------------------------------------------------


def _series(
    lines: Sequence[StepFigures], boundaries: Sequence[Boundary], in_idle: Sequence[dict[Leg, int]]
) -> dict[str, Any]:
    """Idle and step time by step, in seconds; of groups of neighbours the median and the maximum, of legs the mean."""
    points = []
    for group in groups(len(lines)):
        part = [lines[k] for k in group]
        idle = [line.idle_s for line in part if line.idle_s is not None]
        took = [line.seconds["step_s"] for line in part if "step_s" in line.seconds]
        points.append([
            part[0].step, part[-1].step, *(_rounded(f(v)) if v else None for v in (idle, took) for f in (median, max)),
        ])  # fmt: skip
    legs = []
    for group in groups(len(boundaries)):
        sums = [sum(in_idle[k][leg] for k in group) / len(group) / 1e9 for leg in LEGS]
        first, last = boundaries[group[0]].after.step, boundaries[group[-1]].after.step
        legs.append([first, last, *(_rounded(value) for value in sums)])
    return {"steps": points, "legs": legs, "grouped": len(points) < len(lines)}


def _rounded(seconds: float) -> float:
    return round(seconds, 9)


def _latch(lines: Iterable[StepFigures]) -> Iterator[tuple[int, int, str, str]]:
    """(first step, last step, level, reason) of neighbours that agree."""
    for (level, reason), part in groupby(lines, key=lambda line: line.latch):
        steps = [line.step for line in part]
        yield steps[0], steps[-1], level, reason


def _attempts(lines: Iterable[StepFigures]) -> Iterator[tuple[int, int, int]]:
    """(attempt, first step, last step) whose lines were kept."""
    for attempt, part in groupby(lines, key=lambda line: line.attempt):
        steps = [line.step for line in part]
        yield attempt, steps[0], steps[-1]


# --- memory -------------------------------------------------------------------------------------------------

#: figure of an event → what it is called
_CURVES: Final = {"rss_nbytes": "resident", "shared_nbytes": "shared", "held_nbytes": "held by the feeder"}


def _memory(record: RunRecord) -> dict[str, Any]:
    """Curves of [seconds since the first event, bytes]; a curve per process and figure, whoever is started again."""
    curves: dict[str, list[tuple[int, int]]] = defaultdict(list)
    begin, end = 0, 1
    of_process = {id(event): process.process for process in record.processes for event in process.events}
    # shifted events are copies: those of other hosts are named by their figures alone
    for event in aligned(record.processes):
        begin, end = min(begin or event.t, event.t), max(end, event.t)
        if event.event not in ("memory", "gauged"):
            continue
        who = of_process.get(id(event), "")
        for figure, name in _CURVES.items():
            value = event.figures.get(figure)
            if type(value) is int:
                curves[name if figure == "held_nbytes" else f"{who} {name}".strip()].append((event.t, value))
    return {
        "seconds": (end - begin) / 1e9 if begin else 0.0,
        "curves": {
            name: [[round((t - begin) / 1e9, 3), value] for t, value in thinned(samples)]
            for name, samples in sorted(curves.items())
        },
    }


# --- what a person should look at ---------------------------------------------------------------------------


def _warnings(record: RunRecord) -> list[str]:
    found = [f"the {role} failed: {text}" for role, text in record.failures.items()]
    told = (record.summary or {}).get("warnings")
    found += [str(text) for text in told] if isinstance(told, list) else []
    found += record.notes
    for process in record.processes:
        name = f"events of the {process.process} (pid {process.pid})"
        if process.dropped:
            found.append(f"{name}: {process.dropped} could not be written, or came faster than that, and are missing")
        if process.beginning_lost:
            found.append(f"{name}: the oldest made room for newer ones")
        if process.unread:
            found.append(f"{name}: {process.unread} lines are damaged")
    skipped = [line for line in record.lines if line.not_staged_because and "first step" not in line.not_staged_because]
    if skipped and record.mode.startswith("staged"):
        first = f"the first is step {skipped[0].step}: {skipped[0].not_staged_because}"
        found.append(f"{len(skipped)} steps were not staged, {first}")
    return found[:SAID] + ([f"and {len(found) - SAID} more"] if len(found) > SAID else [])


def _disagreements(lines: Sequence[StepFigures], boundaries: Sequence[Boundary]) -> list[str]:
    """Where the instants drawn here give another idle than the step line."""
    said = {line.step: line.idle_s for line in lines if line.idle_s is not None}
    apart = {
        b.after.step: abs(b.idle.idle_ns - round(idle * 1e9))
        for b in boundaries
        if (idle := said.get(b.after.step)) is not None
    }
    odd = {step: by for step, by in apart.items() if by > ROUNDING_NS}
    if not odd:
        return []
    worst = max(odd, key=lambda step: odd[step])
    return [
        f"at {len(odd)} of {len(apart)} boundaries the instants drawn give another idle than the step line, by "
        f"{odd[worst] / 1e6:.3f} ms at most, at step {worst}: figures follow the lines, legs and lanes the instants"
    ]

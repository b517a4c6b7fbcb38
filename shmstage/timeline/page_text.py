"""The parts of a report's page that are text and tables. Pure; what comes from files is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from shmstage.timeline.run_record import Figures
from shmstage.timeline.run_report import SAID, RunReport
from shmstage.timeline.sampling import POINTS

UNKNOWN: Final = "–"
#: state of a run → how it is coloured; every other one is neutral
_STATES: Final = {"finished": "good", "running": "good", "failed": "bad", "killed": "bad", "orphaned": "bad"}


def seconds(value: float | None) -> str:
    """With a unit that suits it and three digits that matter."""
    if not value:
        return UNKNOWN if value is None else "0 ms"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(value) * scale >= 1 or unit == "µs":
            return f"{value * scale:.3g} {unit}" if abs(value) * scale < 100 else f"{value * scale:,.0f} {unit}"
    raise AssertionError(value)


def _measure(report: RunReport, name: str, value: float | None) -> str:
    """A figure that tests and scripts can read exactly: ``data-value`` is what the file says."""
    exact = "" if value is None else repr(value)
    return f'<span class="number" data-figure="{name}" data-value="{exact}">{seconds(value)}</span>'


def heading(reports: Sequence[RunReport]) -> tuple[str, str]:
    """The page's heading and the line below it."""
    if len(reports) > 1:
        names = " · ".join(escape(report.record.run) for report in reports)
        return f"{len(reports)} runs side by side", names
    record = reports[0].record
    return escape(record.run or "a run"), f"{escape(record.mode)} · {escape(record.out)}"


def warnings_of(reports: Sequence[RunReport], extra: Sequence[str]) -> str:
    """The box at the top; empty without warnings."""
    several = len(reports) > 1
    lines = [escape(text) for text in extra]
    for report in reports:
        name = f"<b>{escape(report.record.run)}</b>: " if several else ""
        lines += [f"{name}{escape(text)}" for text in report.warnings]
    if not lines:
        return ""
    items = "".join(f"<li>{line}</li>" for line in lines)
    title = "1 warning" if len(lines) == 1 else f"{len(lines)} warnings"
    failed = " failed" if any(report.record.failures for report in reports) else ""
    return f'<section class="warnings{failed}" aria-label="Warnings"><h2>{title}</h2><ul>{items}</ul></section>'


# --- the figures --------------------------------------------------------------------------------------------

_Row = tuple[str, Callable[[RunReport], str]]


def figures(reports: Sequence[RunReport]) -> str:
    """Tiles for one run, a table for several."""
    if len(reports) > 1:
        return _side_by_side(reports)
    report = reports[0]
    told = report.figures
    tiles = [
        ("Boundary idle, median", _measure(report, "boundary_idle_s.median", told.idle_median),
         f"largest {_measure(report, 'boundary_idle_s.max', told.idle_max)}"),
        ("Step time, median", _measure(report, "step_s.median", told.step_median),
         f"longest {_measure(report, 'step_s.max', told.step_max)}"),
        ("Idle of a step", _share(told), "median idle ÷ median step"),
        ("Staged boundaries", _count("staged_boundaries", told.staged_boundaries), f"of {_boundaries(report)}"),
        ("Steps", _count("steps", told.steps), _planned(report)),
        ("State", _state(report), _verdict(report)),
    ]  # fmt: skip
    cards = "".join(
        f'<div class="tile"><dt>{name}</dt><dd>{value}</dd><dd class="small">{below}</dd></div>'
        for name, value, below in tiles
    )
    return f'<dl class="tiles">{cards}</dl><p class="hint">{_source(told)}</p>'


def _side_by_side(reports: Sequence[RunReport]) -> str:
    base = reports[0].figures.idle_median
    rows: list[_Row] = [
        ("Mode", lambda r: escape(r.record.mode)),
        ("State", _state),
        ("Boundary idle, median", lambda r: _measure(r, "boundary_idle_s.median", r.figures.idle_median)),
        ("against the first run", lambda r: _against(r.figures.idle_median, base)),
        ("Boundary idle, largest", lambda r: _measure(r, "boundary_idle_s.max", r.figures.idle_max)),
        ("Step time, median", lambda r: _measure(r, "step_s.median", r.figures.step_median)),
        ("Step time, longest", lambda r: _measure(r, "step_s.max", r.figures.step_max)),
        ("Idle of a step", lambda r: _share(r.figures)),
        ("Staged boundaries", lambda r: _count("staged_boundaries", r.figures.staged_boundaries)),
        ("Steps", lambda r: _count("steps", r.figures.steps)),
        ("Restarts", lambda r: str(sum(r.record.restarts.values()))),
        ("Figures from", lambda r: r.figures.source),
    ]
    body = "".join(
        f'<tr><th scope="row">{name}</th>'
        + "".join(f'<td data-run="{number}">{cell(report)}</td>' for number, report in enumerate(reports))
        + "</tr>"
        for name, cell in rows
    )
    return _table("Figures of all runs", f"<thead><tr><td></td>{_run_heads(reports)}</tr></thead><tbody>{body}</tbody>")


def _run_heads(reports: Sequence[RunReport]) -> str:
    return "".join(
        f'<th scope="col"><span class="swatch run-{number}"></span>{escape(report.record.run)}</th>'
        for number, report in enumerate(reports)
    )


def _against(value: float | None, base: float | None) -> str:
    if value is None or base is None:
        return UNKNOWN
    if value == base:
        return "equal"
    if value == 0 or base == 0:
        return "none left" if value == 0 else "from none"
    return f"÷ {base / value:.3g}" if value < base else f"× {value / base:.3g}"


def _share(told: Figures) -> str:
    return UNKNOWN if told.idle_share is None else f"{told.idle_share:.1%}"


def _count(name: str, value: int | None) -> str:
    if value is None:
        return UNKNOWN
    return f'<span class="number" data-figure="{name}" data-value="{value}">{value:,}</span>'


def _boundaries(report: RunReport) -> str:
    count = sum(line.idle_s is not None for line in report.record.lines)
    return f"{count:,} boundaries" if count != 1 else "1 boundary"


def _planned(report: RunReport) -> str:
    planned = report.record.steps_planned
    return "as many as the input gives" if planned is None else f"of {planned:,} planned"


def _state(report: RunReport) -> str:
    state = report.record.state
    return f'<span class="state {_STATES.get(state, "")}">{escape(state)}</span>'


def _verdict(report: RunReport) -> str:
    """What a failed run said stands among the warnings, where there is room for it."""
    text = "what it said stands above" if report.record.failures else report.record.verdict
    return f'<span class="sentence">{escape(text)}</span>'


def _source(told: Figures) -> str:
    if told.source == "summary.json":
        return "Figures from summary.json, checked against the step lines."
    return "There is no summary.json: these are the figures of the step lines so far."


# --- legs, memory, history ----------------------------------------------------------------------------------


def legs(reports: Sequence[RunReport]) -> str:
    """What each leg took, in the idle and beside it."""
    known = [report for report in reports if report.measured]
    if not known:
        return '<p class="about">No boundary of which every instant is known.</p>'
    counts = "; ".join(
        (f"{escape(report.record.run)}: " if len(reports) > 1 else "")
        + f"{report.measured:,} boundaries, {report.with_events:,} of them with events"
        for report in known
    )
    return f'<p class="hint">{counts}.</p>' + (_legs_of(known[0]) if len(reports) == 1 else _legs_side_by_side(reports))


def _legs_of(report: RunReport) -> str:
    total = sum(leg.idle_s for leg in report.legs)
    rows = "".join(
        f"<tr>{_leg_name(leg.leg)}"
        f"<td>{_cell(leg.median_idle_s)}</td><td>{_cell(leg.idle_s)}</td>"
        f"<td>{f'{leg.idle_s / total:.1%}' if total and leg.idle_s else UNKNOWN}</td>"
        f"<td>{_cell(leg.median_whole_s)}</td><td>{_cell(leg.hidden_s)}</td></tr>"
        for leg in sorted(report.legs, key=lambda leg: (-leg.idle_s, -leg.whole_s))
        if leg.idle_s or leg.whole_s
    )
    names = ("leg", "idle, median", "idle, all", "of the idle", "whole, median", "hidden, all")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    foot = f'<tr><th scope="row">all</th><td></td><td>{seconds(total)}</td><td></td><td></td><td></td></tr>'
    return _table("Legs", f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody><tfoot>{foot}</tfoot>")


def _legs_side_by_side(reports: Sequence[RunReport]) -> str:
    """Per boundary: the idle of each leg, and below it how long the leg took, both on average, so that they add up."""
    rows = "".join(
        f"<tr>{_leg_name(leg.leg)}{''.join(_mean_of(report, k) for report in reports)}</tr>"
        for k, leg in enumerate(reports[0].legs)
        if any(report.legs[k].idle_s or report.legs[k].whole_s for report in reports)
    )
    sums = "".join(
        f"<td>{seconds(sum(leg.idle_s for leg in report.legs) / report.measured if report.measured else None)}</td>"
        for report in reports
    )
    foot = f'<tr><th scope="row">all</th>{sums}</tr>'
    head = f'<thead><tr><th scope="col">idle per boundary, mean</th>{_run_heads(reports)}</tr></thead>'
    return _table("Legs of all runs", f"{head}<tbody>{rows}</tbody><tfoot>{foot}</tfoot>")


def _mean_of(report: RunReport, k: int) -> str:
    if not report.measured:
        return f"<td>{UNKNOWN}</td>"
    leg = report.legs[k]
    whole = f"<small>took {seconds(leg.whole_s / report.measured)}</small>" if leg.whole_s else ""
    return f"<td>{_cell(leg.idle_s / report.measured)}{whole}</td>"


def _leg_name(leg: str) -> str:
    return f'<th scope="row" class="whole"><span class="swatch leg-{leg}"></span>{leg}</th>'


def _cell(value: float) -> str:
    return seconds(value) if value else UNKNOWN


def memory(reports: Sequence[RunReport]) -> str:
    """What to say where there is nothing to draw."""
    without = [report.record.run for report in reports if not report.memory["curves"]]
    if not without:
        return '<p class="about">Of the processes, once a second; of the feeder, as it packs.</p>'
    who = "" if len(reports) == 1 else f" of {escape(', '.join(without))}"
    return f'<p class="about">Not known{who}: no events were written.</p>'


def history(reports: Sequence[RunReport]) -> str:
    """Attempts, restarts and latch states of each run."""
    several = len(reports) > 1
    parts = []
    for number, report in enumerate(reports):
        name = f'<span class="swatch run-{number}"></span><b>{escape(report.record.run)}</b>: ' if several else ""
        text = f"{name}{escape(report.record.verdict)}. {_restarts(report)}"
        parts.append(f'<p class="sentence">{text}</p>{_attempts(report)}')
    return "".join(parts) + _latch(reports)


def _restarts(report: RunReport) -> str:
    restarts = ", ".join(f"{escape(role)} {count}" for role, count in report.record.restarts.items() if count)
    return f"Restarts: {restarts}." if restarts else "No restarts."


def _attempts(report: RunReport) -> str:
    if len(report.attempts) < 2:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{attempt}</th><td class="text">{_span(first, last)}</td></tr>'
        for attempt, first, last in report.attempts[-SAID:]
    )
    head = '<tr><th scope="col">attempt</th><th scope="col" class="text">steps whose lines were kept</th></tr>'
    return _table(f"Attempts of {report.record.run}", f"<thead>{head}</thead><tbody>{rows}</tbody>")


def _latch(reports: Sequence[RunReport]) -> str:
    states = [(report.record.run, *state) for report in reports for state in report.latch if state[2]]
    if not states:
        return '<p class="about">No latch states: no step line was written.</p>'
    several = len(reports) > 1
    rows = "".join(
        f'<tr><th scope="row">{f"{escape(run)}, " if several else ""}{_span(first, last)}</th>'
        f'<td class="text">{escape(level)}</td><td class="text">{escape(reason)}</td></tr>'
        for run, first, last, level, reason in states[:SAID]
    )
    more = f'<p class="hint">and {len(states) - SAID:,} more changes.</p>' if len(states) > SAID else ""
    names = ("steps", "latch: may be staged", "why")
    head = "".join(f'<th scope="col" class="text">{name}</th>' for name in names)
    return _table("Latch states", f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>") + more


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _table(name: str, inner: str) -> str:
    """In a box of its own that scrolls, so that the page never does; reachable by keyboard for that."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(name)}"><table>{inner}</table></div>'


# --- what is left out ---------------------------------------------------------------------------------------


def grouped(reports: Sequence[RunReport]) -> str:
    if not any(report.series["grouped"] for report in reports):
        return ""
    return f"Neighbouring steps are summed up in {POINTS} groups at most: the line is the median, the area the maximum."


def kept_note(reports: Sequence[RunReport]) -> str:
    """Which boundaries can be picked."""
    parts = [
        f"{len(report.boundaries):,} of {report.measured:,}"
        + (f" of {escape(report.record.run)}" if len(reports) > 1 else "")
        for report in reports
        if len(report.boundaries) < report.measured
    ]
    if not parts:
        return ""
    return f"Kept here: {'; '.join(parts)} boundaries, those with the most idle, the first, the last and some between."

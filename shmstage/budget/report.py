"""The budget as one JSON object (bytes, all integers) and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from shmstage.budget.formula import MOMENTS, SCOPES, Forecast, forecast
from shmstage.budget.search import MOST, Suggestion, most_that_fits, suggestions
from shmstage.budget.sizes import gib, in_words
from shmstage.budget.verdict import Bound, Fit, Judgement, judge
from shmstage.memory.limits import format_nbytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from shmstage.budget.formula import Inputs


@final
@dataclass(frozen=True)
class Report:
    """``assumed``: what nobody said, and what was taken for it. ``most``: ``None`` where what bounds it is not known.
    ``reservations``: what the verdict alone does not tell.
    """

    forecast: Forecast
    judgement: Judgement
    most: Mapping[str, int | None]
    suggestions: Sequence[Suggestion]
    assumed: Sequence[str]
    reservations: Sequence[str] = ()


def report_on(
    inputs: Inputs, bounds: Sequence[Bound], assumed: Sequence[str] = (), *, processes_assumed: bool = False
) -> Report:
    """Forecast, verdict, the most that fits and what would make it fit. Raises as ``forecast`` and ``judge``.

    ``processes_assumed``: nobody said what the processes take.
    """
    found = forecast(inputs)
    judgement = judge(found, bounds)
    most: dict[str, int | None] = {name: most_that_fits(inputs, bounds, name) for name in ("slots", "rows")}
    reservations, told = [], list(assumed)
    on_device = max(found.total(moment, "device") for moment in MOMENTS)
    if on_device and not any("device" in bound.scopes for bound in bounds):
        most["rows"] = None  # they take device memory, too
        reservations.append(f"device memory was not judged: {in_words(on_device)} are needed; {_JUDGE_IT}")
        told.append(f"device memory is large enough: nobody said how much there is; {_JUDGE_IT}")
    if processes_assumed and judgement.verdict == "does not fit":
        without = judge(forecast(replace(inputs, process_nbytes=0)), bounds)
        if without.verdict != "does not fit":
            reservations.append(
                f"only the {in_words(inputs.process_nbytes)} that the processes are assumed to take make it so: "
                "--process-bytes, or process_bytes in the table [budget], replaces them"
            )
    return Report(found, judgement, most, suggestions(inputs, bounds), told, reservations)


_JUDGE_IT = "--device-memory has it judged"


def as_json(report: Report) -> dict[str, Any]:
    """One object; every size in bytes, ``share`` of the slot's payload."""
    found = report.forecast
    layout = found.layout
    return {
        "needs": {
            "slot_payload": layout.payload_nbytes,
            "slot": found.slot_nbytes,
            "pool": found.pool_nbytes,
            **{amount.name: amount.most for amount in found.amounts},
        },
        "fields": [
            {
                "name": field.name,
                "dtype": field.dtype,
                "shape": list(field.shape),
                "nbytes": field.nbytes,
                "share": round(field.nbytes / layout.payload_nbytes, 6),
            }
            for field in layout.fields
        ],
        "amounts": [
            {
                "name": amount.name,
                "scope": amount.scope,
                "formula": amount.formula,
                **{moment: getattr(amount, moment) for moment in MOMENTS},
                "counted": amount.counted,
            }
            for amount in found.amounts
        ],
        "totals": {moment: {scope: found.total(moment, scope) for scope in SCOPES} for moment in MOMENTS},
        "limits": [_fit_json(fit) for fit in report.judgement.fits],
        "binding": _fit_json(report.judgement.binding),
        "verdict": report.judgement.verdict,
        "most": dict(report.most),
        "reservations": list(report.reservations),
        "suggestions": [
            {
                "change": dict(suggestion.change),
                "text": suggestion.text,
                "verdict": suggestion.verdict,
                "headroom": suggestion.headroom_nbytes,
            }
            for suggestion in report.suggestions
        ],
        "assumed": list(report.assumed),
    }


def _fit_json(fit: Fit) -> dict[str, Any]:
    return {
        "name": fit.bound.name,
        "kind": fit.bound.kind,
        "available": fit.bound.available_nbytes,
        "total": fit.bound.total_nbytes,
        "bounds": list(fit.bound.scopes),
        "need": fit.need_nbytes,
        "moment": fit.moment,
        "headroom": fit.headroom_nbytes,
    }


def verdict_line(report: Report) -> str:
    """The verdict, the limit that binds and both figures, others that are passed, and what is not told, in one line."""
    fit = report.judgement.binding
    left = f"{in_words(abs(fit.headroom_nbytes))} {'left' if fit.headroom_nbytes >= 0 else 'short'}"
    said = (
        f"{report.judgement.verdict}: {' and '.join(fit.bound.scopes)} memory needs {in_words(fit.need_nbytes)} "
        f"({_MOMENT[fit.moment]}); {fit.bound.name} leaves {in_words(fit.bound.available_nbytes)}: {left}"
    )
    others = [
        f"{other.bound.name} is {in_words(-other.headroom_nbytes)} short, too"
        for other in report.judgement.fits
        if other is not fit and other.verdict == "does not fit"
    ]
    return "; ".join([said, *others, *report.reservations])


_MOMENT = {"steady": "at steady state", "checkpoint": "at a checkpoint", "restart": "at a restart"}


def print_report(report: Report, console: Console, *, explain: bool = False) -> None:
    """Tables for people: GB are 1e9 bytes, GiB 2**30."""
    for table in (_field_table(report), _amount_table(report, explain=explain), _limit_table(report)):
        console.print(table)
    if not all(amount.counted for amount in report.forecast.amounts):
        console.print("in brackets: shown beside, not counted", markup=False, highlight=False)
    for text in report.assumed:
        console.print(f"assumed: {text}", markup=False, highlight=False, soft_wrap=True)
    caps = ", ".join(_most_in_words(name, count) for name, count in report.most.items())
    console.print(f"most that fits, all else as it is: {caps}", markup=False, highlight=False, soft_wrap=True)
    for suggestion in report.suggestions:
        console.print(
            f"{'would fit' if suggestion.verdict == 'fits' else suggestion.verdict}: {suggestion.text} "
            f"({in_words(suggestion.headroom_nbytes)} left)",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    if report.judgement.verdict == "does not fit" and not report.suggestions:
        binding = report.judgement.binding
        text = f"no setting makes it fit; {binding.bound.name} has to leave {in_words(binding.need_nbytes)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(verdict_line(report), markup=False, highlight=False, soft_wrap=True)


def _most_in_words(name: str, count: int | None) -> str:
    if count is None:
        return f"{name} unknown, as device memory was not judged"
    return f"{count} {name}" + (" (no setting may say more)" if count == MOST[name] else "")


def add_texts(table: Table, *cells: str) -> None:
    """A row of text as it is: rich would take brackets for markup and drop them."""
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _field_table(report: Report) -> RenderableType:
    from rich.table import Table

    layout = report.forecast.layout
    table = Table(title="fields of a micro-batch", title_justify="left")
    for name in ("field", "dtype", "shape"):
        table.add_column(name)
    for name in ("bytes", "GB (1e9)", "share"):
        table.add_column(name, justify="right")
    for field in layout.fields:
        share = f"{field.nbytes / layout.payload_nbytes:.1%}"
        shape = "×".join(map(str, field.shape))
        add_texts(table, field.name, field.dtype, shape, str(field.nbytes), format_nbytes(field.nbytes), share)
    total = layout.payload_nbytes
    table.add_section()
    add_texts(table, "payload of a slot", "", "", str(total), format_nbytes(total), "100.0%")
    return table


def _amount_table(report: Report, *, explain: bool) -> RenderableType:
    from rich.table import Table

    found = report.forecast
    table = Table(title="needed, in bytes", title_justify="left")
    for name in ("amount", "where"):
        table.add_column(name)
    for name in ("steady", "at a checkpoint", "at a restart"):
        table.add_column(name, justify="right")
    if explain:
        table.add_column("formula")
    for amount in found.amounts:
        name = amount.name if amount.counted else f"({amount.name})"
        figures = [str(getattr(amount, moment)) for moment in MOMENTS]
        add_texts(table, name, amount.scope, *figures, *([amount.formula] if explain else []))
    table.add_section()
    for scope in SCOPES:
        totals = [found.total(moment, scope) for moment in MOMENTS]
        if any(totals):
            figures = [f"{total}\n{format_nbytes(total)} = {gib(total)}" for total in totals]
            add_texts(table, "total", scope, *figures, *([""] if explain else []))
    return table


def _limit_table(report: Report) -> RenderableType:
    from rich.table import Table

    table = Table(title="limits", title_justify="left")
    table.add_column("limit")
    for name in ("available", "needed", "headroom"):
        table.add_column(name, justify="right")
    for fit in report.judgement.fits:
        mark = " ← binds" if fit is report.judgement.binding else ""
        figures = (fit.bound.available_nbytes, fit.need_nbytes, fit.headroom_nbytes)
        add_texts(table, fit.bound.name + mark, *(f"{n}\n{format_nbytes(n)} = {gib(n)}" for n in figures))
    return table

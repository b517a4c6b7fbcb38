"""``shmstage report RUN [RUN ...]``: one page that shows what happened, and where the devices waited."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError, shown
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.operate.report_inputs import record_of
from shmstage.timeline.page import RUNS_AT_MOST, page_of
from shmstage.timeline.run_record import RunRecord
from shmstage.timeline.run_report import RunReport, report_of
from shmstage.timeline.sampling import SPANS_KEPT
from shmstage.timeline.trace import write_trace

_BEGINNING = b"<!doctype html>"


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage report",
        description="Write one HTML page on a run, or on several side by side: boundary idle per step, the lanes of "
        "each boundary to scale, where its idle went, memory. It needs no network, and nothing of the runs afterwards.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="OUT directory, run id, or the beginning of one")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="PATH", help="default report.html")
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="also write the events of RUN as a Chrome trace, for Perfetto"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    _check(args)
    records = [record_of(name) for name in args.runs]
    _check_apart(args.runs, records)
    warnings = _named_apart(records)
    reports = [report_of(record, SPANS_KEPT // len(records)) for record in records]
    _write(args.out, page_of(reports, warnings))
    trace = _trace(Path(records[0].out), args.trace) if args.trace is not None else None
    warnings += [text for report in reports for text in _of_run(report, len(reports) > 1)]
    if args.json:
        result = {"out": str(args.out), "runs": [as_json(report) for report in reports], "warnings": warnings}
        print(json.dumps(result if trace is None else result | {"trace": trace}))
        return 0
    for text in warnings:
        print(f"warning: {text}")
    print(f"{args.out}: {', '.join(_in_words(report) for report in reports)}")
    if trace is not None:
        print(f"{args.trace}: open it in https://ui.perfetto.dev")
    return 0


def as_json(report: RunReport) -> dict[str, Any]:
    """The page's figures, as plain values in seconds. ``drawn``: boundaries that can be looked at one by one."""
    told, record = report.figures, report.record
    return {
        "run": record.run,
        "out": record.out,
        "mode": record.mode,
        "state": record.state,
        "steps": told.steps,
        "staged_boundaries": told.staged_boundaries,
        "boundary_idle_s": {"median": told.idle_median, "max": told.idle_max},
        "step_s": {"median": told.step_median, "max": told.step_max},
        "source": told.source,
        "boundaries": report.measured,
        "with_events": report.with_events,
        "drawn": len(report.boundaries),
        "legs": {leg.leg: {"idle_s": leg.idle_s, "whole_s": leg.whole_s} for leg in report.legs},
    }


def _check(args: argparse.Namespace) -> None:
    if len(args.runs) > RUNS_AT_MOST:
        raise SettingsError(f"{len(args.runs)} runs; a page shows {RUNS_AT_MOST} at most: name fewer")
    if args.trace is not None and len(args.runs) > 1:
        raise SettingsError("--trace is of one run; name one RUN with it")
    if args.trace is not None and args.trace.absolute() == args.out.absolute():
        raise SettingsError(f"--out and --trace are both {shown(str(args.out))}; give two files")
    if args.out.is_dir():
        raise SettingsError(f"--out {shown(str(args.out))} is a directory; name a file in it")
    if not args.out.parent.is_dir():
        raise SettingsError(f"--out {shown(str(args.out))} would lie in a directory that is not there; make it")
    if args.out.exists() and not _may_be_replaced(args.out):
        raise SettingsError(f"--out {shown(str(args.out))} is there and is no report; choose another name or remove it")


def _may_be_replaced(path: Path) -> bool:
    """A page, or nothing yet: a mistyped --out must not cost a run its step lines."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BEGINNING)).lower() in (b"", _BEGINNING)
    except OSError as error:
        raise SettingsError(f"--out {shown(str(path))} cannot be read: {error.strerror}; choose another name") from None


def _check_apart(names: Sequence[str], records: Sequence[RunRecord]) -> None:
    outs = [os.path.realpath(record.out) for record in records]
    for position, out in enumerate(outs):
        if out in outs[:position]:
            first = names[outs.index(out)]
            raise SettingsError(f"{shown(first)} and {shown(names[position])} are one run; name each once")


def _named_apart(records: Sequence[RunRecord]) -> list[str]:
    if len({record.run for record in records}) == len(records):
        return []
    return ["several of these runs have the same id: they are in the order in which they were named"]


def _write(path: Path, text: str) -> None:
    """In one piece: whoever has the old page open sees the old one or the new one."""
    partial = None
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".report-")
        partial = Path(name)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(path)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise SettingsError(f"{path} cannot be written: {error.strerror}; choose another --out") from None


def _trace(out: Path, path: Path) -> dict[str, Any]:
    return asdict(write_trace(out, path))


def _of_run(report: RunReport, several: bool) -> list[str]:
    return [f"{report.record.run}: {text}" if several else text for text in report.warnings]


def _in_words(report: RunReport) -> str:
    idle = report.figures.idle_median
    text = "no boundary measured" if idle is None else f"median boundary idle {idle * 1e3:.1f} ms"
    return f"{report.record.run} ({report.figures.steps} steps, {text})"

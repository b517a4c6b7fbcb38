"""``shmstage doctor``: is this machine fit for shared memory, and what to do where it is not."""

from __future__ import annotations

import json
import os
import platform
import stat
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shmstage.errors import TransportError
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.memory.machine import read_machine
from shmstage.memory.sweep import sweep
from shmstage.operate.gc_command import collect
from shmstage.operate.machine_checks import (
    Finding,
    check_leftovers,
    check_machine,
    check_runtime_dir,
    check_software,
)
from shmstage.transport.endpoints import runtime_dir

_ORDER = {"problem": 0, "note": 1, "ok": 2}
_COLOURS = {"problem": "bold red", "note": "yellow", "ok": "green"}
#: what trains; the rest cannot be missing where this runs
_PACKAGES = ("jax", "optax", "orbax-checkpoint")


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage doctor",
        description="Check this machine for what makes shared memory fail. Exit code 1 if a problem was found.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    findings = examine()
    if args.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    return int(any(finding.level == "problem" for finding in findings))


def examine() -> list[Finding]:
    """Every finding about this machine, the worst first. Changes nothing but that the runtime directory exists."""
    machine = read_machine()
    try:
        left = [*collect(dry_run=True).removed]
    except (TransportError, OSError):  # of the runtime directory, which has a finding of its own
        left = sweep(dry_run=True)
    endpoints = sum(item.name.startswith("/") for item in left)
    findings = [
        *check_machine(machine),
        _runtime_finding(),
        check_leftovers(machine, sum(item.nbytes for item in left), len(left) - endpoints, endpoints),
        check_software([("python", platform.python_version()), *((name, _version(name)) for name in _PACKAGES)]),
    ]
    return sorted(findings, key=lambda finding: _ORDER[finding.level])


def _runtime_finding() -> Finding:
    try:
        path = runtime_dir()
        mode = stat.S_IMODE(path.stat().st_mode)
    except (TransportError, OSError) as error:
        return check_runtime_dir("", str(error), 0, "")
    asked = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or ""
    return check_runtime_dir(str(path), "", mode, asked if asked and path.parent != Path(asked) else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _show(findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shmstage.launch.progress import PatientConsole

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text(finding.level, style=_COLOURS[finding.level]), finding.check, text)
    console = PatientConsole(highlight=False)
    console.print(table)
    console.print(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    problems, notes = (sum(finding.level == level for finding in findings) for level in ("problem", "note"))
    found = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"
    return f"{found}, {notes} note{'s' * (notes != 1)}" if notes else found

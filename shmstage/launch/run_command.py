"""``shmstage run``: settings from flags, environment and file; one run on this host; its summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from shmstage.errors import SettingsError
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.launch.run_directory import completed, find_run, run_file
from shmstage.settings import SWITCHES, WANTED, Resolved, Settings, leaves_of, resolve
from shmstage.settings_origins import TABLES

if TYPE_CHECKING:
    from shmstage.launch.progress import StepProgress

#: heading in --help → the first setting under it, in the order of their declaration
SECTIONS = {
    "The run and its input": "run",
    "Order and size of steps": "boundary",
    "Memory": "slots",
    "What is done at a boundary": "checkpoint_every",
    "Checks, resume, events": "verify",
    "Watching": "metrics_port",
    "Deadlines and restarts": "stage_wait_s",
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, named as in TOML, with ``-`` for ``_``; unset flags stay ``None``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    heading_of = {key: heading for heading, key in SECTIONS.items()}
    for key, field in Settings.model_fields.items():
        if key in TABLES:
            continue
        if key in heading_of:
            group = parser.add_argument_group(heading_of[key])
        flag = "--" + key.replace("_", "-")
        default = "" if field.default in (None, "", False) else f" (default {field.default})"
        text = (field.description or "") + default
        if key == "resume":
            text += "; RUN: its OUT directory, its id or the beginning of it; without RUN --out says where"
            group.add_argument(flag, nargs="?", const=True, default=None, metavar="RUN", help=text)
            group.add_argument("--no-resume", dest=key, action="store_false", default=None, help=argparse.SUPPRESS)
        elif field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif get_origin(field.annotation) is Literal:
            group.add_argument(flag, choices=get_args(field.annotation), help=text)
        else:
            group.add_argument(flag, metavar=_metavar(key, field.annotation), help=text)
    group = parser.add_argument_group("The three switches", "another spelling of --boundary")
    for key, (variable, text) in SWITCHES.items():
        flag = "--" + key.replace("_", "-")
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=f"{text} (${variable})")


def _metavar(key: str, annotation: Any) -> str:
    if key in WANTED:
        return WANTED[key][0]
    if key.endswith("_s"):
        return "SECONDS"
    return {int: "N", float: "NUMBER", Path: "PATH"}[next(leaves_of(annotation))]


def resolve_args(args: argparse.Namespace) -> Resolved:
    """Settings from parsed flags, the environment and ``--config``; with ``--resume`` from OUT's first start, too."""
    flags = {key: getattr(args, key) for key in [*Settings.model_fields, *SWITCHES] if hasattr(args, key)}
    if isinstance(flags["resume"], str):
        out = find_run(flags["resume"])
        if flags["out"] is not None and Path(flags["out"]).absolute() != out.absolute():
            raise SettingsError(f"--resume {flags['resume']} is the run in {out}, --out is {flags['out']}; give one")
        flags.update(resume=True, out=out)
    resolved = resolve(flags, os.environ, args.config)
    if not resolved.settings.resume or resolved.settings.out is None:
        return resolved
    before = run_file(resolved.settings.out)
    return resolve(flags, os.environ, args.config, before=before, before_origin=f"{resolved.settings.out}/run.json")


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage run",
        description="Train on this host: orchestrator and trainer joined by shared memory. Without --bundle or "
        "--source it trains the demo bundle.",
    )
    add_settings(parser)
    parser.add_argument("--print-config", action="store_true", help="print every setting and where it came from")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    args = parser.parse_args(argv)
    resolved = resolve_args(args)
    if args.print_config:
        print_config(resolved, as_json=args.json)
        return 0
    summary = run_with_progress(completed(resolved.settings), as_json=args.json)
    if args.json:
        print(json.dumps(summary))
    return 0


def run_with_progress(settings: Settings, *, as_json: bool = False) -> dict[str, Any]:
    """Run with live progress on stderr; returns the summary."""
    from shmstage.launch.single_host import run

    return with_progress(settings, lambda progress: run(settings, progress, progress.say), as_json=as_json)


def with_progress(
    settings: Settings, start: Callable[[StepProgress], dict[str, Any]], *, as_json: bool
) -> dict[str, Any]:
    """What ``start`` returns, with live progress on stderr and a table at the end."""
    from shmstage.launch.progress import PatientConsole, StepProgress, summary_table

    console = PatientConsole(stderr=True)
    with StepProgress(settings, console) as progress:
        summary = start(progress)
    if not as_json:
        console.print(summary_table(summary, settings.step_cap))
        console.print(f"written to {summary['out']}", highlight=False, soft_wrap=True)
    return summary


def print_config(resolved: Resolved, *, as_json: bool) -> None:
    """Every setting, its value and where that came from."""
    values = json.loads(resolved.settings.model_dump_json())
    if as_json:
        print(json.dumps({k: {"value": v, "origin": resolved.origins[k]} for k, v in values.items()}))
        return
    width = max(len(key) for key in values)
    for key, value in values.items():
        sys.stdout.write(f"{key:<{width}}  {json.dumps(value):<28}  {resolved.origins[key]}\n")

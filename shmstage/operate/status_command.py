"""``shmstage status [RUN]``: how a run is, read from outside, so that it also works on one that hangs or was killed."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shmstage.errors import SettingsError
from shmstage.launch.command import CommandParser, json_on_failure
from shmstage.operate.run_status import RunStatus, all_statuses, status_of

if TYPE_CHECKING:
    from rich.console import Console, Group

DEFAULT_WATCH_S = 1.0


def main(argv: Sequence[str]) -> int:
    with json_on_failure("--json" in argv):
        return _main(argv)


def _main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="shmstage status",
        description="Show a run's processes, pools, slots and progress without its co-operation. Without RUN: every "
        "run of this user that has anything in shared memory.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="OUT directory, run id, or the beginning of one")
    parser.add_argument(
        "--watch", nargs="?", type=_seconds, const=DEFAULT_WATCH_S, metavar="SECONDS",
        help=f"look again every so many seconds (default {DEFAULT_WATCH_S:g}) until Ctrl-C",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args(argv)
    if args.json and args.watch is not None:
        raise SettingsError("--json prints one object, --watch goes on; give one of them")
    if args.watch is not None:
        return _watch(args.run, args.watch)
    found = _look(args.run)
    if args.json:
        print(json.dumps({"runs": [as_json(status) for status in found]}))
        return 0
    _show(_view(found), _console())
    return 0


def as_json(status: RunStatus) -> dict[str, Any]:
    """All that is known, as plain values; times in seconds, sizes in bytes."""
    value = asdict(status)
    value["out"] = None if status.out is None else str(status.out)
    return {key: _plain(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # a loss may be NaN, which is no JSON
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _look(run: str | None) -> list[RunStatus]:
    return all_statuses() if run is None else [status_of(run)]


def _view(found: Sequence[RunStatus]) -> Group:
    from rich.console import Group

    from shmstage.operate.status_view import run_view, runs_view

    if not found:
        return Group("no run of this user has anything in shared memory; name a finished one: shmstage status RUN")
    return run_view(found[0]) if len(found) == 1 else runs_view(found)


def _view_again(run: str | None) -> Group:
    """A run that was only in shared memory may end; whoever watches may be waiting for the next one."""
    from rich.console import Group

    try:
        return _view(_look(run))
    except SettingsError as error:
        return Group(f"gone: {error}")


def _show(view: Group, console: Console) -> None:
    from shmstage.operate.status_view import show

    show(view, console)


def _console() -> Console:
    from shmstage.launch.progress import PatientConsole

    return PatientConsole(highlight=False)


def _watch(run: str | None, every_s: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Until Ctrl-C. The last picture stays on the terminal."""
    from rich.live import Live

    console = _console()
    view = _view(_look(run))  # what cannot be found is said before the screen is taken
    try:
        if not console.is_terminal:
            while True:
                _show(view, console)
                sys.stdout.flush()
                if console.quiet:  # whoever read the pipe is gone
                    return 0
                sleep(every_s)
                view = _view_again(run)
        with Live(view, console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(view, refresh=True)
                sleep(every_s)
                view = _view_again(run)
    except KeyboardInterrupt:
        if console.is_terminal:
            _show(view, console)
        return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; RUN goes before --watch") from None
    if not 0.05 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 86400 seconds")
    return seconds

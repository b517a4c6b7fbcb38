"""Progress of a run, on stderr: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from shmstage.launch.step_follower import StepFollower
from shmstage.orchestrator.beginning import NAME as BEGUN
from shmstage.settings import Settings

#: what is still refused then was refused late: whoever waits for a large model to load wants to know its run
HEADER_AFTER_S = 10.0


class PatientConsole(Console):
    """A console that falls silent when nobody reads it any more; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@final
class StepProgress:
    """Follows ``steps.jsonl``; a context manager. ``console`` writes to stderr."""

    def __init__(self, settings: Settings, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._console = console
        self._follower = StepFollower(settings.out_dir / "steps.jsonl")
        if settings.resume:
            with contextlib.suppress(ValueError, OSError):  # whoever has to rely on the file says what is wrong with it
                self._follower.new()  # trained before
        self._clock = clock
        self._polled_at_s: float | None = None
        self._headed = False
        self._bar: RichProgress | None = None
        self._quiet = False

    def __enter__(self) -> StepProgress:
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(
                "starting: imports, compilation, first checkpoint", total=self._settings.step_cap
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def poll(self) -> None:
        """Show step lines written since the last call. Never raises: after the first failure it is quiet."""
        if self._quiet:
            return
        try:
            lines = self._follower.new()
            self._head(bool(lines))
            for line in lines:
                # above the bar, where there is one
                self._console.print(describe_step(line), highlight=False, soft_wrap=True)
                if self._bar is not None:
                    self._bar.update(self._task, completed=line["step"], description="training")
        except Exception as error:  # stderr closed, an odd line: the run goes on without an audience
            self._quiet = True
            with contextlib.suppress(Exception):
                self._console.print(f"progress is no longer shown: {error}", highlight=False)

    def _head(self, has_lines: bool) -> None:
        """Which run this is, once it is one: input that is refused leaves no OUT to be named."""
        if self._headed:
            return
        settings, now_s = self._settings, self._clock()
        self._polled_at_s = now_s if self._polled_at_s is None else self._polled_at_s
        begun = has_lines or (settings.out_dir / BEGUN).exists()
        if not begun and now_s - self._polled_at_s < HEADER_AFTER_S:
            return
        self._headed = True
        self._console.print(
            f"run [bold]{settings.run}[/] · {settings.boundary} · {settings.microbatches_per_step} × "
            f"[{settings.rows}, {settings.tokens}] per step · {settings.out_dir}",
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        with contextlib.suppress(Exception):
            self._console.print(text, highlight=False, soft_wrap=True)


def describe_step(line: dict[str, Any]) -> str:
    """A step line in words."""
    idle, loss = line["boundary_idle_s"], line["loss"]
    return (
        f"step {line['step']:>3}  loss {'-' if loss is None else f'{loss:+.4f}'}  {line['tokens']} tokens"
        f"  {1e3 * line['step_s']:.0f} ms"
        + (f"  boundary idle {1e3 * idle:.1f} ms" if idle is not None else "")
        + ("  staged" if line["staged"] else "")
    )


def summary_table(summary: dict[str, Any], step_cap: int | None = None) -> Table:
    """The figures of a finished run as a table; ``step_cap``: how many steps it was to make at most."""
    table = Table(title=f"run {summary['run']}", show_header=False, title_justify="left")
    idle, step = summary["boundary_idle_s"], summary["step_s"]
    steps, ended_by = summary["steps"], summary.get("ended_by")
    of = f" of {step_cap}" if step_cap is not None and steps < step_cap else ""
    rows = [
        ("steps", f"{steps}{of}, {summary['microbatches_per_step']} micro-batches each"),
        *((("ended by", ended_by),) if ended_by else ()),
        ("mode", summary["mode"]),
        ("staged boundaries", f"{summary['staged_boundaries']}"),
        ("step time, median", _ms(step["median"])),
        ("boundary idle, median / max", f"{_ms(idle['median'])} / {_ms(idle['max'])}"),
        ("loss, first → last", _first_last(summary["losses"])),
        ("trajectories", _trained(summary["trajectories"])),
        ("parameters", summary["param_digest"]),
        ("leaked pools", f"{summary['leaked_pools']}"),
        *(("restarts", f"{role} {count}") for role, count in summary.get("restarts", {}).items() if count),
        *(("[bold]look at[/]", warning) for warning in summary["warnings"]),
    ]
    for name, value in rows:
        table.add_row(name, Text(value))  # brackets in a warning are no markup
    return table


def _trained(seen: dict[str, Any]) -> str:
    """``529 trained: 384 distinct ones, each 1 to 2 times``: with several passes the input is trained again."""
    least, most = seen["min_times"], seen["max_times"]
    if most <= 1:
        return f"{seen['trained']}, each trained once" if most else "0"
    times = f"{most}" if least == most else f"{least} to {most}"
    return f"{seen['trained']} trained: {seen['distinct']} distinct ones, each {times} times"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _first_last(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{known[0]:+.5f} → {known[-1]:+.5f}" if known else "-"

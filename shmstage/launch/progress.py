"""Progress of a run, on stderr: a live bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import contextlib
import time
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from shmstage.launch.step_follower import StepFollower
from shmstage.settings import Settings


class PatientConsole(Console):
    """A console that falls silent when nobody reads it any more; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@final
class StepProgress:
    """Follows ``steps.jsonl``; a context manager. ``console`` writes to stderr."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._follower = StepFollower(settings.out_dir / "steps.jsonl")
        if settings.resume:
            with contextlib.suppress(ValueError, OSError):  # whoever has to rely on the file says what is wrong with it
                self._follower.new()  # trained before
        self._began = time.monotonic()
        self._bar: RichProgress | None = None
        self._quiet = False

    def __enter__(self) -> StepProgress:
        settings = self._settings
        self._console.print(
            f"run [bold]{settings.run}[/] · {settings.boundary} · {settings.microbatches_per_step} × "
            f"[{settings.rows}, {settings.tokens}] per step · {settings.out_dir}",
            highlight=False,
            soft_wrap=True,
        )
        if self._console.is_terminal:
            self._bar = RichProgress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task("starting: imports, compilation, first checkpoint", total=settings.step_cap)
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
            for line in self._follower.new():
                # above the bar, where there is one
                self._console.print(describe_step(line), highlight=False, soft_wrap=True)
                if self._bar is not None:
                    self._bar.update(self._task, completed=line["step"], description="training")
        except Exception as error:  # stderr closed, an odd line: the run goes on without an audience
            self._quiet = True
            with contextlib.suppress(Exception):
                self._console.print(f"progress is no longer shown: {error}", highlight=False)

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


def summary_table(summary: dict[str, Any]) -> Table:
    """The figures of a finished run as a table."""
    table = Table(title=f"run {summary['run']}", show_header=False, title_justify="left")
    idle, step = summary["boundary_idle_s"], summary["step_s"]
    seen = summary["trajectories"]
    rows = [
        ("steps", f"{summary['steps']}, {summary['microbatches_per_step']} micro-batches each"),
        ("mode", summary["mode"]),
        ("staged boundaries", f"{summary['staged_boundaries']}"),
        ("step time, median", _ms(step["median"])),
        ("boundary idle, median / max", f"{_ms(idle['median'])} / {_ms(idle['max'])}"),
        ("loss, first → last", _first_last(summary["losses"])),
        ("trajectories", f"{seen['distinct']} distinct, {seen['trained']} trained"),
        ("parameters", summary["param_digest"]),
        ("leaked pools", f"{summary['leaked_pools']}"),
        *(("restarts", f"{role} {count}") for role, count in summary.get("restarts", {}).items() if count),
        *(("[bold]look at[/]", warning) for warning in summary["warnings"]),
    ]
    for name, value in rows:
        table.add_row(name, Text(value))  # brackets in a warning are no markup
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _first_last(losses: list[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{known[0]:+.5f} → {known[-1]:+.5f}" if known else "-"

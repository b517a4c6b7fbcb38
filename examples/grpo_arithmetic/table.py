"""The live table of a run, plain lines without a terminal, and the plot at its end."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from shmstage.launch.step_follower import StepFollower

ROWS = 12
COLUMNS = ("step", "reward", "", "loss", "grad norm", "staleness", "staged", "idle", "step time")
BAR = 20


class Table:
    """Follows `steps.jsonl`, as `Progress` of a run. A context manager."""

    def __init__(self, out: Path, target: float, steps: int, console: Console | None = None) -> None:
        self._follower = StepFollower(out / "steps.jsonl")
        self._title = f"GRPO on sums · target {target:g} · at most {steps} steps · {out}"
        self._console = console or Console(stderr=True)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS)
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Table:
        if self._live is not None:
            self._live.start()
            self._live.update(self._drawn())
        else:
            self._console.print(self._title, highlight=False, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def poll(self) -> None:
        """Never raises: a run goes on without an audience."""
        with contextlib.suppress(Exception):
            for line in self._follower.new():
                row = row_of(line)
                self._rows.append(row)
                if self._live is None:
                    text = "  ".join(
                        f"{name} {value}".strip() for name, value in zip(COLUMNS, row, strict=True) if name
                    )
                    self._console.print(text, highlight=False, soft_wrap=True)
            if self._live is not None:
                self._live.update(self._drawn())

    def say(self, text: str) -> None:
        with contextlib.suppress(Exception):
            self._console.print(text, highlight=False, soft_wrap=True)

    def _drawn(self) -> RichTable:
        table = RichTable(title=self._title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if not name else "right")
        for row in self._rows:
            table.add_row(*row)
        return table


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """A step line as a row of the table."""
    reward = reward_of(line["metrics"])
    staleness = [line["step"] - 1 - version for version in line["trajectory_versions"]]
    idle = line["boundary_idle_s"]
    return (
        f"{line['step']}", f"{reward:.3f}", "█" * round(BAR * reward), f"{line['loss']:+.4f}",
        f"{line['grad_norm']:.3f}", f"{max(staleness, default=0)}", "yes" if line["staged"] else "no",
        "-" if idle is None else f"{1e3 * idle:.1f} ms", f"{1e3 * line['step_s']:.0f} ms",
    )  # fmt: skip


def reward_of(metrics: Mapping[str, float]) -> float:
    """Mean reward of the completions that a step trained."""
    return metrics["reward"] / metrics["completions"]


def curve_of(metrics: Mapping[str, Sequence[float]]) -> list[float]:
    """The same per step, from the summary's columns."""
    return [total / count for total, count in zip(metrics["reward"], metrics["completions"], strict=True)]


def plot(out: Path, curve: Sequence[float], target: float) -> Path:
    """`OUT/reward.svg`: the curve, and its mean over five steps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    steps = range(1, len(curve) + 1)
    means = [sum(curve[max(0, k - 5) : k]) / min(k, 5) for k in steps]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, curve, color="0.7", label="mean reward of a step")
    axes.plot(steps, means, color="tab:blue", label="mean of five steps")
    axes.axhline(target, color="tab:red", linestyle="--", linewidth=1, label=f"target {target:g}")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="GRPO on sums of two terms")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path = out / "reward.svg"
    figure.savefig(path)
    pyplot.close(figure)
    return path

"""Progress is for people: whatever goes wrong with it, the run goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmstage.launch.progress import HEADER_AFTER_S, PatientConsole, StepProgress, describe_step, summary_table
from shmstage.launch.run_directory import completed
from shmstage.orchestrator.beginning import NAME as BEGUN
from shmstage.settings import Settings


def line(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "attempt": attempt, "loss": 0.5, "tokens": 7, "step_s": 0.1, "boundary_idle_s": None,
        "staged": False, **more,
    }  # fmt: skip


def following(
    tmp_path: Path, file: io.StringIO, clock: Callable[[], float] = lambda: 0.0, **settings: Any
) -> StepProgress:
    console = PatientConsole(file=file, width=200)
    return StepProgress(completed(Settings(out=tmp_path, **settings)), console, clock)


def append(tmp_path: Path, *lines: dict[str, Any]) -> None:
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)


def test_each_step_is_shown_once(tmp_path: Path) -> None:
    shown = io.StringIO()
    progress = following(tmp_path, shown)
    append(tmp_path, line(1))
    progress.poll()
    append(tmp_path, line(2))
    progress.poll()
    progress.poll()
    assert [text.split()[1] for text in shown.getvalue().splitlines() if text.startswith("step")] == ["1", "2"]


def test_after_a_resume_only_the_new_attempt_is_shown(tmp_path: Path) -> None:
    append(tmp_path, line(1), line(2), line(3))
    shown = io.StringIO()
    progress = following(tmp_path, shown, resume=True)
    partial = tmp_path / "steps.partial"
    partial.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2, attempt=2)) + "\n")
    partial.replace(tmp_path / "steps.jsonl")
    progress.poll()
    assert [text.split()[1] for text in shown.getvalue().splitlines() if text.startswith("step")] == ["2"]


@pytest.mark.parametrize("when", ["a step line", "begun", "it takes long"])
def test_the_run_is_named_once_it_is_one(when: str, tmp_path: Path) -> None:
    """Not before: what is refused leaves no OUT behind that could be looked at."""
    shown, now_s = io.StringIO(), [100.0]
    with following(tmp_path, shown, lambda: now_s[0], run="mine") as progress:
        progress.poll()
        now_s[0] += HEADER_AFTER_S - 1
        progress.poll()
        assert shown.getvalue() == ""
        if when == "a step line":
            append(tmp_path, line(1))
        elif when == "begun":
            (tmp_path / BEGUN).touch()
        else:
            now_s[0] += 1
        progress.poll()
        progress.poll()
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("run mine · serial") and lines[0].endswith(str(tmp_path))
    assert len(lines) == 1 + (when == "a step line")


SUMMARY: dict[str, Any] = {
    "run": "r", "steps": 1, "microbatches_per_step": 1, "mode": "serial", "staged_boundaries": 0,
    "boundary_idle_s": {"median": None, "max": None}, "step_s": {"median": None, "max": None}, "losses": [None],
    "trajectories": {"distinct": 1, "trained": 1, "min_times": 1, "max_times": 1}, "param_digest": "d",
    "leaked_pools": 0, "out": "o", "warnings": ["w"],
}  # fmt: skip


def table(step_cap: int | None = None, **more: Any) -> list[str]:
    shown = io.StringIO()
    PatientConsole(file=shown, width=100).print(summary_table({**SUMMARY, **more}, step_cap))
    return [" ".join(text.strip("│ ").replace("│", " ").split()) for text in shown.getvalue().splitlines()]


def test_a_step_without_a_loss_can_be_shown() -> None:
    assert "loss -" in describe_step(line(1, loss=None))
    assert summary_table(SUMMARY).row_count == 10
    assert summary_table({**SUMMARY, "restarts": {"trainer": 2, "orchestrator": 0}}).row_count == 11
    assert "look at [rows, tokens] differ" in table(warnings=["[rows, tokens] differ"])


def test_a_run_that_ended_early_says_so() -> None:
    early = table(4, steps=2, ended_by="hook at checkpoint 2")
    assert "steps 2 of 4, 1 micro-batches each" in early
    assert "ended by hook at checkpoint 2" in early
    for whole in (table(4, steps=4, ended_by=None), table(None, steps=4)):
        assert "steps 4, 1 micro-batches each" in whole
        assert not any(text.startswith("ended by") for text in whole)


@pytest.mark.parametrize(
    ("distinct", "trained", "times", "said"),
    [
        (384, 529, (1, 2), "529 trained: 384 distinct ones, each 1 to 2 times"),
        (80, 240, (3, 3), "240 trained: 80 distinct ones, each 3 times"),
        (80, 80, (1, 1), "80, each trained once"),
        (0, 0, (0, 0), "0"),
    ],
)
def test_how_often_the_input_was_trained_is_no_riddle(
    distinct: int, trained: int, times: tuple[int, int], said: str
) -> None:
    seen = {"distinct": distinct, "trained": trained, "min_times": times[0], "max_times": times[1]}
    assert f"trajectories {said}" in table(trajectories=seen)


def test_restarts_are_shown_between_the_steps(tmp_path: Path) -> None:
    shown = io.StringIO()
    progress = following(tmp_path, shown)
    append(tmp_path, line(1))
    progress.poll()
    progress.say("trainer (pid 7) was killed by signal 9; restarting, 1 of 3")
    append(tmp_path, line(2, attempt=2))
    progress.poll()
    kinds = [text.split()[0] for text in shown.getvalue().splitlines()]
    assert kinds[-3:] == ["step", "trainer", "step"]


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("bad", [line(1), {"step": 1}])
def test_nothing_that_goes_wrong_with_it_is_raised(bad: dict[str, Any], tmp_path: Path) -> None:
    """B1"""
    file = Closed() if "loss" in bad else io.StringIO()
    progress = following(tmp_path, file)
    append(tmp_path, {"attempt": 1, **bad})
    progress.poll()
    progress.poll()
    assert progress._quiet or progress._console.quiet

"""Progress is for people: whatever goes wrong with it, the run goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from shmstage.launch.progress import PatientConsole, StepProgress, describe_step, summary_table
from shmstage.launch.run_directory import completed
from shmstage.settings import Settings


def line(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "attempt": attempt, "loss": 0.5, "tokens": 7, "step_s": 0.1, "boundary_idle_s": None,
        "staged": False, **more,
    }  # fmt: skip


def following(tmp_path: Path, file: io.StringIO, **settings: Any) -> StepProgress:
    console = PatientConsole(file=file, width=200)
    return StepProgress(completed(Settings(out=tmp_path, **settings)), console)


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


def test_a_step_without_a_loss_can_be_shown() -> None:
    assert "loss -" in describe_step(line(1, loss=None))
    summary: dict[str, Any] = {
        "run": "r", "steps": 1, "microbatches_per_step": 1, "mode": "serial", "staged_boundaries": 0,
        "boundary_idle_s": {"median": None, "max": None}, "step_s": {"median": None, "max": None}, "losses": [None],
        "trajectories": {"distinct": 1, "trained": 1}, "param_digest": "d", "leaked_pools": 0,
        "out": "o", "warnings": ["w"],
    }  # fmt: skip
    assert summary_table(summary).row_count == 10
    assert summary_table({**summary, "restarts": {"trainer": 2, "orchestrator": 0}}).row_count == 11
    shown = io.StringIO()
    PatientConsole(file=shown, width=100).print(summary_table({**summary, "warnings": ["[rows, tokens] differ"]}))
    assert "[rows, tokens] differ" in shown.getvalue()


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

"""Step lines are given once, whoever writes, rolls back or replaces the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmstage.launch.step_follower import StepFollower


def write(path: Path, *numbers: tuple[int, int]) -> None:
    """In one piece, as a restart does."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps({"attempt": a, "step": s}) + "\n" for a, s in numbers))
    partial.replace(path)


def steps(follower: StepFollower) -> list[int]:
    return [line["step"] for line in follower.new()]


def test_lines_kept_by_a_restart_are_not_given_again_and_those_trained_again_are(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    follower = StepFollower(path)
    assert steps(follower) == []
    write(path, (1, 1), (1, 2), (1, 3))
    assert steps(follower) == [1, 2, 3]
    write(path, (1, 1), (1, 2))
    assert steps(follower) == []
    write(path, (1, 1), (1, 2), (2, 3), (2, 4))
    assert steps(follower) == [3, 4]


def test_a_new_file_that_has_outgrown_the_old_one_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    follower = StepFollower(path)
    write(path, (1, 1), (1, 2), (1, 3))
    assert steps(follower) == [1, 2, 3]
    write(path, (1, 1), (2, 2), (2, 3), (2, 4))
    assert steps(follower) == [2, 3, 4]


def test_a_line_written_just_before_a_restart_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    follower = StepFollower(path)
    write(path, (1, 1))
    assert steps(follower) == [1]
    write(path, (1, 1), (1, 2))
    assert steps(follower) == [2]


def test_a_line_is_given_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    follower = StepFollower(path)
    path.write_text('{"attempt": 1, "st')
    assert steps(follower) == []
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert steps(follower) == [1]


@pytest.mark.parametrize("text", ["{}\n", "[]\n", "{\n", '{"attempt": 1, "step": null}\n'])
def test_what_is_no_step_line_is_a_value_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(text)
    with pytest.raises(ValueError):
        StepFollower(tmp_path / "steps.jsonl").new()

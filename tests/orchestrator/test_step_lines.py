"""``steps.jsonl`` says what is done; what follows a restart is cut off, what is broken is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmstage.errors import SettingsError
from shmstage.orchestrator.beginning import Beginning, begin_attempt
from shmstage.orchestrator.step_lines import last_step, read_step_lines, roll_back


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def write(path: Path, *lines: tuple[int, int], torn: str = "") -> None:
    path.write_text("".join(json.dumps({"step": s, "attempt": a}) + "\n" for s, a in lines) + torn)


def test_the_last_step_is_the_one_whose_line_is_whole(path: Path) -> None:
    assert last_step(path) is None  # nobody can tell: the newest checkpoint is taken
    write(path)
    assert last_step(path) == 0
    write(path, (1, 1), (2, 1), torn='{"step": 3, "att')
    assert last_step(path) == 2


def test_rolling_back_keeps_what_is_covered_and_knows_the_highest_attempt(path: Path) -> None:
    assert roll_back(path, to_step=5) == 0
    assert not path.exists()
    write(path, (1, 1), (2, 2), (3, 3), torn="{")
    assert roll_back(path, to_step=1) == 3
    assert read_step_lines(path) == [{"step": 1, "attempt": 1}]
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step": 1, "attempt": 1}\nnonsense\n{"step": 2, "attempt": 1}\n', "line 2 is no JSON record: b'nonsense"),
        ("[]\n", "line 1 is no JSON record"),
        ('{"step": 1}\n', "line 1 is no step line"),
        ('{"step": "1", "attempt": 1}\n', "line 1 is no step line"),
        ("\xff\n", "line 1 is no JSON record"),
    ],
)
def test_a_broken_file_is_bad_input_that_names_the_line(text: str, said: str, path: Path) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError, match=said):
        read_step_lines(path)


def test_a_directory_in_its_place_is_bad_input(path: Path) -> None:
    path.mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        read_step_lines(path)


def digest() -> str:
    return "initial"


def never() -> str:
    raise AssertionError("these parameters were trained already")


def test_the_first_attempt_says_what_the_run_began_with_and_the_others_are_counted(tmp_path: Path) -> None:
    assert begin_attempt(tmp_path, seen=0, first_step=1, param_digest=digest) == Beginning(1, 1, "initial")
    assert begin_attempt(tmp_path, seen=0, first_step=4, param_digest=never) == Beginning(2, 1, "initial")
    # lines of attempts that were rolled back count, and so do attempts that wrote none
    assert begin_attempt(tmp_path, seen=7, first_step=4, param_digest=never) == Beginning(8, 1, "initial")


def test_a_resumed_run_counts_on_from_the_attempts_before(tmp_path: Path) -> None:
    assert begin_attempt(tmp_path, seen=3, first_step=9, param_digest=digest) == Beginning(4, 9, "initial")

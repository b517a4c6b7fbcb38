"""Records on disk: whole lines, whole files, never the end of a step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shmstage.errors import BudgetError, SettingsError
from shmstage.records import JsonLines, failure_path, read_failure, read_json_lines, write_failure, write_json


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path)
    lines.write({"a": 1})
    lines.close()
    with path.open("a") as file:
        file.write('{"a": 2, "b"')
    assert read_json_lines(path) == [{"a": 1}]
    assert read_json_lines(tmp_path / "none") == []


@pytest.mark.parametrize("torn", ["{", '{"a": 2, "b"', "x" * 200_000, ""])
@pytest.mark.parametrize("before", ["", '{"a": 1}\n', '{"a": 1}\n{"a": 2}\n'])
def test_a_torn_line_is_cut_off_before_anything_is_added(before: str, torn: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(before + torn)
    lines = JsonLines(path)
    lines.write({"a": 3})
    lines.close()
    assert path.read_text() == before + '{"a": 3}\n'


def test_a_line_that_is_no_record_is_bad_input_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2{"a": 3}\n')
    with pytest.raises(SettingsError, match="x.jsonl line 2 is no JSON record"):
        read_json_lines(path)


def test_a_record_that_cannot_be_written_is_said_once_and_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B1"""
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"a": object()})
    lines.close()
    lines.write({"a": 1})
    assert lines.failures == 2
    assert capsys.readouterr().err.count("record lost") == 1


def test_a_json_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    write_json(tmp_path / "s.json", {"a": 1}, mode=0o600)
    assert (tmp_path / "s.json").stat().st_mode & 0o777 == 0o600
    write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["s.json"]


def test_a_failure_keeps_its_class_text_and_exit_code(tmp_path: Path) -> None:
    assert write_failure(tmp_path, "trainer", BudgetError("too much")) == 2
    record = json.loads(failure_path(tmp_path, "trainer").read_text())
    assert (record["kind"], record["text"], record["known"]) == ("BudgetError", "too much", True)
    assert write_failure(tmp_path, "trainer", ValueError("odd")) == 5


def test_what_another_process_left_says_nothing_of_this_child(tmp_path: Path) -> None:
    write_failure(tmp_path, "trainer", BudgetError("too much"))
    assert isinstance(read_failure(tmp_path, "trainer", os.getpid()), BudgetError)
    assert read_failure(tmp_path, "trainer", os.getpid() + 1) is None


def test_a_failure_that_cannot_be_written_still_gives_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_failure(tmp_path / "gone", "trainer", BudgetError("too much")) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written_leaves_no_part_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "run.json", {})
    assert list(tmp_path.iterdir()) == []


def test_lines_say_whether_they_are_written(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "a.jsonl")
    assert lines.write({"a": 1})
    assert lines.sync()
    assert not lines.write({"a": object()})
    lines.close()
    assert not lines.write({"a": 2})
    assert not lines.sync()

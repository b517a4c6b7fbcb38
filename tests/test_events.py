"""Records on disk: whole lines, whole files, never the end of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shmstage.errors import BudgetError
from shmstage.events import JsonLines, failure_path, read_json_lines, write_failure, write_json


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path)
    lines.write({"a": 1})
    lines.close()
    with path.open("a") as file:
        file.write('{"a": 2, "b"')
    assert read_json_lines(path) == [{"a": 1}]
    assert read_json_lines(tmp_path / "none") == []


def test_a_record_that_cannot_be_written_is_said_once_and_raises_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.write({"a": object()})
    lines.close()
    lines.write({"a": 1})
    assert lines.failures == 2
    assert capsys.readouterr().err.count("record lost") == 1


def test_a_json_file_is_replaced_in_one_piece(tmp_path: Path) -> None:
    write_json(tmp_path / "s.json", {"a": 1})
    write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["s.json"]


def test_a_failure_keeps_its_class_text_and_exit_code(tmp_path: Path) -> None:
    assert write_failure(tmp_path, "trainer", BudgetError("too much")) == 2
    record = json.loads(failure_path(tmp_path, "trainer").read_text())
    assert (record["kind"], record["text"], record["known"]) == ("BudgetError", "too much", True)
    assert write_failure(tmp_path, "trainer", ValueError("odd")) == 5

"""``shmstage report``: which runs it takes, what it writes and prints, what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "timeline"))
from made_runs import Made, Plan, made, write_run

from shmstage.cli import main
from shmstage.errors import SettingsError
from shmstage.operate.report_command import main as report


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """OUT of a run called alpha1, in the place where ids are looked for."""
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs" / "alpha1", made(Plan(steps=4)), run="alpha1")


@pytest.mark.parametrize("name", ["alpha1", "alp", "runs/alpha1"])
def test_a_run_is_named_as_for_status(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"out", "runs", "warnings"} and told["out"] == "report.html" and told["warnings"] == []
    (one,) = told["runs"]
    summary = json.loads((run / "summary.json").read_text())
    assert (one["run"], one["mode"], one["steps"]) == ("alpha1", "serial", 4)
    assert one["boundary_idle_s"] == summary["boundary_idle_s"] and one["step_s"] == summary["step_s"]
    assert one["boundaries"] == one["with_events"] == one["drawn"] == 3
    assert Path("report.html").read_text().startswith("<!doctype html>")


def test_in_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text(json.dumps({"steps": 9}))
    assert report(["alpha1"]) == 0
    printed = capsys.readouterr().out
    assert "warning: steps: summary.json says 9, the step lines give 4" in printed
    assert "report.html: alpha1 (9 steps, no boundary measured)" in printed


def refused(*arguments: str) -> str:
    with pytest.raises(SettingsError) as error:
        report(list(arguments))
    assert error.value.exit_code == 2
    return str(error.value)


def test_bad_input_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "alpha2", made(Plan(steps=2)), run="alpha2")
    before = (run / "steps.jsonl").read_bytes()
    assert "alpha1, alpha2" in refused("alpha")
    assert "no run" in refused("beta")
    assert "are one run" in refused("alpha1", "runs/alpha1")
    assert "--trace is of one run" in refused("alpha1", "alpha2", "--trace", "t.json")
    assert "9 runs; a page shows 8" in refused(*(["alpha1"] * 9))
    assert "is a directory" in refused("alpha1", "--out", str(tmp_path))
    assert "is not there" in refused("alpha1", "--out", "none/report.html")
    assert "is no report" in refused("alpha1", "--out", str(run / "steps.jsonl"))
    assert "give two files" in refused("alpha1", "--out", "a", "--trace", "a")
    assert (run / "steps.jsonl").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["runs"]


def test_bad_input_is_one_object_for_who_asked_for_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "beta", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


def test_a_report_is_replaced_in_one_piece(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert report(["alpha1", "--out", "page.html"]) == 0
    assert sorted(os.listdir(tmp_path)) == ["page.html", "runs"]
    assert (tmp_path / "page.html").stat().st_mode & 0o044 == 0o044 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_damaged_files_are_said_and_do_not_end_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "steps.jsonl").open("a") as file:
        file.write('{"step": "x"}\nno json\n{"torn')
    (run / "summary.json").write_text("{")
    (run / "events" / "trainer.jsonl").write_text('{"schema": 99}\n')
    assert report(["alpha1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    text = "\n".join(told["warnings"])
    assert "2 lines of steps.jsonl are no step lines" in text
    assert "summary.json" in text and "schema 99" in text
    assert told["runs"][0]["source"] == "steps.jsonl" and told["runs"][0]["boundaries"] == 3


def test_a_run_that_failed_says_why(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    (run / "trainer.failure.json").write_text(json.dumps({"kind": "EngineError", "text": "out of memory"}))
    assert report(["alpha1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["runs"][0]["state"] == "failed"
    assert any("the trainer failed: EngineError: out of memory" in text for text in told["warnings"])
    assert "the trainer failed: EngineError: out of memory" in Path("report.html").read_text()


def test_a_run_that_did_nothing_yet_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = write_run(tmp_path / "new", Made(Plan()), events=False, finished=False)
    (out / "steps.jsonl").unlink()
    assert report([str(out), "--json"]) == 0
    assert "No boundary of which every instant is known" in Path("report.html").read_text()

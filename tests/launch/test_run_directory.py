"""OUT belongs to one living run at a time and its checkpoints are never trained over."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from shmstage.errors import BudgetError, EngineError, SettingsError
from shmstage.launch.run_command import add_settings, resolve_args
from shmstage.launch.run_directory import claimed, completed
from shmstage.settings import Settings


def settings(out: Path, **more: object) -> Settings:
    return completed(Settings(out=out, **more))  # type: ignore[arg-type]


def test_without_input_the_demo_is_named_and_a_run_id_is_made(tmp_path: Path) -> None:
    done = settings(tmp_path / "o")
    assert done.run
    assert done.source == "shmstage.demo.source:make_source"
    assert done.engine == "shmstage.demo.engine:make_engine"
    assert completed(Settings(run="mine")).out_dir == Path("runs/mine").absolute()


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        claimed(settings(tmp_path)),
        pytest.raises(SettingsError, match="in use by a living run"),
        claimed(settings(tmp_path)),
    ):
        pass
    with claimed(settings(tmp_path)):
        pass


def test_checkpoints_need_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".partial-5").mkdir()
    (tmp_path / "run.json").write_text('{"settings": {"run": "before"}}')
    with pytest.raises(SettingsError, match="holds 1 checkpoint .* add --resume"), claimed(settings(tmp_path)):
        pass
    with claimed(settings(tmp_path, resume=True)):
        pass


def test_resume_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="holds no checkpoint"), claimed(settings(tmp_path, resume=True)):
        pass


def test_a_fresh_start_removes_what_an_earlier_run_without_checkpoints_left(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {}}')
    (tmp_path / "steps.jsonl").write_text("{}\n")
    (tmp_path / "trainer.failure.json").write_text("{}")
    with claimed(settings(tmp_path)) as out:
        assert not (out / "steps.jsonl").exists()
        assert not (out / "trainer.failure.json").exists()


def test_a_directory_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="choose a directory"), claimed(settings(tmp_path / "file" / "out")):
        pass


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("mine")
    with pytest.raises(SettingsError, match="is not empty and holds no run"), claimed(settings(tmp_path)):
        pass
    assert (tmp_path / "trainer.log").read_text() == "mine"


def test_bad_input_leaves_no_directory_where_there_was_none(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "x"
    with pytest.raises(BudgetError), claimed(settings(out)):
        raise BudgetError("too much")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(EngineError), claimed(settings(out)):
        raise EngineError("a failed run keeps its logs")
    assert out.exists()


def test_a_resumed_run_keeps_the_settings_of_its_first_start(tmp_path: Path) -> None:
    first = {"rows": 7, "run": "first", "tokens": 99, "steps": None}
    (tmp_path / "run.json").write_text(json.dumps({"settings": first}))
    parser = argparse.ArgumentParser()
    add_settings(parser)
    args = parser.parse_args(["--resume", "--out", str(tmp_path), "--tokens", "11"])
    resolved = resolve_args(args)
    assert (resolved.settings.rows, resolved.settings.tokens, resolved.settings.run) == (7, 11, "first")
    assert resolved.origins["rows"] == f"{tmp_path}/run.json"
    assert resolved.settings.resume
    fresh = resolve_args(parser.parse_args(["--out", str(tmp_path)]))
    assert fresh.settings.rows == 4

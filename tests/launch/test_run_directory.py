"""OUT belongs to one living run at a time and its checkpoints are never trained over."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shmstage.errors import BudgetError, EngineError, SettingsError
from shmstage.launch import run_directory
from shmstage.launch.run_command import add_settings, resolve_args
from shmstage.launch.run_directory import claimed, completed, find_run, newest_checkpoint, what_is_saved
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, list_objects, new_name, owned_objects
from shmstage.settings import Settings


def settings(out: Path, **more: object) -> Settings:
    return completed(Settings(out=out, **more))  # type: ignore[arg-type]


def foreign_file(path: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a file of another user")
    Path(path).touch()
    os.chown(path, 65534, 65534)


def test_without_input_the_demo_is_named_and_a_run_id_is_made(tmp_path: Path) -> None:
    done = settings(tmp_path / "o")
    assert done.run
    assert done.source == "shmstage.demo.source:make_source"
    assert done.engine == "shmstage.demo.engine:make_engine"
    assert completed(Settings(run="mine")).out_dir == Path("runs/mine").absolute()


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """S54"""
    with (
        claimed(settings(tmp_path)),
        pytest.raises(SettingsError, match="in use by a living run"),
        claimed(settings(tmp_path)),
    ):
        pass
    with claimed(settings(tmp_path)):
        pass


@pytest.mark.parametrize("name", ["4", "4.npz", "step-4"])
def test_checkpoints_need_resume(name: str, tmp_path: Path) -> None:
    """However an engine of one's own names them."""
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".partial-5").mkdir()
    (tmp_path / "run.json").write_text('{"settings": {"run": "before"}}')
    with pytest.raises(SettingsError, match="holds 1 checkpoint .* add --resume"), claimed(settings(tmp_path)):
        pass
    with claimed(settings(tmp_path, resume=True)):
        pass


def earlier_run(out: Path, *checkpoints: str, lines: int = 0) -> Path:
    """What a run leaves that was stopped, or met bad input: ``lines`` steps in its record."""
    for name in checkpoints:
        (out / "checkpoints" / name).mkdir(parents=True)
    (out / "run.json").write_text('{"settings": {"run": "before"}}')
    text = "".join(json.dumps({"step": step, "attempt": 1}) + "\n" for step in range(1, lines + 1))
    (out / "steps.jsonl").write_text(text)
    return out


def test_after_a_run_that_trained_nothing_both_ways_on_are_named(tmp_path: Path) -> None:
    """Bad input is met after checkpoint 0: the corrected command is told what to do, and nothing is removed."""
    earlier_run(tmp_path, "0.npz")
    with pytest.raises(SettingsError) as refused, claimed(settings(tmp_path)):
        pass
    said = f"an earlier run that trained no step: remove {tmp_path} to start anew, or add --resume to the corrected"
    assert said in str(refused.value)
    assert newest_checkpoint(tmp_path) == 0
    with claimed(settings(tmp_path, resume=True)):
        pass


@pytest.mark.parametrize(("checkpoints", "lines", "journal"), [(("0", "2"), 0, 0), (("0",), 3, 0), (("0",), 0, 1)])
def test_what_may_have_been_trained_is_not_said_to_be_removable(
    checkpoints: tuple[str, ...], lines: int, journal: int, tmp_path: Path
) -> None:
    earlier_run(tmp_path, *checkpoints, lines=lines)
    for number in range(journal):
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal" / str(number)).write_text("what a live source gave")
    with pytest.raises(SettingsError, match="of an earlier run; add --resume to continue"), claimed(settings(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("checkpoints", "lines", "said"),
    [
        (("0", "20", "29.npz"), 29, "saved up to step 29; `GO --resume OUT` goes on"),
        (("0", "20", "30"), 29, "saved up to step 20; `GO --resume OUT` goes on"),  # a checkpoint without its line
        (("0",), 0, "nothing was trained; `GO --resume OUT` begins with step 1"),
        (("0",), 3, "no step is saved; `GO --resume OUT` begins with step 1"),
        ((), 0, "nothing was trained; the same command starts it again"),
        (("step-4",), 4, "`GO --resume OUT` goes on from its newest checkpoint"),
    ],
)
def test_what_a_stopped_run_has_saved_is_said(
    checkpoints: tuple[str, ...], lines: int, said: str, tmp_path: Path
) -> None:
    out = tmp_path / "my runs"
    out.mkdir()
    assert what_is_saved(earlier_run(out, *checkpoints, lines=lines), "GO") == said.replace("OUT", f"'{out}'")


def test_the_newest_checkpoint_is_told_by_the_step_in_its_name(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("2", "12.npz", "3.npz", ".partial-40", "41.orbax-checkpoint-tmp", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12


def test_resume_with_nothing_but_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".partial-0").mkdir(parents=True)
    (tmp_path / "run.json").write_text('{"settings": {"run": "before"}}')
    with pytest.raises(SettingsError, match="holds no checkpoint"), claimed(settings(tmp_path, resume=True)):
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


def test_a_directory_that_was_there_is_not_removed_for_bad_input(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(BudgetError), claimed(settings(tmp_path / "mine" / "out")):
        raise BudgetError("too much")
    assert (tmp_path / "mine").exists()


def test_what_was_trained_is_kept_when_a_restart_meets_bad_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(BudgetError), claimed(settings(out)):
        (out / "checkpoints" / "7").mkdir(parents=True)
        raise BudgetError("somebody else filled the memory meanwhile")
    assert (out / "checkpoints" / "7").exists()


@pytest.mark.parametrize("name", ["steps.jsonl", "summary.json", "trainer.failure.json", "weights.json"])
def test_a_directory_where_a_file_belongs_is_bad_input(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {}}')
    (tmp_path / name).mkdir()
    with pytest.raises(SettingsError, match=f"{name} is a directory .* choose another"), claimed(settings(tmp_path)):
        pass
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["checkpoints", "journal"])
def test_a_file_where_a_directory_belongs_is_bad_input(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {}}')
    (tmp_path / name).write_text("")
    with pytest.raises(SettingsError, match=f"{name} is a file where a directory"), claimed(settings(tmp_path)):
        pass


def test_broken_step_lines_are_said_before_a_resume_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (tmp_path / "run.json").write_text('{"settings": {}}')
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "attempt": 1}\nbroken\n{"step": 3, "attempt": 1}\n')
    with pytest.raises(SettingsError, match="line 2 is no JSON record"), claimed(settings(tmp_path, resume=True)):
        pass


def test_a_resume_waits_until_the_processes_of_a_killed_launcher_are_gone(tmp_path: Path) -> None:
    with contextlib.closing(ProcessIdentity.create("orphaned", "trainer")) as orphan:
        begun = time.monotonic()
        with (
            pytest.raises(SettingsError, match=f"run orphaned: trainer {orphan.pid} .* still runs"),
            claimed(settings(tmp_path, run="orphaned", stop_grace_s=0.01)),
        ):
            pass
        assert time.monotonic() - begun >= 0.02
    with claimed(settings(tmp_path, run="orphaned", stop_grace_s=0.01)):
        pass


@pytest.mark.parametrize("make", [foreign_file, os.mkfifo, os.mkdir], ids=["of another user", "pipe", "directory"])
def test_what_others_put_under_the_names_of_a_run_holds_nobody_up(
    make: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S39"""
    run = settings(tmp_path / "out")
    name = new_name(run.run) + LOCK_SUFFIX
    make(SHM_DIR + "/" + name)
    try:
        monkeypatch.setattr(run_directory.threading, "Event", lambda: pytest.fail("it waits for somebody"))
        with claimed(run):
            assert name in list_objects(run.run)
            assert owned_objects(run.run) == []
    finally:
        remove = os.rmdir if make is os.mkdir else os.unlink
        remove(SHM_DIR + "/" + name)


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


def make_run(out: Path, run: str) -> Path:
    out.mkdir(parents=True)
    (out / "run.json").write_text(json.dumps({"settings": {"run": run, "rows": 9}}))
    return out


def test_a_run_is_found_by_its_directory_its_id_or_the_beginning_of_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    one, two = make_run(runs / "a", "20260101-one"), make_run(runs / "b", "20260101-one-more")
    other = make_run(tmp_path / "elsewhere", "x")
    (runs / "no-run").mkdir()
    assert find_run(str(other), runs) == other
    assert find_run("20260101-one", runs) == one  # the whole id of one, though the beginning of another's
    assert find_run("20260101-one-", runs) == two
    with pytest.raises(SettingsError, match="could be 20260101-one, 20260101-one-more; give more"):
        find_run("2026", runs)
    for name, why in (("nobody", "there is no such directory"), (str(runs / "no-run"), "that directory holds no run")):
        with pytest.raises(SettingsError, match=f"no run '.*: {why}.*, and no run in .* has an id that begins so"):
            find_run(name, runs)
    for name in ("x", str(runs / "no-run"), ""):
        with pytest.raises(SettingsError, match=r"no run .*|could be"):
            find_run(name, runs)


def test_resume_takes_the_directory_with_it(tmp_path: Path) -> None:
    out = make_run(tmp_path / "out", "before")
    parser = argparse.ArgumentParser()
    add_settings(parser)
    resolved = resolve_args(parser.parse_args(["--resume", str(out)]))
    assert (resolved.settings.out, resolved.settings.resume, resolved.settings.rows) == (out, True, 9)
    assert resolve_args(parser.parse_args(["--resume", str(out), "--out", str(out)])).settings.out == out
    with pytest.raises(SettingsError, match="give one"):
        resolve_args(parser.parse_args(["--resume", str(out), "--out", str(tmp_path / "other")]))
    assert not resolve_args(parser.parse_args(["--no-resume"])).settings.resume


def test_a_journal_without_a_checkpoint_is_not_thrown_away_and_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"settings": {}}')
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0").write_text("what a live source gave")
    with pytest.raises(SettingsError, match="holds a journal .* add --resume"), claimed(settings(tmp_path)):
        pass
    with claimed(settings(tmp_path, resume=True)):
        pass
    assert (tmp_path / "journal" / "0").exists()


def test_paths_of_both_bundles_are_kept_absolute() -> None:
    done = completed(Settings(bundle=Path("a"), eval_bundle=Path("b")))
    assert done.bundle == Path("a").absolute()
    assert done.eval_bundle == Path("b").absolute()

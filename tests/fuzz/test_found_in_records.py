"""What fuzzing found in settings and in the records of a run, each once and by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import survives

from shmstage import cli
from shmstage.errors import (
    BudgetError,
    CheckpointError,
    RunFailedError,
    SettingsError,
)
from shmstage.launch.run_directory import find_run, run_file
from shmstage.launch.step_follower import StepFollower
from shmstage.orchestrator.beginning import begin_attempt
from shmstage.orchestrator.resume import state_from_metadata
from shmstage.orchestrator.saving import last_published
from shmstage.orchestrator.step_lines import read_step_lines
from shmstage.records import failure_path, read_failure, read_json, read_json_lines
from shmstage.settings import Settings, resolve

CAP_NBYTES = 8_000_000


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ("rows = 0x" + "f" * 9000, "rows = <integer of 36000 bits>"),
        ("latch = 0x" + "f" * 9000, "latch = <integer of"),
        ("stage_before_update = 0x" + "f" * 9000, "is no switch"),
        ("unheard_of = 0x" + "f" * 9000, "unknown setting"),
        ("rows" + ".a" * 30_000 + " = 1", "more than 32 parts"),
        ("engine" + ' . "a"' * 30_000 + " = 1", "more than 32 parts"),
        ("[engine]\na = " + "[" * 33 + "]" * 33, "nest deeper than 32"),
        ("[engine]\na = {" + "a = {" * 40 + "}" * 41, "nest deeper than 32"),
        ("[engine]\na = inf", "engine.a. = inf"),
        ("[source]\na = [1, nan]", "source.a.1. = nan"),
        ("[hooks]\na = 1979-05-27", "write it as a string"),
        ("[engine]\na = 9223372036854775808", "integers have 64 bits"),
        ('[engine]\na = "x\\u0000"', "cannot be handed on"),
        ('out = "a\\u0000b"', "without control characters"),
        ('source = "m\\u001b[2J:f"', "without control characters"),
        ('engine = "m:' + "x" * 5000 + '"', "at most 4096 characters"),
        ('run = ".."', "names a directory that is there"),
        ('run = "' + "字" * 64 + '"', "192 bytes as UTF-8; the limit is 127"),
        ("steps = 99999999999999999999999", "less than or equal to"),
        ("# " + "x" * (1 << 20), "longer than"),
        ('boundary = ["serial"]\nstage_before_update = true', "boundary"),
    ],
    ids=map(str, range(21)),
)  # fmt: skip
def test_a_setting_that_could_not_be_used_or_handed_on_is_bad_input(tmp_path: Path, toml: str, reason: str) -> None:
    """S78: in time, and in one line."""
    file = tmp_path / "x.toml"
    file.write_text(toml)
    outcome = survives(lambda: resolve({}, {}, file), SettingsError, cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, SettingsError)
    assert re.search(reason, str(outcome))


def test_bytes_that_are_no_text_are_bad_input() -> None:
    with pytest.raises(SettingsError, match="out = .* cannot be used"):
        resolve({"out": "/tmp/\udcff"}, {})


def test_the_settings_of_a_plug_in_arrive_as_they_were_given(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[engine]\nfactory = "m:f"\na = [1, 2.5, "x", true, {b = []}]\nc = -9223372036854775808')
    settings = resolve({}, {}, file).settings
    assert Settings.model_validate(json.loads(settings.model_dump_json())) == settings


def test_a_settings_file_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("rows = 7",))
    writer.start()
    assert resolve({}, {}, tmp_path / "pipe").settings.rows == 7
    writer.join()


def test_arguments_nobody_knows_are_named_in_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--print-config", "x" * 100_000 + "\x1b[2J"]) == 2
    said = capsys.readouterr().err
    assert len(said) < 1200 and said.strip().isprintable()


def test_a_run_name_longer_than_any_file_name_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no run"):
        find_run("x" * 5000, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"settings": {"rows": "x"}}'], ids=list("abc")
)
def test_a_child_with_settings_of_no_use_says_so_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    code = "import sys\nfrom shmstage.child import run_child\nsys.exit(run_child('x', lambda *_: None))"
    for arguments in (["--settings", text], ["--settings-file", str(tmp_path / "run.json")]):
        if len(text) > 99_000 and arguments[0] == "--settings":
            continue
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


# --- records of OUT -----------------------------------------------------------------------------------------


def test_a_count_that_cannot_be_counted_up_is_bad_input(tmp_path: Path) -> None:
    """4300 digits can be read, one more cannot be written."""
    number = "9" * 4300
    (tmp_path / "begun.json").write_text(f'{{"attempt": {number}, "first_step": 1, "initial_param_digest": "x"}}')
    with pytest.raises(SettingsError, match="does not say how the run began"):
        begin_attempt(tmp_path, seen=0, first_step=1, param_digest=lambda: "")
    (tmp_path / "steps.jsonl").write_text(f'{{"step": {number}, "attempt": 1}}\n')
    with pytest.raises(SettingsError, match="no count"):
        read_step_lines(tmp_path / "steps.jsonl")


def test_a_checkpoint_without_a_state_names_its_step_in_one_line(tmp_path: Path) -> None:
    metadata = {"step": "x" * 9999}
    error = survives(lambda: state_from_metadata(metadata, tmp_path), CheckpointError, cap_nbytes=CAP_NBYTES)
    assert isinstance(error, CheckpointError)


def test_a_carriage_return_inside_a_line_hides_nothing(tmp_path: Path) -> None:
    """What came after it was taken for a torn end, and dropped."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b":\r2}\r\n{"c": 3}\n')
    assert read_json_lines(path) == [{"a": 1}, {"b": 2}, {"c": 3}]
    path.write_bytes(b'{"step":\r1, "attempt": 1}\r\n')
    assert [line["step"] for line in StepFollower(path).new()] == [1]


@pytest.mark.parametrize("line", ["[" * 100_000, "9" * 5000, "\udcff", "null"], ids=list("abcd"))
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(SettingsError, match="line 1 is no JSON record"):
        read_json_lines(path)
    with pytest.raises(ValueError, match=r"."):
        StepFollower(path).new()


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    outcome = survives(lambda: read_json_lines(path), SettingsError, cap_nbytes=80_000_000)
    assert isinstance(outcome, SettingsError)


READERS: dict[str, Callable[[Path], object]] = {
    "run.json": run_file,
    "weights.json": last_published,
    "begun.json": lambda out: begin_attempt(out, seen=0, first_step=1, param_digest=lambda: ""),
    "summary.json": lambda out: read_json(out / "summary.json"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "directory", "endless", "nested", "empty"])
def test_what_is_no_record_is_bad_input(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(1 << 36)
    else:
        path.write_text("[" * 100_000 if kind == "nested" else "")
    outcome = survives(lambda: READERS[name](tmp_path), SettingsError, cap_nbytes=40_000_000)
    assert isinstance(outcome, SettingsError)


@pytest.mark.parametrize("version", ["1e400", '"12"', "-5", "1.5", "true", "18446744073709551616", "[]"])
def test_a_version_of_the_weights_that_is_none_is_bad_input(tmp_path: Path, version: str) -> None:
    """Text and fractions were taken for numbers, and infinity ended the process."""
    (tmp_path / "weights.json").write_text(f'{{"version": {version}}}')
    with pytest.raises(SettingsError, match="version is"):
        last_published(tmp_path)


@pytest.mark.parametrize("settings", ['[["rows", 1]]', '["ab"]', "null", "3"])
def test_settings_of_an_earlier_start_are_an_object(tmp_path: Path, settings: str) -> None:
    """A list of pairs was taken for one."""
    (tmp_path / "run.json").write_text(f'{{"settings": {settings}}}')
    with pytest.raises(SettingsError, match="want an object"):
        run_file(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"kind": []}', '{"kind": "BudgetError", "text": [1]}', "[" * 9999, '{"kind": "No", "text": ""}'],
    ids=list("abcdefg"),
)
def test_a_failure_record_of_no_use_is_a_failed_run(tmp_path: Path, text: str) -> None:
    failure_path(tmp_path, "trainer").write_text(text)
    outcome = survives(lambda: read_failure(tmp_path, "trainer"), cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, RunFailedError) and "trainer" in str(outcome)


def test_the_reason_in_a_failure_record_cannot_garble_a_terminal(tmp_path: Path) -> None:
    record = {"kind": "BudgetError", "text": "no\x1b[2J\n" * 5000}
    failure_path(tmp_path, "trainer").write_text(json.dumps(record))
    outcome = read_failure(tmp_path, "trainer")
    assert isinstance(outcome, BudgetError) and str(outcome).isprintable() and len(str(outcome)) <= 2000


def test_a_state_beside_a_checkpoint_takes_as_much_memory_as_it_is_long(tmp_path: Path) -> None:
    """256 MiB were set aside for a file of a few bytes."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "3.json").write_text("{}")
    metadata = {"state": {"file": "state/3.json", "sha256": hashlib.sha256(b"{}").hexdigest()}}
    outcome = survives(lambda: state_from_metadata(metadata, tmp_path), CheckpointError, cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, CheckpointError)

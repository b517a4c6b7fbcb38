"""Files of OUT, settings files, environment and flags: written by hand, by another release, or by a failing disk."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import check_text, fuzz, survives
from hypothesis import given
from hypothesis import strategies as st
from mutations import JSON_TEXTS, Rng, hostile_json, mutated

from shmstage.errors import CheckpointError, SettingsError, ShmstageError
from shmstage.launch import run_command
from shmstage.launch.run_directory import completed, find_run, run_file
from shmstage.launch.step_follower import StepFollower
from shmstage.orchestrator.beginning import begin_attempt
from shmstage.orchestrator.hooks import _recorded
from shmstage.orchestrator.resume import ResumeState, state_from_metadata, state_to_metadata
from shmstage.orchestrator.saving import last_published
from shmstage.orchestrator.step_lines import last_step, read_step_lines, roll_back
from shmstage.records import JsonLines, failure_path, read_failure, read_json, read_json_lines
from shmstage.settings import SWITCHES, Settings, resolve

pytestmark = pytest.mark.slow

CAP_NBYTES = 4_000_000
STEP_LINE = {"step": 3, "attempt": 1, "loss": 0.5, "metrics": {"a": [1, 2]}, "staged": True}
STATE = ResumeState(done=((1, 3), (5, 6)), planned_through=9).to_wire()

rngs = st.integers(0, 1 << 32).map(Rng)


def begin(out: Path) -> object:
    return begin_attempt(out, seen=1, first_step=1, param_digest=lambda: "d")


#: file → (what is in it, who reads it)
RECORDS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "run.json": ({"run": "r", "epoch": 1, "settings": {"run": "r", "rows": 4, "engine_settings": {"a": 1}}}, run_file),
    "weights.json": ({"version": 3}, last_published),
    "begun.json": ({"attempt": 1, "first_step": 1, "initial_param_digest": "x"}, begin),
    "trainer.failure.json": (
        {"role": "trainer", "pid": 1, "kind": "BudgetError", "text": "no", "exit_code": 2, "wall_s": 1.0},
        lambda out: read_failure(out, "trainer"),
    ),
    "summary.json": ({"run": "r", "steps": 3}, lambda out: read_json(out / "summary.json")),
}


@pytest.mark.parametrize("name", RECORDS)
@fuzz
@given(rngs)
def test_a_damaged_record_is_read_or_bad_input(tmp_path_factory: Any, name: str, rng: random.Random) -> None:
    out = shared(tmp_path_factory)
    value, read = RECORDS[name]
    (out / name).write_bytes(hostile_json(value, rng))
    outcome = survives(lambda: read(out), SettingsError, cap_nbytes=CAP_NBYTES)
    if name == "run.json" and not isinstance(outcome, ShmstageError):
        assert isinstance(outcome, dict)
        survives(lambda: resolve({}, {}, before=outcome), SettingsError, cap_nbytes=CAP_NBYTES)
        survives(lambda: find_run("r", out.parent), SettingsError, cap_nbytes=CAP_NBYTES)
    if name == "trainer.failure.json" and isinstance(outcome, ShmstageError):
        check_text(str(outcome) or "-")


LINE_READERS: list[Callable[[Path], object]] = [
    read_json_lines,
    read_step_lines,
    last_step,
    lambda path: roll_back(path, to_step=2),
    _recorded,
]


@pytest.mark.parametrize("reader", range(len(LINE_READERS)))
@fuzz
@given(st.lists(st.none() | rngs, min_size=1, max_size=4), rngs)
def test_damaged_lines_are_read_or_bad_input(
    tmp_path_factory: Any, reader: int, damage: list[random.Random | None], rng: random.Random
) -> None:
    """A whole line is never passed over."""
    path = shared(tmp_path_factory) / "steps.jsonl"
    good = json.dumps(STEP_LINE | {"go_on": True}).encode()
    lines = [good if each is None else hostile_json(STEP_LINE | {"go_on": True}, each) for each in damage]
    data = b"\n".join(lines) + b"\n"
    path.write_bytes(mutated(data, rng, 1) if rng.random() < 0.2 else data)
    data = path.read_bytes()
    outcome = survives(lambda: LINE_READERS[reader](path), SettingsError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, list):
        assert len(outcome) == data.count(b"\n")
    with contextlib.suppress(ValueError):
        StepFollower(path).new()
    lines_of = JsonLines(path)  # cuts a torn end
    lines_of.close()
    assert path.read_bytes() in (b"", *(data[: n + 1] for n, byte in enumerate(data) if byte == 10)) or reader == 3


@fuzz
@given(rngs, st.booleans())
def test_a_damaged_state_is_read_or_a_checkpoint_error(
    tmp_path_factory: Any, rng: random.Random, in_file: bool
) -> None:
    out = shared(tmp_path_factory)
    text = hostile_json({"step": 3, "state": STATE} if not in_file else STATE, rng)
    if in_file:
        import hashlib

        (out / "state").mkdir(exist_ok=True)
        (out / "state" / "3.json").write_bytes(text)
        metadata: Any = {"state": {"file": "state/3.json", "sha256": hashlib.sha256(text).hexdigest()}}
    else:
        try:
            metadata = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(metadata, dict):
            return
    outcome = survives(lambda: state_from_metadata(metadata, out), CheckpointError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, ResumeState):
        assert state_from_metadata(state_to_metadata(outcome, out, 9), out) == outcome


# --- settings -----------------------------------------------------------------------------------------------

KEYS = [key for key in Settings.model_fields if not key.endswith("_settings")]
TOML = """
rows = 4
steps = 12
out = "a/b"
run = "r1"
call_timeout_s = 2.5
latch = true
boundary = "staged_before_update"
stage_before_update = true
[engine]
factory = "m:f"
learning_rate = 1e-3
layers = [1, 2, [3, "x"]]
nested = {a = {b = 1979-05-27}}
[source]
path = "data"
"""
TOML_VALUES = [
    "1", "-1", "0", "4.0", "1e400", "inf", "nan", "true", '""', '"x"', '"a\\u0000b"', '"\\u001b[2J"', "[]", "{}",
    "[[[]]]", "0x" + "f" * 4000, "9" * 4400, "1979-05-27T07:32:00Z", "{a" + ".a" * 500 + " = 1}",
    "[" * 300 + "]" * 300, '"' + "x" * 900 + '"', "9223372036854775808", "'..'", "'../../etc'",
    "'" + "字" * 50 + "'", "'serial'", "'²'", "'４'",
]  # fmt: skip
TEXTS = ["", "0", "-1", "4", "4.5", "1e400", "nan", "true", "on", "x" * 900, "\udcff", "²", "４", "\x1b[2J", "..", ".",
         "serial", "sync", "m:f", "a:b:c", "[1]", "{}", "null", "9" * 4400, "a\nb"]  # fmt: skip


def check_settings(resolved: object) -> None:
    if isinstance(resolved, ShmstageError):
        return
    settings = survives(lambda: completed(resolved.settings), SettingsError, cap_nbytes=CAP_NBYTES)  # type: ignore[attr-defined]
    if isinstance(settings, ShmstageError):
        return
    # as they reach the children: the same, or refused before
    assert Settings.model_validate(json.loads(settings.model_dump_json())) == settings
    assert settings.out_dir.name not in ("", ".", "..") or settings.out is not None


@fuzz
@given(rngs)
def test_a_damaged_settings_file_is_read_or_bad_input(tmp_path_factory: Any, rng: random.Random) -> None:
    file = shared(tmp_path_factory) / "x.toml"
    file.write_bytes(mutated(TOML.encode(), rng, 8))
    check_settings(survives(lambda: resolve({}, {}, file), SettingsError, cap_nbytes=CAP_NBYTES))


@fuzz
@given(rngs, st.sampled_from([*KEYS, *SWITCHES, "unknown", "'a b'", "engine", "engine.x", "source.a.b", "hooks"]))
def test_a_setting_of_any_value_is_taken_or_bad_input(tmp_path_factory: Any, rng: random.Random, key: str) -> None:
    """S78: numbers beyond 64 bits, tables nested beyond use, text that no file name can hold."""
    file = shared(tmp_path_factory) / "x.toml"
    deep = ".a" * rng.choice((0, 0, 0, 40, 2000, 20000))
    file.write_text(f"{key}{deep} = {rng.choice(TOML_VALUES)}\n")
    check_settings(survives(lambda: resolve({}, {}, file), SettingsError, cap_nbytes=40_000_000))


@fuzz
@given(st.sampled_from(["engine.x", "source.a.b", "hooks.y", "engine.factory", "source"]), st.sampled_from(TOML_VALUES))
def test_a_value_for_a_plug_in_arrives_there_or_is_bad_input(tmp_path_factory: Any, key: str, value: str) -> None:
    file = shared(tmp_path_factory) / "x.toml"
    file.write_text(f"{key} = [1, {value}]\n{key}s = {value}\n")
    check_settings(survives(lambda: resolve({}, {}, file), SettingsError, cap_nbytes=CAP_NBYTES))


@fuzz
@given(st.dictionaries(st.sampled_from([*KEYS, *SWITCHES]), st.sampled_from(TEXTS) | st.text(max_size=8), max_size=3))
def test_an_environment_of_any_values_is_taken_or_bad_input(values: dict[str, str]) -> None:
    environment = {f"SHMSTAGE_{key.upper()}": value for key, value in values.items()}
    check_settings(survives(lambda: resolve({}, environment), SettingsError, cap_nbytes=CAP_NBYTES))


FLAGS = ["--" + key.replace("_", "-") for key in [*KEYS, *SWITCHES, "config", "unknown", "no-latch"]]
FLAGS += ["--", "-", "-x"]


@fuzz
@given(st.lists(st.sampled_from(FLAGS) | st.sampled_from(TEXTS), max_size=5))
def test_flags_of_any_values_are_taken_or_bad_input(capsys: Any, arguments: list[str]) -> None:
    """The command prints its settings, or one line that says what is wrong."""

    def run() -> int:
        try:
            return run_command.main(["--print-config", "--json", *arguments])
        except SystemExit as asked_for_help:
            return int(asked_for_help.code or 0)

    outcome = survives(run, SettingsError, cap_nbytes=40_000_000)
    printed = capsys.readouterr().out
    if outcome == 0 and "-h" not in arguments:
        json.loads(printed)


@pytest.mark.parametrize("name", [*RECORDS, "steps.jsonl"])
def test_every_odd_text_instead_of_a_record_is_read_or_bad_input(tmp_path: Path, name: str) -> None:
    read = RECORDS[name][1] if name in RECORDS else lambda out: read_json_lines(out / "steps.jsonl")
    for text in JSON_TEXTS:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass") + b"\n")
        survives(lambda: read(tmp_path), SettingsError, cap_nbytes=CAP_NBYTES)


def shared(factory: Any) -> Path:
    """One directory for all examples of this module; each writes what it reads."""
    path: Path = factory.getbasetemp() / "records" / "r"
    path.mkdir(parents=True, exist_ok=True)
    for name in ("begun.json", failure_path(path, "trainer").name, "run.json"):
        (path / name).unlink(missing_ok=True)
    return path

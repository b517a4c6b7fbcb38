"""The command line: light to start, one line per error, the documented exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmstage import cli
from shmstage.launch import run_command

HEAVY = ("jax", "numpy", "zmq", "pydantic", "rich")


def test_help_leaves_heavy_modules_out() -> None:
    code = (
        "import sys\nfrom shmstage.cli import main\nassert main(['--help']) == 0\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "usage: shmstage COMMAND" in done.stdout


def test_importing_the_package_and_listing_its_names_is_light() -> None:
    code = f"import sys, shmstage\ndir(shmstage)\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    import shmstage

    assert all(getattr(shmstage, name) is not None for name in shmstage.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = shmstage.Nothing


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: shmstage {command}" in capsys.readouterr().out


def test_an_unknown_command_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "no command 'fly'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage-next-microbatch"], "needs pipeline_step_boundary; add --pipeline-step-boundary"),
        (["--slots", "1"], "slots = '1' (--slots): must be greater than or equal to 2"),
        (["--config", "nowhere.toml"], "settings file nowhere.toml"),
        (["--bundle", "x", "--source", "a:b"], "keep the one to train"),
        (["--engine", "my_loss"], "engine = 'my_loss' (--engine): must be module:factory"),
        (["--profile-steps", "3"], "profile_steps = '3' (--profile-steps): must be FROM:TO, for example 3:5"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_variable_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHMSTAGE_ROWZ", "3")
    assert cli.main(["run", "--print-config"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "SettingsError: unknown variable $SHMSTAGE_ROWZ; did you mean SHMSTAGE_ROWS?\n")


def test_help_has_every_setting_in_its_group_with_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    first, *groups = re.split(r"\n\n(?=\S[^\n]*:\n)", capsys.readouterr().out)[1:]
    assert re.findall(r"--[\w-]+", first) == ["--help", "--config", "--print-config", "--json"]
    assert [group.split(":\n")[0] for group in groups] == [*run_command.SECTIONS, "The three switches"]
    options = [re.findall(r"^  (--[\w-]+)", group, re.MULTILINE) for group in groups]
    assert [each[0].removeprefix("--").replace("-", "_") for each in options[:-1]] == [*run_command.SECTIONS.values()]
    said = "".join(groups)
    for taken in ("--sampler-is-cap NUMBER", "--profile-steps FROM:TO", "--record-steps FROM:TO", "--events {on,off}",
                  "--host-register {auto,off}", "--numa {default,interleave}", "--metrics-port PORT", "--run ID",
                  "--engine MODULE:FACTORY", "--rows N", "--out PATH", "--call-timeout-s SECONDS"):  # fmt: skip
        assert f"  {taken}" in said


def test_print_config_shows_value_and_origin(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--rows", "7", "--pipeline-step-boundary", "--print-config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == {"value": 7, "origin": "--rows"}
    assert shown["boundary"] == {"value": "pipelined", "origin": "--pipeline-step-boundary"}
    assert shown["tokens"] == {"value": 256, "origin": "default"}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(["--rows", "0"], "SettingsError"), (["--no-such-flag"], "SettingsError"), (["--config", "x"], "SettingsError")],
)
def test_with_json_a_failure_is_one_object_too(
    arguments: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--json", *arguments]) == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, 2)
    assert said.err.strip() == f"{kind}: {error['text']}"


def test_options_that_nobody_knows_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--no-such-flag"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "SettingsError: unrecognized arguments: --no-such-flag; `shmstage run --help` lists all options\n"
    )
    assert said.out == ""


@pytest.mark.slow
def test_a_reader_that_has_had_enough_ends_the_command_without_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "shmstage.cli", "budget", "--limit", "1TB", "--json"], stdout=writer, timeout=60,
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def _budget(**options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shmstage.cli", "budget", "--limit", "1TB"]
    return subprocess.run(command, timeout=60, stderr=subprocess.PIPE, text=True, check=False, **options)


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = _budget(stdout=full)
    assert (done.returncode, done.stderr) == (
        2, "shmstage: cannot write: No space left on device; free space where the output goes\n",
    )  # fmt: skip


@pytest.mark.slow
def test_a_closed_standard_output_is_no_error() -> None:
    done = _budget(preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_terminal_that_cannot_show_every_letter_is_no_error() -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = _budget(stdout=subprocess.DEVNULL, env=plain)
    assert (done.returncode, done.stderr) == (0, "")

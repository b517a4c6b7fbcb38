"""Command lines that nobody meant: an exit code and one line, never a traceback."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fuzzing import check_text, fuzz, survives
from hypothesis import given
from hypothesis import strategies as st
from test_records import TEXTS

from shmstage import cli

pytestmark = pytest.mark.slow

#: what each command is given besides its own flags. None of them trains, waits or removes anything.
WORDS: dict[str, list[str]] = {
    "budget": ["10GB", "64MiB", "-5GB", "1e9GB", "9" * 30 + "GB", "mount=1GB", "ram=", "dense", "ragged_packed", "cpu"],
    "bundle": ["show", "verify", "import", "/dev/null", "/"],
    "status": ["/dev/null", "/"],
    "doctor": ["/"],
}
NEVER = {"--watch", "--help", "record"}


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return sorted(set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - NEVER)


@pytest.mark.parametrize("command", WORDS)
@fuzz
@given(data=st.data())
def test_any_command_line_ends_with_an_exit_code_and_one_line(command: str, capsys: Any, data: st.DataObject) -> None:
    """S78: sizes and counts of any value, names too long for any file."""
    value = st.sampled_from(TEXTS + WORDS[command])
    flag = st.sampled_from(flags_of(command, capsys) or ["--json"])
    pairs = data.draw(st.lists(st.tuples(flag, value) | st.tuples(value) | st.tuples(flag), max_size=4))
    arguments = [word for pair in pairs for word in pair]

    def run() -> int:
        try:
            return cli.main([command, *arguments])
        except SystemExit as refused_by_argparse:
            return int(refused_by_argparse.code or 0)

    code = survives(run, cap_nbytes=100_000_000)
    said = capsys.readouterr().err
    assert code in (0, 1, 2, 3, 4)
    if code == 2 and not said.startswith("usage:"):
        check_text(said.strip())


@pytest.mark.parametrize(
    "arguments",
    [["bundle", "verify", "x" * 300], ["run", "--out", "x" * 300], ["run", "--bundle", "x" * 300],
     ["status", "\udcff"], ["run", "--resume", "x" * 300], ["compare", "--out", "x" * 300],
     ["run", "--config", "x" * 300]],
    ids=list("abcdefg"),
)  # fmt: skip
def test_a_name_too_long_for_any_file_is_bad_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert "Error: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

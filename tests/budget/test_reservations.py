"""What ``shmstage budget`` cannot know, and how its answer says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "packing"))
from test_budget_command import SMALL, budget
from test_bundle_facts import make_bundle

from shmstage import cli


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_device_memory_that_nobody_told_is_said_not_to_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--param-bytes", "28GB", "--platform", "accelerator", "--limit", "100PB")
    assert cli.main(["budget", *state]) == 0
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert last.startswith("fits: ")
    assert "; device memory was not judged: 168" in last
    assert last.endswith("; --device-memory has it judged")
    assert "4096 slots (no setting may say more), rows unknown, as device memory was not judged" in out
    _, found = budget(*state, capsys=capsys)
    assert found["most"] == {"slots": 4096, "rows": None}
    assert any(text.startswith("device memory is large enough: nobody said") for text in found["assumed"])
    _, told = budget(*state, "--device-memory", "1TB", capsys=capsys)
    assert told["most"]["rows"] > 0
    assert told["reservations"] == []
    assert not any("device memory" in text for text in told["assumed"])
    _, on_cpu = budget(*state, "--platform", "cpu", capsys=capsys)
    assert on_cpu["reservations"] == []


def test_a_verdict_that_only_the_assumed_processes_make_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """650 MB are assumed, on the safe side; who has measured less may say it, as a flag or in the file."""
    code, found = budget("--platform", "cpu", "--limit", "600MB", capsys=capsys)
    assert (code, found["verdict"]) == (1, "does not fit")
    (said,) = found["reservations"]
    assert "only the 650000000 bytes (650 MB) that the processes are assumed to take" in said
    assert "--process-bytes, or process_bytes in the table [budget]" in said
    code, found = budget("--platform", "cpu", "--limit", "600MB", "--process-bytes", "400MB", capsys=capsys)
    assert (code, found["needs"]["processes"], found["reservations"]) == (0, 400_000_000, [])
    assert not any("the processes take" in text for text in found["assumed"])
    Path("run.toml").write_text('[budget]\nprocess_bytes = "400MB"\n')
    assert budget("--platform", "cpu", "--limit", "600MB", "--config", "run.toml", capsys=capsys)[0] == 0
    # what somebody said is not assumed, and what does not fit without any processes is not their fault
    for flags in (("--process-bytes", "700MB"), ("--rows", "4096", "--tokens", "4096")):
        code, found = budget("--platform", "cpu", "--limit", "600MB", *flags, capsys=capsys)
        assert (code, found["reservations"]) == (1, [])


def test_a_limit_on_what_is_held_below_one_row_is_said_to_be_assumed_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = budget(*SMALL, "--max-held-bytes", "1", capsys=capsys)[1]["assumed"]
    assert any("no group is larger than max_held_bytes = 1: a run refuses one that is" in text for text in said)
    row = str(256 * 16)
    said = budget(*SMALL, "--max-held-bytes", row, capsys=capsys)[1]["assumed"]
    assert not any("no group is larger" in text for text in said)


def test_with_a_bundle_no_fewer_tokens_are_suggested_than_its_longest_trajectory_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_bundle(tmp_path / "b"))  # the longest has 12
    run = ("--bundle", path, "--rows", "200", "--tokens", "64", "--platform", "cpu", "--process-bytes", "0")
    _, roomy = budget(*run, "--limit", "1TB", capsys=capsys)
    need = roomy["binding"]["need"]
    tokens = {}
    for part in (2, 8):
        _, found = budget(*run, "--limit", str(need // part), capsys=capsys)
        tokens[part] = [each for each in found["suggestions"] if "tokens" in each["change"]]
        assert found["suggestions"]
    (enough,) = tokens[2]
    assert 12 <= enough["change"]["tokens"] < 64
    assert enough["text"] == f"tokens = {enough['change']['tokens']}"
    assert tokens[8] == []

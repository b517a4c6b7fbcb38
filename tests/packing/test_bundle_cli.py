from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trajectory_making import make_trajectory

from shmstage.errors import BundleError
from shmstage.packing import bundle_cli
from shmstage.packing.bundle import write_bundle
from shmstage.packing.bundle_cli import main


@pytest.fixture
def path(tmp_path: Path) -> Path:
    trajectories = [
        make_trajectory(n, name=f"[red]{n}", optional=frozenset({"routing"}), group_id="g") for n in (2, 4, 9)
    ]
    return write_bundle(tmp_path / "bundle", trajectories, provenance={"seed": 3}).path


def only_object(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    assert text.count("\n") == 1
    return found


def test_import_prints_one_object_with_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"tokens":[1,2],"loss_mask":1,"advantages":1,"old_logprobs":[0,0]}\n')
    assert main(["import", str(tmp_path / "in.jsonl"), str(tmp_path / "a" / "b"), "--json"]) == 0
    assert only_object(capsys.readouterr().out) == {
        "path": str(tmp_path / "a" / "b"),
        "trajectories": 1,
        "groups": 1,
        "batches": 1,
        "tokens": 2,
        "loss_tokens": 1,
        "notes": [],
    }


def test_show_tells_counts_lengths_and_fields(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path), "--json"]) == 0
    shown = only_object(capsys.readouterr().out)
    assert shown["counts"]["trajectories"] == 3
    assert shown["length"] == {"min": 2, "p50": 4, "p90": 9, "p99": 9, "max": 9}
    assert shown["fields"]["routing"]["packed"] == "routed_experts"
    assert shown["fields"]["routing"]["shape"] == ["tokens", 2, 3]
    assert shown["provenance"] == {"seed": 3}


def test_show_prints_a_table_for_people(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "int16 [tokens, 2, 3] → routed_experts" in out
    assert "min 2  p50 4" in out


def test_verify_says_that_all_is_right(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path)]) == 0
    assert "every sha256 and digest is right" in capsys.readouterr().out
    assert main(["verify", str(path), "--json"]) == 0
    assert only_object(capsys.readouterr().out)["ok"] is True


def test_verify_of_a_damaged_bundle_exits_with_two(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path / "COMPLETE").unlink()
    with pytest.raises(BundleError, match="COMPLETE") as raised:
        main(["verify", str(path)])
    assert raised.value.exit_code == 2
    assert main(["verify", str(path), "--json"]) == 2
    verdict = only_object(capsys.readouterr().out)
    assert verdict["ok"] is False
    assert "COMPLETE" in str(verdict["error"])


def test_record_is_handed_over_with_all_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr(bundle_cli, "RECORDER", f"{__name__}:recorder")
    monkeypatch.setattr(sys.modules[__name__], "recorder", lambda argv: handed.append(argv) or 4, raising=False)
    assert main(["record", "--seed", "1", "OUT", "--json", "-h"]) == 4
    assert handed == [["--seed", "1", "OUT", "--json", "-h"]]


@pytest.mark.slow
def test_help_needs_neither_numpy_nor_rich() -> None:
    code = (
        "import sys, shmstage.packing.bundle_cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {'numpy', 'rich', 'jax', 'safetensors', 'xxhash', 'pydantic', 'zmq'} & set(sys.modules)\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

"""What fuzzing found in bundles, journals and JSON lines, each once and by name."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import survives
from mutations import deep
from trajectory_making import make_trajectory

from shmstage import cli
from shmstage.errors import BudgetError, BundleError, TrajectoryError
from shmstage.memory.limits import Limit
from shmstage.packing import import_jsonl as importing
from shmstage.packing import room
from shmstage.packing.bundle import read_bundle, write_bundle
from shmstage.packing.group_record import encode_group
from shmstage.packing.import_bundle import import_bundle
from shmstage.packing.journal import Journal
from shmstage.packing.trajectory import Group, Trajectory

CAP_NBYTES = 8_000_000


# --- trajectories -------------------------------------------------------------------------------------------


def test_more_experts_than_ids_can_name_are_refused() -> None:
    """P13: a number beyond 32 bits came back as a TypeError of the native call."""
    arguments: Any = {"tokens": [1], "loss_mask": [1], "advantages": [0.0], "old_logprobs": [0.0], "routing": [[[0]]]}
    Trajectory(trajectory_id="t", **arguments, experts=2**15)
    for experts in (2**15 + 1, 2**31, 2**53):
        with pytest.raises(TrajectoryError, match="experts wants an integer from 0 to 32768"):
            Trajectory(trajectory_id="t", **arguments, experts=experts)


@pytest.mark.parametrize(
    "values", [{"tokens": "x" * 10**6}, {"batch_index": [1] * 10**6}, {"trajectory_id": deep(9999)}], ids=list("abc")
)
def test_a_refusal_of_a_large_value_is_short(values: dict[str, Any]) -> None:
    arguments = {"trajectory_id": "t", "tokens": [1], "loss_mask": [1], "advantages": [0.0], "old_logprobs": [0.0]}
    outcome = survives(lambda: Trajectory(**(arguments | values)), TrajectoryError, cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, TrajectoryError)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "b", [make_trajectory(3)], provenance={"a": 1}).path


def seal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())


def test_a_bundle_larger_than_memory_is_refused_before_it_is_read(bundle: Path) -> None:
    """The kernel would end the process while it reads. The file has no blocks, its size is all it takes."""
    os.truncate(bundle / "shard-00000.safetensors", 1 << 42)
    seal(bundle, lambda manifest: manifest["shards"][0].update(nbytes=1 << 42))
    outcome = survives(lambda: read_bundle(bundle), BudgetError, cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, BudgetError) and "train it in parts" in str(outcome)


def test_the_size_of_dev_shm_does_not_limit_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle lies in private memory; 64 MB of /dev/shm say nothing about it."""
    limits = [Limit("the mount", 64, "mount"), Limit("the cgroup", 1000, "cgroup"), Limit("RAM", 9000, "ram")]
    monkeypatch.setattr(room, "read_limits", lambda: limits)
    room.check_room(1000, "the shards", "train it in parts")
    with pytest.raises(BudgetError, match="the cgroup leaves 1 kB; train it in parts"):
        room.check_room(1001, "the shards", "train it in parts")


def test_provenance_that_nests_beyond_use_is_refused_by_both_sides(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(BundleError, match="deeper than 64"):
        write_bundle(tmp_path / "c", [make_trajectory(3)], provenance={"a": deep(64)})
    seal(bundle, lambda manifest: manifest["provenance"].update(a=deep(500)))
    with pytest.raises(BundleError, match="at most 64 levels"):
        read_bundle(bundle)


def test_showing_a_bundle_cannot_garble_a_terminal(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seal(bundle, lambda manifest: manifest["provenance"].update({"\x1b[2J": "\ud800", "b": ["\x1b]0;x\x07"]}))
    assert cli.main(["bundle", "show", str(bundle)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_pipe_instead_of_a_journal_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "segment-000000000000.journal")
    with pytest.raises(BundleError, match="not a regular file"):
        Journal(tmp_path)


@pytest.mark.slow
def test_a_group_record_of_any_length_is_hashed_in_pieces(tmp_path: Path) -> None:
    """A torn record that announces 64 GiB, in a file that has no blocks."""
    from shmstage.packing.journal_segment import _CHECK, _FRONT, MAGIC, xxhash

    front = _FRONT.pack(MAGIC, 0, 1 << 28, b"\0" * 16)
    file = tmp_path / "segment-000000000000.journal"
    file.write_bytes(front + _CHECK.pack(xxhash.xxh3_64_intdigest(front)))
    os.truncate(file, len(front) + 8 + (1 << 28))
    journal = survives(lambda: Journal(tmp_path), cap_nbytes=(1 << 27) + (1 << 24))
    assert isinstance(journal, Journal) and journal.count == 0
    journal.close()


def test_the_id_of_a_journaled_group_is_printable_as_those_of_trajectories() -> None:
    with pytest.raises(TrajectoryError, match="printable"):
        encode_group(Group("a\x1b[2J", 0, ()))


def test_names_of_a_record_do_not_move_the_cursor(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"responses": [1], "\\u001b[2J": 1}')
    with pytest.raises(TrajectoryError) as raised:
        import_bundle(tmp_path / "x.jsonl", tmp_path / "out")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("header", ["(", "(" * 9000, "{'descr': '<f8', 'shape': (\n"], ids=["open", "deep", "torn"])
def test_a_header_of_an_array_that_is_no_python_is_refused(tmp_path: Path, header: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(TrajectoryError, match=r"x\.npz cannot be read as \.npz"):
        import_bundle(tmp_path / "x.npz", tmp_path / "out")


def test_a_file_without_line_ends_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "LINE_LIMIT_NBYTES", 1000)
    (tmp_path / "x.jsonl").write_bytes(b"\0" * 5000)
    with pytest.raises(TrajectoryError, match="line 1: longer than 1000 bytes"):
        import_bundle(tmp_path / "x.jsonl", tmp_path / "out")

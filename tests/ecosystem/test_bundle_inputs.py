"""Files that people have become bundles that train: every container, verl's and TRL's names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_json
from rollout_records import rollouts, trl_records, verl_records, write
from skipping import skip_unless_ci

from shmstage.errors import MissingExtraError, TrajectoryError
from shmstage.packing import import_parquet
from shmstage.packing.bundle_cli import main
from shmstage.packing.import_bundle import import_bundle
from shmstage.packing.trajectory import Trajectory

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    pyarrow = None

OURS: dict[str, Any] = {
    "tokens": np.array([[1, 2, 3], [4, 5, 0]], np.int64),
    "loss_mask": np.array([[0, 1, 1], [0, 1, 0]]),
    "advantages": np.array([0.1, 0.2]),
    "old_logprobs": np.array([[0, -0.1, -0.2], [0, -0.3, 9]]),
    "length": np.array([3, 2]),
    "group_id": np.array(["g", "h"]),
}


@pytest.fixture(autouse=True)
def _parquet_is_there(request: pytest.FixtureRequest) -> None:
    if "parquet" in request.node.name and pyarrow is None:
        skip_unless_ci("pyarrow is not installed")


def want() -> list[tuple[list[int], list[float], list[float]]]:
    """Tokens, log-probs and advantages of the made-up rollouts, worked out by hand."""
    made = list(rollouts())
    groups: dict[str, list[float]] = {}
    for each in made:
        groups.setdefault(each["group"], []).append(each["reward"])
    found = []
    for each in made:
        rewards = groups[each["group"]]
        std = np.std(rewards, ddof=1)
        advantage = 0.0 if not std else (each["reward"] - np.mean(rewards)) / (std + 1e-4)
        zeros = [0.0] * len(each["prompt"])
        advantages = zeros + [advantage] * len(each["answer"])
        found.append((each["prompt"] + each["answer"], zeros + each["logps"], advantages))
    return found


def check(trajectories: tuple[Trajectory, ...]) -> None:
    assert len(trajectories) == len(want())
    for got, (tokens, logps, advantages) in zip(trajectories, want(), strict=True):
        assert got.tokens.tolist() == tokens
        assert got.old_logprobs.tolist() == logps
        assert got.advantages.tolist() == pytest.approx(advantages, rel=1e-3)
        assert got.loss_mask.tolist() == [float(value != 0) for value in logps]


@pytest.mark.parametrize("container", ["jsonl", "parquet", "npz"])
@pytest.mark.parametrize("names", ["trl", "verl"])
def test_the_same_rollouts_come_out_of_every_container_and_under_both_names(
    tmp_path: Path, container: str, names: str
) -> None:
    records = verl_records() if names == "verl" else trl_records(padded=container == "npz")
    imported = import_bundle(write(tmp_path / f"records.{container}", records), tmp_path / "out")
    assert imported.bundle.manifest["provenance"]["container"] == container
    assert imported.bundle.manifest["provenance"]["format"] == names
    assert imported.notes == ()
    check(imported.bundle.trajectories)


@pytest.mark.parametrize("container", ["parquet", "npz"])
def test_our_own_names_come_out_of_other_containers_too(tmp_path: Path, container: str) -> None:
    file = tmp_path / f"records.{container}"
    if container == "npz":
        np.savez(file, **OURS)
    else:
        write(file, [{name: array[row].tolist() for name, array in OURS.items()} for row in range(2)])
    first, second = import_bundle(file, tmp_path / "out", format=container).bundle.trajectories  # type: ignore[arg-type]
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 3], [4, 5])
    assert (first.group_id, second.trajectory_id) == ("g", "row-2")
    assert second.loss_mask.tolist() == [0, 1]
    assert second.advantages.tolist() == [np.float32(0.2)] * 2
    assert first.old_logprobs.tolist() == np.array([0, -0.1, -0.2], np.float32).tolist()


def test_routing_comes_out_of_a_parquet_file(tmp_path: Path) -> None:
    record = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 1.0, "old_logprobs": [0.0, -1.0, -2.0]}
    routed = record | {"routing": [[[0, 1]], [[2, 1]]], "experts": 4}
    (trajectory,) = import_bundle(write(tmp_path / "r.parquet", [routed]), tmp_path / "out").bundle.trajectories
    assert np.asarray(trajectory.routing).tolist() == [[[0, 1]], [[2, 1]]]


# --- what is wrong is named ---------------------------------------------------------------------------------


def refused(file: Path, match: str, **options: Any) -> None:
    with pytest.raises(TrajectoryError, match=match):
        import_bundle(file, file.parent / "out", **options)
    assert not (file.parent / "out").exists()


def test_a_wrong_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    records = trl_records()
    records[13]["logprobs"] *= 2
    count = len(records[13]["completion_ids"])
    file = write(tmp_path / "records.parquet", records)
    refused(file, rf"records\.parquet, row 14: logprobs wants {count} values, one per token, got {2 * count}")


def test_a_value_missing_inside_a_list_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    records = trl_records()
    records[1]["logprobs"][0] = None
    file = write(tmp_path / "records.parquet", records)
    refused(file, r"row 2: logprobs wants a list of one value per token, got None at \[0\]")


def test_what_only_begins_as_a_parquet_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "records.parquet", trl_records())
    whole = (tmp_path / "records.parquet").read_bytes()
    (tmp_path / "records.parquet").write_bytes(whole[:-20])
    refused(tmp_path / "records.parquet", r"records\.parquet cannot be read as Parquet: .*; write it again")


def test_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array([[1, 2]]), pyarrow.array([[1, 2]])], names=["tokens", "tokens"])
    parquet.write_table(table, tmp_path / "twice.parquet")
    refused(tmp_path / "twice.parquet", "a column occurs twice")


def test_without_pyarrow_the_install_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.parquet").write_bytes(b"PAR1 and so on")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"which needs pyarrow; pip install 'shmstage\[parquet\]'") as raised:
        main(["import", str(tmp_path / "records.parquet"), str(tmp_path / "out")])
    assert raised.value.exit_code == 2


def test_a_parquet_file_that_does_not_fit_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(import_parquet, "check_room", lambda nbytes, *texts: asked.append(nbytes))
    file = write(tmp_path / "records.parquet", trl_records())
    next(import_parquet.parquet_rows(file))
    assert asked[0] >= sum(4 * len(tokens) for tokens, _, _ in want()) > 0


def test_equal_values_of_a_parquet_file_are_counted_as_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(import_parquet, "check_room", lambda nbytes, *texts: asked.append(nbytes))
    next(import_parquet.parquet_rows(write(tmp_path / "x.parquet", [{"prompt_ids": [7] * 100_000}])))
    assert asked[0] >= 8 * 100_000


def test_objects_in_a_npz_file_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (str(tmp_path / "exploded"),))  # type: ignore[return-value]

    records = np.empty(2, object)
    records[:] = [Bomb(), Bomb()]
    np.savez(tmp_path / "x.npz", prompt_ids=records)
    refused(tmp_path / "x.npz", r"x\.npz: prompt_ids holds Python objects, which only pickle could read; pad lists")
    assert not (tmp_path / "exploded").exists()


def test_arrays_without_a_mask_are_refused_because_padding_cannot_be_told(tmp_path: Path) -> None:
    for name, records in (("completion_mask", trl_records(padded=True)), ("attention_mask", verl_records())):
        for record in records:
            del record[name]
        file = write(tmp_path / f"{name}.npz", records)
        refused(file, rf"{name}\.npz, row 1: wants {name}, by which padding is told")
    np.savez(tmp_path / "ours.npz", **{name: array for name, array in OURS.items() if name != "length"})
    refused(tmp_path / "ours.npz", r"ours\.npz, row 1: wants length, by which padding is told")


def test_arrays_of_unequal_rows_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", prompt_ids=np.ones((2, 3), int), completion_ids=np.ones((3, 3), int))
    refused(tmp_path / "x.npz", "as many rows as each other, got completion_ids 3, prompt_ids 2")


def test_a_single_number_in_a_npz_file_is_no_row(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", prompt_ids=np.ones((2, 3), int), rewards=np.array(1.0))
    refused(tmp_path / "x.npz", "rewards wants one row per record, got a single float64")


def test_a_header_that_claims_more_than_the_file_has_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    import zipfile

    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({1 << 40},), }}".ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("rewards.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    refused(tmp_path / "x.npz", rf"rewards: float64\[{1 << 40}\] takes {8 << 40} bytes, there are 128")


def test_rows_without_anything_in_them_are_refused_because_there_is_no_end_to_them(tmp_path: Path) -> None:
    names = ("prompts", "responses", "attention_mask", "old_log_probs", "advantages")
    np.savez(tmp_path / "x.npz", **{name: np.zeros((1 << 40, 0), np.int32) for name in names})  # type: ignore[arg-type]
    refused(tmp_path / "x.npz", rf"prompts: int32\[{1 << 40}, 0\] has nothing in a row; leave it out")


def test_a_torn_npz_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.npz", verl_records())
    whole = (tmp_path / "x.npz").read_bytes()
    (tmp_path / "x.npz").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "x.npz", r"x\.npz cannot be read as \.npz: .*; write it with np\.savez")


def test_a_file_is_not_what_it_was_said_to_be(tmp_path: Path) -> None:
    file = write(tmp_path / "records.jsonl", trl_records())
    refused(file, r"records\.jsonl wants to be parquet, got jsonl .*; give jsonl", format="parquet")


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    nothing = pyarrow.array([], pyarrow.list_(pyarrow.int32()))
    parquet.write_table(pyarrow.table({"tokens": nothing}), tmp_path / "x.parquet")
    refused(tmp_path / "x.parquet", r"x\.parquet holds 0 trajectories; give one record a row")


# --- and it trains ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_parquet_file_of_trl_records_is_imported_and_trains_alike_in_every_mode(tmp_path: Path) -> None:
    write(tmp_path / "records.parquet", trl_records())
    imported = run_json("bundle", "import", "records.parquet", "OUT", "--format", "trl", cwd=tmp_path)
    assert imported["trajectories"] == len(want())
    verdict = run_json("compare", "--bundle", "OUT", "--steps", "4", cwd=tmp_path)
    assert verdict["equal"] is True
    assert verdict["steps"] == 4

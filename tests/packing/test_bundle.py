from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from trajectory_making import make_trajectory

from shmstage.errors import BundleError, TrajectoryError
from shmstage.packing import bundle as bundles
from shmstage.packing.bundle import read_bundle, write_bundle
from shmstage.packing.fields import OPTIONAL_FIELDS, TOKEN_FIELDS
from shmstage.packing.source import BundleSource
from shmstage.packing.trajectory import Trajectory


def some(count: int = 5, optional: frozenset[str] = frozenset()) -> list[Trajectory]:
    """Two to a group, four to a batch; the first one is empty."""
    return [
        make_trajectory(
            3 * number,
            name=f"t{number}",
            seed=number,
            optional=optional,
            group_id=f"g{number // 2}",
            batch_index=number // 4,
            policy_version=number,
            routing_rows=(3 * number if number % 2 else max(3 * number - 1, 0)) if "routing" in optional else None,
        )
        for number in range(count)
    ]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("optional", [frozenset(), OPTIONAL_FIELDS], ids=["plain", "all optional fields"])
@pytest.mark.parametrize("shard_nbytes", [1, 200, 1 << 20])
def test_what_was_written_is_read_bit_for_bit(tmp_path: Path, optional: frozenset[str], shard_nbytes: int) -> None:
    """S69: the empty trajectory comes back empty."""
    written = some(optional=optional)
    write_bundle(tmp_path / "b", written, provenance={"made": "by a test"}, shard_nbytes=shard_nbytes)
    bundle = read_bundle(tmp_path / "b")
    assert len(bundle.manifest["shards"]) == {1: 4, 200: len(bundle.manifest["shards"]), 1 << 20: 1}[shard_nbytes]
    assert len(bundle.trajectories) == len(written)
    for got, want in zip(bundle.trajectories, written, strict=True):
        for field in TOKEN_FIELDS:
            before, after = getattr(want, field.source), getattr(got, field.source)
            if before is None:
                assert after is None
            else:
                assert (after.dtype, after.shape, after.tobytes()) == (before.dtype, before.shape, before.tobytes())
        for name in ("trajectory_id", "group_id", "batch_index", "policy_version", "experts", "digest", "loss_tokens"):
            assert getattr(got, name) == getattr(want, name)
    assert bundle.manifest["provenance"] == {"made": "by a test"}
    assert bundle.manifest["counts"]["tokens"] == 30


def test_the_same_trajectories_give_the_same_bytes(tmp_path: Path) -> None:
    for name, provenance in (("one", {"b": 1, "a": 2}), ("two", {"a": 2, "b": 1})):
        write_bundle(tmp_path / name, some(optional=OPTIONAL_FIELDS), provenance=provenance, shard_nbytes=100)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_groups_come_in_the_order_of_their_first_trajectory(tmp_path: Path) -> None:
    trajectories = some(6)
    bundle = write_bundle(tmp_path / "b", [trajectories[i] for i in (4, 0, 2, 1, 5, 3)], provenance={})
    assert [(g.group_id, g.batch_index, [t.trajectory_id for t in g.trajectories]) for g in bundle.groups()] == [
        ("g2", 1, ["t4", "t5"]),
        ("g0", 0, ["t0", "t1"]),
        ("g1", 0, ["t2", "t3"]),
    ]


def test_a_bundle_source_begins_at_any_cursor_again_and_again(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", some(6), provenance={})
    source = BundleSource(tmp_path / "b")
    assert source.replayable
    for _ in range(2):
        assert [group.group_id for group in source.groups(0)] == ["g0", "g1", "g2"]
        assert [group.group_id for group in source.groups(2)] == ["g2"]
        assert list(source.groups(3)) == []


def test_a_bundle_is_never_overwritten(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", some(), provenance={})
    before = contents(tmp_path / "b")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("b", "dangling", "empty"):
        with pytest.raises(BundleError, match=f"{name} exists; a bundle is never overwritten"):
            write_bundle(tmp_path / name, some(2), provenance={})
    assert contents(tmp_path / "b") == before


@pytest.mark.parametrize("failing", ["manifest.json", "COMPLETE", "shard-00001.safetensors"])
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    real = bundles.write_durably

    def full_disk(file: Path, data: bytes) -> None:
        if file.name == failing:
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(bundles, "write_durably", full_disk)
    before = os.listdir(tmp_path)
    with pytest.raises(BundleError, match="b cannot be written: No space left on device"):
        write_bundle(tmp_path / "b", some(), provenance={}, shard_nbytes=1)
    assert os.listdir(tmp_path) == before


def test_complete_is_the_last_file_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = bundles.write_durably
    monkeypatch.setattr(bundles, "write_durably", lambda file, data: (order.append(file.name), real(file, data)))
    write_bundle(tmp_path / "b", some(), provenance={})
    assert order == ["shard-00000.safetensors", "manifest.json", "COMPLETE"]


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    """P4: trained-once is counted by id."""
    with pytest.raises(BundleError, match="trajectory_id 't3' occurs twice"):
        write_bundle(tmp_path / "b", [*some(), make_trajectory(2, name="t3")], provenance={})
    assert not (tmp_path / "b").exists()


def test_a_group_in_two_batches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"group 'g0' lies in batch 0 and, with trajectory 'x', in batch 7"):
        write_bundle(
            tmp_path / "b", [*some(), make_trajectory(2, name="x", group_id="g0", batch_index=7)], provenance={}
        )


def test_a_field_that_only_some_carry_is_refused(tmp_path: Path) -> None:
    """P12"""
    with pytest.raises(TrajectoryError, match="'x' has returns and trajectory 't0' has not"):
        write_bundle(tmp_path / "b", [*some(), make_trajectory(1, name="x", returns=[1.0])], provenance={})


def test_a_bundle_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="0 trajectories"):
        write_bundle(tmp_path / "b", [], provenance={})


@pytest.mark.parametrize("provenance", [{"x": np.float32(1)}, {"x": float("nan")}, {"x": {1: 2}}, {"x": (1, 2)}])
def test_provenance_that_json_would_change_is_refused(tmp_path: Path, provenance: dict[str, object]) -> None:
    before = os.listdir(tmp_path)
    with pytest.raises(BundleError, match="provenance"):
        write_bundle(tmp_path / "b", some(), provenance=provenance)
    assert os.listdir(tmp_path) == before

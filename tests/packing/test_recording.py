"""What is on disk while steps are recorded, and what becomes of it when a run ends or is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from trajectory_making import make_trajectory

from shmstage.errors import BundleError
from shmstage.packing import recording as module
from shmstage.packing.bundle import read_bundle
from shmstage.packing.recording import Recording, Replay, replay_of
from shmstage.packing.trajectory import Trajectory

WHOSE = {"run": "r", "out": "/o", "record_steps": "7:8"}
OPTIONAL = frozenset({"routing"})


def some(*names: str, group: str = "g") -> list[Trajectory]:
    return [
        make_trajectory(3 + place, name=name, seed=len(name), optional=OPTIONAL, group_id=group)
        for place, name in enumerate(names)
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recorded"


@pytest.fixture
def recording(path: Path) -> Iterator[Recording]:
    made = Recording(path, WHOSE, goes_on=False)
    yield made
    made.close()


def folder_of(path: Path) -> Path:
    return path.parent / ".recorded.recording"


def test_micro_batches_become_batches_of_one_bundle_with_their_steps_in_the_provenance(
    path: Path, recording: Recording
) -> None:
    recording.write(7, 0, 0, some("a", "b"), "d0")
    recording.write(7, 1, 1, some("c"), "d1")
    recording.write(8, 0, 2, some("d"), "d2")
    assert not path.exists()
    recording.finish([7, 8], {"run": "r"})
    bundle = read_bundle(path)
    assert [(t.trajectory_id, t.batch_index) for t in bundle.trajectories] == [("a", 0), ("b", 0), ("c", 1), ("d", 2)]
    assert [t.digest for t in bundle.trajectories] == [t.digest for t in [*some("a", "b"), *some("c"), *some("d")]]
    told = bundle.manifest["provenance"]
    assert (told["format"], told["run"], told["steps"]) == ("recorded", "r", [7, 8])
    assert [(each["step"], each["index"], each["digest"]) for each in told["microbatches"]] == [
        (7, 0, "d0"), (7, 1, "d1"), (8, 0, "d2"),
    ]  # fmt: skip
    assert sum(each["loss_tokens"] for each in told["microbatches"]) == bundle.manifest["counts"]["loss_tokens"]
    assert not folder_of(path).exists()


def test_routing_that_waits_packed_is_recorded_as_it_came(path: Path, recording: Recording) -> None:
    (given,) = some("a")
    recording.write(7, 0, 0, [given.with_held_routing(4)], "d")
    recording.finish([7], {})
    (found,) = read_bundle(path).trajectories
    assert np.array_equal(np.asarray(found.routing), np.asarray(given.routing))
    assert found.digest == given.digest


def test_shards_are_small_since_the_job_stands_still_while_one_is_encoded(
    path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_NBYTES", 1)
    recording.write(7, 0, 0, some("a", "b"), "d0")
    recording.finish([7], {})
    assert [shard["trajectories"] for shard in read_bundle(path).manifest["shards"]] == [1, 1]


def test_a_replay_gets_trajectories_in_the_order_of_their_arrival_whatever_their_groups_are_called(
    path: Path, recording: Recording
) -> None:
    long = "x" * 200
    given = [*some("a", group=long), *some("b", group="h"), *some("c", group=long)]
    recording.write(7, 0, 0, given, "d")
    recording.finish([7], {})
    groups = read_bundle(path).groups()
    assert [[t.trajectory_id for t in group.trajectories] for group in groups] == [["a"], ["b"], ["c"]]


def test_what_is_trained_a_second_time_gets_another_id_and_is_the_same(path: Path, recording: Recording) -> None:
    recording.write(7, 0, 0, some("a"), "d")
    recording.write(8, 0, 1, some("a"), "d")
    recording.finish([7, 8], {})
    first, again = read_bundle(path).trajectories
    assert (first.trajectory_id, again.trajectory_id) == ("a", "8.0.0 a")
    assert first.digest == again.digest


def test_only_the_steps_that_are_asked_for_come_into_the_bundle(path: Path, recording: Recording) -> None:
    recording.write(7, 0, 0, some("a"), "d")
    recording.write(8, 0, 1, some("b"), "d")
    recording.finish([8], {})
    assert [t.trajectory_id for t in read_bundle(path).trajectories] == ["b"]


# --- who is killed leaves nothing that reads as whole -------------------------------------------------------


def test_a_successor_goes_on_with_what_is_there(path: Path, recording: Recording) -> None:
    recording.write(7, 0, 0, some("a", "b"), "d0")
    recording.close()  # as a kill does
    assert not path.exists()
    successor = Recording(path, WHOSE, goes_on=True)
    assert successor.digest_of(7, 0) == "d0"
    assert (successor.steps, successor.count(7), successor.digest_of(7, 1)) == ([7], 1, None)
    successor.write(7, 1, 1, some("a"), "d1")
    successor.finish([7], {})
    assert [t.trajectory_id for t in read_bundle(path).trajectories] == ["a", "b", "7.1.0 a"]
    successor.close()


def test_a_successor_goes_on_when_the_disk_is_full(
    path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    recording.write(7, 0, 0, some("a"), "d0")
    recording.close()
    monkeypatch.setattr(module, "write_json", full_disk)
    successor = Recording(path, WHOSE, goes_on=True)
    assert successor.digest_of(7, 0) == "d0"
    successor.close()


@pytest.mark.parametrize(
    ("whose", "goes_on"), [(WHOSE, False), ({**WHOSE, "run": "another"}, True)], ids=["fresh", "another"]
)
def test_what_another_run_left_is_removed(
    path: Path, recording: Recording, whose: dict[str, str], goes_on: bool
) -> None:
    recording.write(7, 0, 0, some("a"), "d0")
    recording.close()
    successor = Recording(path, whose, goes_on=goes_on)
    assert successor.steps == []
    assert [entry.name for entry in folder_of(path).iterdir() if entry.is_dir()] == []
    successor.close()


@pytest.mark.parametrize("damage", ["COMPLETE", "manifest.json", "shard-00000.safetensors", "moved"])
def test_a_part_that_is_not_whole_counts_for_nothing(path: Path, recording: Recording, damage: str) -> None:
    recording.write(7, 0, 0, some("a"), "d0")
    recording.write(7, 1, 1, some("b"), "d1")
    recording.close()
    part = sorted(entry for entry in folder_of(path).iterdir() if entry.is_dir())[1]
    if damage == "COMPLETE":
        (part / damage).unlink()
    elif damage == "moved":
        shutil.move(part, part.with_name("000000000000009-0000000"))
    else:
        os.truncate(part / damage, 100)
    successor = Recording(path, WHOSE, goes_on=True)
    assert (successor.digest_of(7, 0), successor.digest_of(7, 1)) == ("d0", None)
    successor.write(7, 1, 1, some("b"), "d1")
    successor.finish([7], {})
    assert len(read_bundle(path).trajectories) == 2
    successor.close()


def test_a_bundle_that_cannot_be_made_leaves_its_parts_for_another_try(
    path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.write(7, 0, 0, some("a"), "d0")

    def full_disk(directory: Path, manifest: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "seal", full_disk)
        with pytest.raises(BundleError, match="recorded cannot be written: No space left"):
            recording.finish([7], {})
    assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == [folder_of(path).name]
    recording.finish([7], {})
    assert read_bundle(path).trajectories[0].trajectory_id == "a"


def test_a_kill_while_the_bundle_is_made_leaves_nothing_that_a_successor_does_not_remove(
    path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording.write(7, 0, 0, some("a"), "d0")
    with monkeypatch.context() as patch:
        # a kill runs no clean-up
        patch.setattr(module, "seal", lambda *arguments: os.truncate(path, 0))
        patch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(BundleError):
            recording.finish([7], {})
    recording.close()
    assert [entry.name for entry in path.parent.iterdir()] == [folder_of(path).name]
    successor = Recording(path, WHOSE, goes_on=True)
    assert len([entry for entry in folder_of(path).iterdir() if entry.is_dir()]) == 1
    successor.finish([7], {})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    successor.close()


def test_on_a_file_system_without_links_shards_are_copied(
    path: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: object, **options: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "link", no_links)
    recording.write(7, 0, 0, some("a"), "d0")
    recording.finish([7], {})
    assert read_bundle(path).trajectories[0].trajectory_id == "a"


# --- who may record where -----------------------------------------------------------------------------------


def test_what_exists_is_never_overwritten(path: Path) -> None:
    path.mkdir()
    with pytest.raises(BundleError, match="recorded exists; a bundle is never overwritten: choose another --record"):
        Recording(path, WHOSE, goes_on=False)


def test_a_resumed_run_whose_bundle_is_made_has_nothing_to_record(path: Path, recording: Recording) -> None:
    recording.write(7, 0, 0, some("a"), "d0")
    recording.finish([7], {})
    assert Recording(path, WHOSE, goes_on=True).is_done


def test_two_living_runs_do_not_record_to_one_place(path: Path, recording: Recording) -> None:
    recording.write(7, 0, 0, some("a"), "d0")
    with pytest.raises(BundleError, match="recorded is being recorded by a living run; choose another --record"):
        Recording(path, {**WHOSE, "run": "another"}, goes_on=False)
    assert recording.finish([7], {})["counts"]["trajectories"] == 1, "and the second one harmed nothing"


def test_a_link_to_somebody_elses_directory_is_refused_and_nothing_in_it_is_removed(path: Path) -> None:
    (path.parent / "theirs" / "precious").mkdir(parents=True)
    folder_of(path).symlink_to(path.parent / "theirs")
    with pytest.raises(BundleError, match="recorded.recording is a link; remove it, or choose another --record"):
        Recording(path, WHOSE, goes_on=False)
    assert (path.parent / "theirs" / "precious").exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot be recorded: Not a directory; choose another --record"):
        Recording(tmp_path / "file" / "recorded", WHOSE, goes_on=False)


# --- what a replay is told ----------------------------------------------------------------------------------

SETTINGS = {"rows": 4, "tokens": 256, "microbatches_per_step": 3}


@pytest.mark.parametrize(
    ("provenance", "want"),
    [
        ({"format": "jsonl", "settings": SETTINGS}, None),
        ({"format": "recorded"}, None),
        ({"format": "recorded", "settings": SETTINGS}, Replay(True, ())),
        ({"format": "recorded", "settings": SETTINGS | {"rows": 8}}, Replay(False, ("rows = 8 there, 4 here",))),
        (
            {"format": "recorded", "settings": SETTINGS | {"microbatches_per_step": 2}},
            Replay(True, ("microbatches_per_step = 2 there, 3 here",)),
        ),
    ],
    ids=["no recording", "no settings", "same", "other rows", "other steps"],
)
def test_a_replay_is_exact_where_micro_batches_are_planned_alike(provenance: dict[str, object], want: object) -> None:
    assert replay_of(provenance, SETTINGS) == want

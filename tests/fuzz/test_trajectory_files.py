"""Bundles, journals and JSON lines, damaged by a disk or made to do harm."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import fuzz, survives
from hypothesis import given
from hypothesis import strategies as st
from mutations import Rng, hostile_json, mutated
from trajectory_making import make_trajectory

from shmstage.errors import BundleError, ShmstageError, TrajectoryError
from shmstage.packing.bundle import read_bundle, write_bundle
from shmstage.packing.group_record import decode_group, encode_group
from shmstage.packing.import_bundle import import_bundle
from shmstage.packing.journal import Journal
from shmstage.packing.journal_segment import frame
from shmstage.packing.shard import decode_shard, encode_shard
from shmstage.packing.trajectory import Group, Trajectory

pytestmark = pytest.mark.slow

CAP_NBYTES = 4_000_000
OPTIONAL = frozenset({"routing", "returns"})
TRAJECTORIES = [make_trajectory(n, name=f"t{n}", seed=n, optional=OPTIONAL) for n in (3, 0, 5)]
SHARD = encode_shard(TRAJECTORIES)
GROUPS = [
    Group("g1", 0, tuple(TRAJECTORIES[:2])),
    Group("g2", 1, (make_trajectory(2, name="p"),)),
    Group("none", 1, ()),
    Group("g3", 1, (TRAJECTORIES[2], make_trajectory(1, name="q"))),
]
LINE = {
    "tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "advantages": 1.0, "old_logprobs": [0.0, -0.5, -0.25],
    "routing": [[[0, 1]], [[2, 3]], [[1, 0]]], "experts": 4, "trajectory_id": "a", "group_id": "g", "batch_index": 0,
}  # fmt: skip

rngs = st.integers(0, 1 << 32).map(Rng)


def check_same(got: Group, want: Group) -> None:
    assert (got.group_id, got.batch_index) == (want.group_id, want.batch_index)
    assert [each.digest for each in got.trajectories] == [each.digest for each in want.trajectories]


# --- bundles ------------------------------------------------------------------------------------------------


@fuzz
@given(rngs, st.sampled_from(["manifest.json", "shard-00000.safetensors", "COMPLETE"]), st.booleans())
def test_a_damaged_bundle_is_read_as_it_was_or_refused(
    tmp_path_factory: Any, rng: random.Random, name: str, sealed: bool
) -> None:
    """With every sha256 made right again by somebody who knows how, or not."""
    path = a_bundle(tmp_path_factory)
    manifest = json.loads((path / "manifest.json").read_bytes())
    if name == "manifest.json":
        text = hostile_json(manifest, rng)
    else:
        data = mutated((path / name).read_bytes(), rng)
        (path / name).write_bytes(data)
        manifest["shards"][0].update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        text = json.dumps(manifest).encode()
    if sealed:
        (path / "manifest.json").write_bytes(text)
        (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())
    outcome = survives(lambda: read_bundle(path), BundleError, cap_nbytes=CAP_NBYTES)
    if not isinstance(outcome, ShmstageError):
        assert outcome.groups()


@fuzz
@given(rngs, st.integers(0, 1 << 20) | st.sampled_from([2**15, 2**15 + 1, 2**31, 2**40, 2**53]))
def test_a_damaged_shard_holds_trajectories_or_is_refused(rng: random.Random, experts: int) -> None:
    """S75: a shard's own header gives shapes and offsets."""
    entries = [{"id": t.trajectory_id, "group": "g", "batch": 0, "policy_version": 0} for t in TRAJECTORIES]
    length = struct.unpack_from("<Q", SHARD)[0]
    if rng.random() < 0.5:
        header = hostile_json(json.loads(SHARD[8 : 8 + length]), rng)
        data = struct.pack("<Q", len(header)) + header + SHARD[8 + length :]
    else:
        data = mutated(SHARD, rng) if rng.random() < 0.7 else SHARD
    survives(
        lambda: decode_shard(data, entries, sorted(OPTIONAL), experts, Path("x")), BundleError, cap_nbytes=CAP_NBYTES
    )


# --- journals -----------------------------------------------------------------------------------------------


def journal_bytes() -> list[bytes]:
    records = []
    for number, group in enumerate(GROUPS):
        pieces = encode_group(group)
        records.append(b"".join([frame(number, pieces), *pieces]))
    return records


RECORDS = journal_bytes()


def read_journal(directory: Path) -> list[Group]:
    journal = Journal(directory)
    try:
        journal.first()
        return list(journal.read(0))
    finally:
        journal.close()


def put_segment(directory: Path, data: bytes, number: int = 0) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"segment-{number:012d}.journal").write_bytes(data)


def test_a_journal_cut_off_anywhere_keeps_what_was_whole(tmp_path: Path) -> None:
    """A torn record is dropped, nothing before it is lost, nothing half written is handed out."""
    data = b"".join(RECORDS)
    ends = [sum(map(len, RECORDS[:count])) for count in range(len(RECORDS) + 1)]
    # every byte of every header, and of the arrays every seventh
    headers = {end + byte for end in ends for byte in range(-3, 56) if 0 <= end + byte <= len(data)}
    for cut in sorted(headers | set(range(0, len(data), 7))):
        put_segment(tmp_path / "j", data[:cut])
        got = read_journal(tmp_path / "j")
        assert len(got) == sum(end <= cut for end in ends) - 1
        for one, want in zip(got, GROUPS, strict=False):
            check_same(one, want)


def test_no_byte_of_a_journaled_group_changes_unnoticed(tmp_path: Path) -> None:
    """In a record that others follow no change is a torn end."""
    for at in range(0, len(RECORDS[0]), 5):
        data = bytearray(b"".join(RECORDS))
        data[at] ^= 1 << at % 8
        put_segment(tmp_path / "j", bytes(data))
        with pytest.raises(BundleError):
            read_journal(tmp_path / "j")


@fuzz
@given(rngs, st.booleans())
def test_a_damaged_journal_gives_what_was_written_or_is_refused(
    tmp_path_factory: Any, rng: random.Random, as_first: bool
) -> None:
    directory = fresh(tmp_path_factory, "journal")
    cut = rng.randrange(len(RECORDS) + 1)
    put_segment(directory, b"".join(RECORDS[:cut]))
    put_segment(directory, b"".join(RECORDS[cut:]), cut)
    victim = directory / ("first.journal" if as_first else rng.choice(sorted(p.name for p in directory.iterdir())))
    victim.write_bytes(mutated(RECORDS[0] if as_first else victim.read_bytes(), rng))
    outcome = survives(lambda: read_journal(directory), BundleError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, list):
        for got, want in zip(outcome, GROUPS, strict=False):
            check_same(got, want)


@fuzz
@given(rngs, st.integers(0, len(GROUPS) - 1))
def test_a_group_record_with_a_right_hash_and_wrong_content_is_refused(rng: random.Random, which: int) -> None:
    """Somebody who knows how makes the hashes right; what they cover may still be anything."""
    length_bytes, text, *shards = encode_group(GROUPS[which])
    kind = rng.randrange(3)
    if kind == 0:
        text = hostile_json(json.loads(text), rng)
        length_bytes = struct.pack("<Q", len(text))
    data = b"".join([length_bytes, text, *shards])
    if kind:
        data = mutated(data, rng)
    outcome = survives(lambda: decode_group(data, Path("x")), BundleError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, Group):
        encode_group(outcome)


# --- JSON lines ---------------------------------------------------------------------------------------------


@fuzz
@given(st.lists(rngs, min_size=1, max_size=3))
def test_damaged_lines_become_a_bundle_or_are_refused(tmp_path_factory: Any, damage: list[random.Random]) -> None:
    folder = fresh(tmp_path_factory, "jsonl")
    lines = [hostile_json(LINE | {"trajectory_id": f"t{number}"}, rng) for number, rng in enumerate(damage)]
    (folder / "x.jsonl").write_bytes(b"\n".join(lines))
    fitting = (TrajectoryError, BundleError)
    survives(lambda: import_bundle(folder / "x.jsonl", folder / "out"), *fitting, cap_nbytes=CAP_NBYTES)
    if (folder / "out").exists():
        read_bundle(folder / "out")


VERL = {
    "prompts": [0, 5, 6], "responses": [7, 8, 0], "attention_mask": [0, 1, 1, 1, 1, 0], "response_mask": [1, 1, 0],
    "rollout_log_probs": [-0.5, -0.25, 0.0], "token_level_rewards": [0.0, 1.0, 0.0], "uid": "p", "step": 1,
}  # fmt: skip
TRL = {
    "prompt_ids": [0, 5], "prompt_mask": [0, 1], "completion_ids": [7, 8], "completion_mask": [1, 1],
    "logprobs": [-0.5, -0.25], "rewards": [1.0, None], "step": 2, "advantages": None,
}  # fmt: skip


@fuzz
@given(st.lists(rngs, min_size=1, max_size=3), st.sampled_from(["verl", "trl"]))
def test_damaged_records_of_others_become_a_bundle_or_are_refused(
    tmp_path_factory: Any, damage: list[random.Random], names: Any
) -> None:
    folder = fresh(tmp_path_factory, names)
    lines = [hostile_json(VERL if names == "verl" else TRL, rng) for rng in damage]
    (folder / "x.jsonl").write_bytes(b"\n".join(lines))
    run = partial(import_bundle, folder / "x.jsonl", folder / "out", format=names)
    survives(run, TrajectoryError, BundleError, cap_nbytes=CAP_NBYTES)
    if (folder / "out").exists():
        read_bundle(folder / "out")


@fuzz
@given(rngs, st.booleans())
def test_a_damaged_npz_file_becomes_a_bundle_or_is_refused(
    tmp_path_factory: Any, rng: random.Random, packed: bool
) -> None:
    folder = fresh(tmp_path_factory, "npz")
    arrays = {name: np.array([value, value]) for name, value in VERL.items()}
    (np.savez_compressed if packed else np.savez)(folder / "x.npz", **arrays)
    (folder / "x.npz").write_bytes(mutated((folder / "x.npz").read_bytes(), rng))
    run = partial(import_bundle, folder / "x.npz", folder / "out", format="verl")
    survives(run, TrajectoryError, BundleError, cap_nbytes=CAP_NBYTES)
    if (folder / "out").exists():
        read_bundle(folder / "out")


arrays = st.recursive(
    st.sampled_from([0, 1, -1, 0.5, 1e400, float("nan"), 2**31, 2**63, 2**64, 10**400, None, True, "x", b"x", 1j]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@fuzz
@given(st.dictionaries(st.sampled_from(sorted(LINE.keys() | {"policy_version", "returns"})), arrays, max_size=2))
def test_a_trajectory_of_any_values_is_taken_or_refused(values: dict[str, Any]) -> None:
    arguments = LINE | {"advantages": [0.0, 1.0, 1.0]} | values
    survives(lambda: Trajectory(**arguments), TrajectoryError, cap_nbytes=CAP_NBYTES)


def fresh(factory: Any, name: str) -> Path:
    path: Path = factory.getbasetemp() / name
    if path.exists():
        import shutil

        shutil.rmtree(path)
    path.mkdir()
    return path


def a_bundle(factory: Any) -> Path:
    return write_bundle(fresh(factory, "bundles") / "b", TRAJECTORIES, provenance={"a": [1, "b"]}).path

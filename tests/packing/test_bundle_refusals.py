"""A bundle that is incomplete, altered or made to do harm is one `BundleError`, whatever is wrong with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from trajectory_making import make_trajectory

from shmstage.errors import BundleError
from shmstage.packing import manifest as manifests
from shmstage.packing.bundle import read_bundle, write_bundle

SHARD = "shard-00000.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    optional = frozenset({"routing"})
    trajectories = [make_trajectory(n, name=f"t{n}", seed=n, optional=optional) for n in (3, 4, 5)]
    return write_bundle(tmp_path / "bundle", trajectories, provenance={}).path


def seal(path: Path, manifest: Any) -> None:
    """Make every sha256 fit again, as someone who means harm would."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text).hexdigest())


def manifest_of(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    return manifest


def replace_shard(path: Path, data: bytes) -> None:
    (path / SHARD).write_bytes(data)
    manifest = manifest_of(path)
    manifest["shards"][0].update(nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    seal(path, manifest)


def test_a_sealed_bundle_is_read(path: Path) -> None:
    """The tools of this file do no harm by themselves."""
    replace_shard(path, (path / SHARD).read_bytes())
    assert len(read_bundle(path).trajectories) == 3


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, match in (("nowhere", "does not exist"), ("file", "is not a directory"), ("empty", "has no COMPLETE")):
        with pytest.raises(BundleError, match=f"{name} {match}"):
            read_bundle(tmp_path / name)


def test_without_complete_it_was_not_written_to_the_end(path: Path) -> None:
    (path / "COMPLETE").unlink()
    with pytest.raises(BundleError, match="no COMPLETE: it was not written to the end; copy"):
        read_bundle(path)


@pytest.mark.parametrize("name", [SHARD, "manifest.json", "COMPLETE"])
def test_one_changed_byte_is_found(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(BundleError, match=r"sha256 [0-9a-f]{64}, want [0-9a-f?�]{64}|has sha256"):
        read_bundle(path)


@pytest.mark.parametrize("size_change", [-1, 1])
def test_a_shard_of_other_size_is_refused(path: Path, size_change: int) -> None:
    data = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(data[:-1] if size_change < 0 else data + b"x")
    with pytest.raises(BundleError, match=rf"{SHARD} has {len(data) + size_change} bytes"):
        read_bundle(path)


def test_a_missing_shard_and_a_stray_one_are_named(path: Path) -> None:
    os.link(path / SHARD, path / "shard-00001.safetensors")
    with pytest.raises(BundleError, match=r"has shard-00001.safetensors, which its manifest does not name"):
        read_bundle(path)
    (path / "shard-00001.safetensors").unlink()
    (path / SHARD).unlink()
    with pytest.raises(BundleError, match=f"{SHARD} cannot be read: No such file"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("kind", "match"), [("link", "symbolic links"), ("pipe", "not a regular file"), ("directory", "Is a directory")]
)
def test_files_that_are_not_regular_are_refused_without_waiting(path: Path, kind: str, match: str) -> None:
    (path / SHARD).rename(path / "elsewhere")
    if kind == "link":
        (path / SHARD).symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / SHARD)
    else:
        (path / SHARD).mkdir()
    with pytest.raises(BundleError, match=f"{SHARD} .*{match}"):
        read_bundle(path)


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        at: Any = manifest
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    change.__name__ = f"{'.'.join(map(str, keys))} = {str(value)[:30]}"
    return change


@pytest.mark.parametrize(
    "change",
    [
        put("schema", value="shmstage-bundle/2"),
        put("schema", value=None),
        put("unknown", value=1),
        put("shards", 0, "nbytes", value=-1),
        put("shards", 0, "nbytes", value=2**63),
        put("shards", 0, "nbytes", value=1e3),
        put("shards", 0, "nbytes", value=True),
        put("shards", 0, "trajectories", value=2),
        put("shards", 0, "trajectories", value=0),
        put("shards", 0, "sha256", value="0" * 64),
        put("shards", 0, "sha256", value="A" * 64),
        put("shards", 0, value=[]),
        put("shards", value=[]),
        put("shards", value={}),
        put("trajectories", value=[]),
        put("trajectories", 1, "id", value=7),
        put("trajectories", 1, "id", value="t3"),
        put("trajectories", 1, "id", value="two\nlines"),
        put("trajectories", 1, "group", value=None),
        put("trajectories", 1, "batch", value=10**30),
        put("trajectories", 1, "batch", value="0"),
        put("trajectories", 1, "length", value=5),
        put("trajectories", 1, "loss_tokens", value=0),
        put("trajectories", 1, "digest", value="0" * 32),
        put("trajectories", 1, "digest", value="zz"),
        put("trajectories", 1, "more", value=1),
        put("counts", "tokens", value=13),
        put("counts", value=None),
        put("optional", value=[]),
        put("optional", value=["routing", "routing"]),
        put("optional", value=["__class__"]),
        put("optional", value=[["routing"]]),
        put("experts", value=2),
        put("provenance", value=None),
    ],
    ids=lambda change: change.__name__,
)
def test_a_manifest_that_is_not_true_is_refused_though_its_hash_fits(
    path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    manifest = manifest_of(path)
    change(manifest)
    seal(path, manifest)
    with pytest.raises(BundleError, match=str(path)):
        read_bundle(path)


def test_a_key_that_occurs_twice_is_refused(path: Path) -> None:
    text = (path / "manifest.json").read_bytes()
    seal(path, text.rstrip()[:-1] + b',"experts":16}')
    with pytest.raises(BundleError, match="a key occurs twice"):
        read_bundle(path)


def test_a_manifest_too_large_to_be_one_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_NBYTES", 10)
    with pytest.raises(BundleError, match=r"manifest\.json has \d+ bytes, at most 10 were expected"):
        read_bundle(path)


@pytest.mark.parametrize("name", ["../bundle/" + SHARD, "/etc/passwd", SHARD + "\n", "shard-00001.safetensors", "", 0])
def test_no_path_comes_from_a_manifest(path: Path, name: object) -> None:
    manifest = manifest_of(path)
    manifest["shards"][0]["file"] = name
    seal(path, manifest)
    with pytest.raises(BundleError, match=rf"shards\[0\]\.file wants {SHARD}, got"):
        read_bundle(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema":' + b"9" * 10_000 + b"}",
        b'{"schema":"shmstage-bundle/1","schema":"shmstage-bundle/1"}',
        b'{"schema":NaN}',
        b'"shmstage-bundle/1"',
    ],
    ids=["empty", "list", "no text", "deep", "long number", "key twice", "not a number", "text"],
)
def test_a_manifest_that_is_not_one_is_refused(path: Path, text: bytes) -> None:
    seal(path, text)
    with pytest.raises(BundleError, match=r"manifest\.json"):
        read_bundle(path)


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({name: np.ascontiguousarray(change(tensors[name]))})


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:-1],
        lambda a: a + 1,
        lambda a: a.astype(np.int32),
        lambda a: a.reshape(2, 2),
        lambda a: np.array([0, 2**62, 7, 12]),
        lambda a: np.array([0, 7, 3, 12]),
        lambda a: np.array([0, -5, 7, 12]),
        lambda a: np.array([0, 3, 7, 13]),
        lambda a: np.array([0, 2**63 - 1, -2, a[-1]]),  # differences of 64 bits would all be positive
    ],
    ids=["short", "from one", "int32", "square", "huge", "falling", "negative", "past the end", "all around"],
)
@pytest.mark.parametrize("name", ["offsets", "routing_offsets"])
def test_offsets_that_do_not_rise_from_zero_to_the_end_are_refused(
    path: Path, name: str, change: Callable[[Any], Any]
) -> None:
    """S75: offsets are compared, never added or subtracted."""
    tensors = load((path / SHARD).read_bytes())
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    replace_shard(path, save(tensors))
    with pytest.raises(BundleError, match=rf"{SHARD}: {name} must be int64 \[4\], rising from 0 to (12|9)"):
        read_bundle(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (without("offsets"), "holds .*, want"),
        (without("advantages"), "holds .*, want"),
        (lambda tensors: tensors.update(ghost=np.zeros(1, np.float32)), "ghost.*, want"),
        (changed("offsets", lambda a: np.array([0, 4, 7, 12])), "routing wants shape|digest"),
        (changed("routing", lambda a: a * 0), "routing wants distinct expert ids"),
        (changed("routing", lambda a: a.reshape(-1)), "routing_offsets must be"),
        (changed("tokens", lambda a: a.astype(np.int64)), "tokens is int64, want int32"),
        (changed("tokens", lambda a: a.reshape(1, -1)), "offsets must be"),
        (changed("tokens", lambda a: a[:-1]), "offsets must be"),
        (changed("loss_mask", lambda a: a + 0.5), "loss_mask wants 0 or 1"),
        (changed("advantages", lambda a: -a), r"trajectories\[0\] is .*digest"),
        (changed("advantages", lambda a: a[:-1]), r"advantages has shape \[11\], tokens \[12\]"),
        (changed("advantages", lambda a: a.reshape(12, 1)), r"advantages has shape \[12, 1\], tokens \[12\]"),
    ],
)
def test_tensors_that_are_not_the_trajectories_are_refused(
    path: Path, change: Callable[[dict[str, Any]], Any], match: str
) -> None:
    tensors = load((path / SHARD).read_bytes())
    change(tensors)
    replace_shard(path, save(tensors))
    with pytest.raises(BundleError, match=match):
        read_bundle(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x01" * 200],
    ids=["none", "huge", "no tensor", "noise"],
)
def test_a_shard_that_is_not_safetensors_is_refused(path: Path, data: bytes) -> None:
    replace_shard(path, data)
    with pytest.raises(BundleError, match=SHARD):
        read_bundle(path)

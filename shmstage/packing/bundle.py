"""Frozen trajectories on disk: a directory that is either whole and unaltered, or refused.

```
manifest.json            schema, counts, provenance; per shard its size and sha256; per trajectory its ids,
                         digest and loss tokens (the denominators to expect)
shard-00000.safetensors  per-token arrays of its trajectories, concatenated, and int64 `offsets` [count + 1]
COMPLETE                 written last: sha256 of manifest.json
```
The same trajectories give the same bytes. Nothing read here is trusted: names, sizes and offsets are checked
before use, every sha256 and every trajectory digest is computed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.errors import BundleError, named, shown
from shmstage.packing import manifest as manifests
from shmstage.packing.bundle_files import appearing, check_sha256, names_in, read_file, write_durably
from shmstage.packing.fields import ROUTING
from shmstage.packing.held_form import HeldForm
from shmstage.packing.room import check_room
from shmstage.packing.routing import experts_for
from shmstage.packing.shard import decode_shard, encode_shard
from shmstage.packing.trajectory import Group, Trajectory, check_same_fields
from shmstage.settings import RoutingEncoding

SHARD_NBYTES = 256 << 20
COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
_REMEDY = "copy the bundle again or make it anew"


@final
@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that has been read and checked."""

    path: Path
    manifest: Mapping[str, Any]
    trajectories: tuple[Trajectory, ...]

    def groups(self) -> tuple[Group, ...]:
        """Groups in order of their first trajectory."""
        members: dict[str, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            members.setdefault(trajectory.group_id, []).append(trajectory)
        return tuple(Group(name, group[0].batch_index, tuple(group)) for name, group in members.items())


def write_bundle(
    path: Path | str,
    trajectories: Sequence[Trajectory],
    *,
    provenance: Mapping[str, Any],
    shard_nbytes: int = SHARD_NBYTES,
) -> Bundle:
    """Write a bundle to `path`, which must not exist; it appears there whole or not at all.

    `provenance` is kept as it is and must be JSON. A shard is closed when its arrays reach `shard_nbytes`. Raises
    `TrajectoryError` for unequal optional fields, `BundleError` for everything else.
    """
    path = Path(path)
    if not trajectories:
        raise BundleError(f"{path}: 0 trajectories; a bundle holds at least 1")
    check_same_fields(trajectories)
    _check_identities(path, trajectories)
    with appearing(path) as directory:
        shards = []
        for number, part in enumerate(_parts(trajectories, shard_nbytes)):
            name = manifests.shard_name(number)
            data = encode_shard(part)
            write_durably(directory / name, data)
            shards.append(manifests.describe_shard(name, data, part))
        manifest = manifests.describe(trajectories, shards, provenance)
        seal(directory, manifest)
    return Bundle(path, manifest, tuple(trajectories))


def seal(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of the shards that are there, and that they are all."""
    text = manifests.encode(manifest)
    write_durably(directory / MANIFEST, text)
    write_durably(directory / COMPLETE, (hashlib.sha256(text).hexdigest() + "\n").encode())


def read_bundle(path: Path | str, encoding: RoutingEncoding = "dense", experts: int = 0) -> Bundle:
    """Read and check all of a bundle. Raises `BundleError` with what is wrong and what to do.

    `encoding`, `experts`: as the settings say; routing is held in that form, shard by shard. Raises `SettingsError` and
    `TrajectoryError`, too, where it cannot be.
    A bundle is held in memory: one that does not fit there is a `BudgetError` before anything of it is read.
    """
    path = Path(path)
    manifest = read_manifest(path)
    nbytes = [shard["nbytes"] for shard in manifest["shards"]]
    # a shard is copied out of its file's bytes
    check_room(sum(nbytes) + max(nbytes), f"the {len(nbytes)} shards of {path}", "train it in parts")
    form = _form(path, manifest, encoding, experts)
    trajectories: list[Trajectory] = []
    for shard in manifest["shards"]:
        file = path / shard["file"]
        data = read_file(file, shard["nbytes"])
        if len(data) != shard["nbytes"]:
            raise BundleError(f"{file} has {len(data)} bytes, the manifest says {shard['nbytes']}; {_REMEDY}")
        check_sha256(file, data, shard["sha256"])
        entries = manifest["trajectories"][len(trajectories) : len(trajectories) + shard["trajectories"]]
        decoded = decode_shard(data, entries, manifest["optional"], manifest["experts"], file)
        trajectories.extend(map(form.of, decoded))
        del decoded
    _check_identities(path, trajectories)
    recomputed = manifests.describe(trajectories, manifest["shards"], manifest["provenance"])
    for key, value in recomputed.items():
        if manifest[key] != value:
            raise BundleError(f"{path}: {_difference(key, manifest[key], value)}; {_REMEDY}")
    return Bundle(path, manifest, tuple(trajectories))


def read_manifest(path: Path) -> dict[str, Any]:
    """What a bundle says of itself, its shards unread. Raises `BundleError` as `read_bundle`."""
    if not os.path.isdir(path):  # Path's own raises for a name that is too long
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise BundleError(f"{path} {what}; give the directory of a bundle")
    names = names_in(path)
    if COMPLETE not in names:
        raise BundleError(f"{path} has no {COMPLETE}: it was not written to the end; {_REMEDY}")
    complete = read_file(path / COMPLETE, 4096).decode("ascii", "replace").strip()
    text = read_file(path / MANIFEST, manifests.MAX_NBYTES)
    check_sha256(path / MANIFEST, text, complete)
    manifest = manifests.decode(text, path / MANIFEST)
    listed = {shard["file"] for shard in manifest["shards"]}
    stray = sorted(name for name in names if name.startswith("shard-") and name not in listed)
    if stray:
        raise BundleError(f"{path} has {named(stray[0])}, which its manifest does not name; {_REMEDY}")
    return manifest


def _form(path: Path, manifest: Mapping[str, Any], encoding: RoutingEncoding, experts: int) -> HeldForm:
    if ROUTING.source not in manifest["optional"]:
        return HeldForm()
    who = f"the bundle {path}"
    return HeldForm(encoding, experts_for(encoding, asked=experts, said=manifest["experts"], who=who))


def _difference(key: str, written: Any, found: Any) -> str:
    if isinstance(written, list) and isinstance(found, list) and len(written) == len(found):
        for index, (want, got) in enumerate(zip(written, found, strict=True)):
            if want != got:
                return f"{key}[{index}] is {shown(got, 400)}, the manifest says {shown(want, 400)}"
    return f"{key} is {shown(found, 400)}, the manifest says {shown(written, 400)}"


def _check_identities(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Ids occur once and a group lies in one batch; both are what training counts by."""
    seen: set[str] = set()
    batch_of: dict[str, int] = {}
    for trajectory in trajectories:
        name, group = trajectory.trajectory_id, trajectory.group_id
        if name in seen:
            raise BundleError(f"{path}: trajectory_id {name!r} occurs twice; give each trajectory its own")
        seen.add(name)
        batch = batch_of.setdefault(group, trajectory.batch_index)
        if batch != trajectory.batch_index:
            raise BundleError(
                f"{path}: group {group!r} lies in batch {batch} and, with trajectory {name!r}, in batch "
                f"{trajectory.batch_index}; a group belongs to one batch"
            )


def _parts(trajectories: Sequence[Trajectory], shard_nbytes: int) -> Iterator[list[Trajectory]]:
    part: list[Trajectory] = []
    nbytes = 0
    for trajectory in trajectories:
        part.append(trajectory)
        nbytes += trajectory.nbytes
        if nbytes >= shard_nbytes:
            yield part
            part, nbytes = [], 0
    if part:
        yield part

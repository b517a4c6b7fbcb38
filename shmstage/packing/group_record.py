"""One group as bytes: its ids as JSON, its arrays as in a bundle's shards."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from shmstage.errors import BundleError, TrajectoryError, shown
from shmstage.packing.fields import OPTIONAL_FIELDS
from shmstage.packing.shard import decode_shard, encode_shard
from shmstage.packing.trajectory import MAX_ID_CHARACTERS, MAX_INTEGER, Group, Trajectory

_LENGTH = struct.Struct("<Q")
_GROUP_KEYS = {"group_id", "batch_index", "parts"}
_PART_KEYS = {"nbytes", "optional", "experts", "trajectories"}
_ENTRY_KEYS = {"id", "group", "batch", "policy_version", "digest"}
REMEDY = "restore it from a copy, or start anew with another --out"


def encode_group(group: Group) -> list[bytes]:
    """Pieces to be written one after the other; the same group gives the same bytes.

    Raises ``TrajectoryError`` for a group that could not be read back.
    """
    if not _is_name(group.group_id) or not _is_count(group.batch_index):
        raise TrajectoryError(
            f"group {shown(group.group_id, 300)} of batch {shown(group.batch_index)}: a group's id is 1 to "
            f"{MAX_ID_CHARACTERS} printable characters, its batch an integer from 0 to {MAX_INTEGER}"
        )
    parts: list[dict[str, Any]] = []
    shards: list[bytes] = []
    for (optional, experts, _), members in groupby(group.trajectories, key=_kind):
        part = list(members)
        shards.append(encode_shard(part))
        entries = [_entry(trajectory) for trajectory in part]
        parts.append(
            {"nbytes": len(shards[-1]), "optional": list(optional), "experts": experts, "trajectories": entries}
        )
    described = {"group_id": group.group_id, "batch_index": group.batch_index, "parts": parts}
    text = json.dumps(described, sort_keys=True, separators=(",", ":")).encode()
    return [_LENGTH.pack(len(text)), text, *shards]


def decode_group(data: bytes, file: Path) -> Group:
    """What ``encode_group`` was given. Raises ``BundleError`` for anything else, naming ``file``."""
    try:
        described, position = _described(data)
    except (ValueError, RecursionError, struct.error) as error:
        raise BundleError(f"{file}: a group's description is no JSON: {error}; {REMEDY}") from None
    if not _is_group(described):
        raise BundleError(f"{file}: a group is described as {shown(described, 200)}; {REMEDY}")
    trajectories: list[Trajectory] = []
    for part, begin, end in _cut(described["parts"], position):
        if end > len(data):
            raise BundleError(f"{file}: a group's arrays end at byte {end} of {len(data)}; {REMEDY}")
        entries, optional = part["trajectories"], part["optional"]
        found = decode_shard(data[begin:end], entries, optional, part["experts"], file, remedy=REMEDY)
        for entry, trajectory in zip(entries, found, strict=True):
            if trajectory.digest.hex() != entry["digest"]:
                raise BundleError(
                    f"{file}: trajectory {trajectory.trajectory_id!r} has digest {trajectory.digest.hex()}, want "
                    f"{shown(entry['digest'])}; {REMEDY}"
                )
        trajectories += found
        position = end
    if position != len(data):
        raise BundleError(f"{file}: a group has {len(data)} bytes, its arrays end at {position}; {REMEDY}")
    return Group(described["group_id"], described["batch_index"], tuple(trajectories))


def _kind(trajectory: Trajectory) -> tuple[tuple[str, ...], int, tuple[int, ...]]:
    """What all trajectories of one shard have in common."""
    shape = trajectory.routing.shape[1:] if trajectory.routing is not None else ()
    return tuple(sorted(trajectory.optional)), trajectory.experts, shape


def _entry(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.trajectory_id,
        "group": trajectory.group_id,
        "batch": trajectory.batch_index,
        "policy_version": trajectory.policy_version,
        "digest": trajectory.digest.hex(),
    }


def _described(data: bytes) -> tuple[Any, int]:
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ValueError(f"{length} bytes announced, {len(data) - _LENGTH.size} there")
    return json.loads(data[_LENGTH.size : end]), end


def _cut(parts: list[dict[str, Any]], position: int) -> Iterator[tuple[dict[str, Any], int, int]]:
    for part in parts:
        yield part, position, position + part["nbytes"]
        position += part["nbytes"]


def _is_group(described: object) -> bool:
    return (
        _has(described, _GROUP_KEYS)
        and _is_name(described["group_id"])
        and _is_count(described["batch_index"])
        and isinstance(described["parts"], list)
        and all(_is_part(part) for part in described["parts"])
    )


def _is_part(part: object) -> bool:
    return (
        _has(part, _PART_KEYS)
        and _is_count(part["nbytes"])
        and _is_count(part["experts"])
        and isinstance(part["optional"], list)
        and all(isinstance(name, str) and name in OPTIONAL_FIELDS for name in part["optional"])
        and isinstance(part["trajectories"], list)
        and len(part["trajectories"]) > 0
        and all(_has(entry, _ENTRY_KEYS) and isinstance(entry["digest"], str) for entry in part["trajectories"])
    )


def _has(value: object, keys: set[str]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and value.keys() == keys


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARACTERS and value.isprintable()

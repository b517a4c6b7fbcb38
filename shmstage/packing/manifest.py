"""A bundle's `manifest.json`: what it says about its trajectories, and whether that is even possible."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shmstage.errors import BundleError, shown
from shmstage.packing.fields import OPTIONAL_FIELDS, optional_fields
from shmstage.packing.trajectory import MAX_INTEGER, Trajectory

SCHEMA = "shmstage-bundle/1"
MAX_NBYTES = 1 << 30
MAX_DEPTH = 64

_KEYS = {"schema", "counts", "optional", "experts", "shards", "trajectories", "provenance"}
_COUNTS = {"trajectories", "groups", "batches", "tokens", "loss_tokens"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_REMEDY = "make the bundle anew with this version"


def shard_name(number: int) -> str:
    """File name of shard `number`."""
    return f"shard-{number:05d}.safetensors"


def describe_shard(name: str, data: bytes, part: Sequence[Trajectory]) -> dict[str, Any]:
    """The manifest's entry for one shard."""
    return {
        "file": name,
        "nbytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "trajectories": len(part),
    }


def describe(
    trajectories: Sequence[Trajectory], shards: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of these trajectories; `trajectories` is not empty and of equal optional fields."""
    return {
        "schema": SCHEMA,
        "counts": {
            "trajectories": len(trajectories),
            "groups": len({trajectory.group_id for trajectory in trajectories}),
            "batches": len({trajectory.batch_index for trajectory in trajectories}),
            "tokens": sum(trajectory.length for trajectory in trajectories),
            "loss_tokens": sum(trajectory.loss_tokens for trajectory in trajectories),
        },
        "optional": sorted(optional_fields(trajectories[0])),
        "experts": trajectories[0].experts,
        "shards": [dict(shard) for shard in shards],
        "trajectories": [
            {
                "id": trajectory.trajectory_id,
                "group": trajectory.group_id,
                "batch": trajectory.batch_index,
                "policy_version": trajectory.policy_version,
                "length": trajectory.length,
                "loss_tokens": trajectory.loss_tokens,
                "digest": trajectory.digest.hex(),
            }
            for trajectory in trajectories
        ],
        "provenance": dict(provenance),
    }


def joined(parts: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The manifest of all the shards of `parts`, numbered on. Raises `BundleError` for what cannot be one bundle."""
    first = parts[0]
    for part in parts:
        for name in ("optional", "experts"):
            if part[name] != first[name]:
                raise BundleError(f"{where}: {name} is {shown(part[name])} in one part, {shown(first[name])} in one")
    shards = [shard for part in parts for shard in part["shards"]]
    entries = [entry for part in parts for entry in part["trajectories"]]
    if len({entry["id"] for entry in entries}) != len(entries):
        raise BundleError(f"{where}: a trajectory_id occurs twice; give each trajectory its own")
    return {
        "schema": SCHEMA,
        "counts": {
            "trajectories": len(entries),
            "groups": len({entry["group"] for entry in entries}),
            "batches": len({entry["batch"] for entry in entries}),
            "tokens": sum(entry["length"] for entry in entries),
            "loss_tokens": sum(entry["loss_tokens"] for entry in entries),
        },
        "optional": first["optional"],
        "experts": first["experts"],
        "shards": [{**shard, "file": shard_name(number)} for number, shard in enumerate(shards)],
        "trajectories": entries,
        "provenance": dict(provenance),
    }


def encode(manifest: Mapping[str, Any]) -> bytes:
    """The same bytes for the same manifest. Raises `BundleError` if `provenance` is not JSON."""
    try:
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BundleError(f"provenance is not JSON: {error}; give strings, numbers, lists and dicts") from None
    data = (text + "\n").encode()
    # what cannot be read back must not be written: int keys become strings, tuples lists
    if json.loads(data)["provenance"] != manifest["provenance"]:
        raise BundleError("provenance changes when written as JSON; give dicts with string keys, and lists")
    if _is_deeper(manifest["provenance"], MAX_DEPTH):
        raise BundleError(f"provenance nests deeper than {MAX_DEPTH} levels; flatten it")
    return data


def decode(data: bytes, file: Path) -> dict[str, Any]:
    """The manifest, every value of the right type and in range. Raises `BundleError` naming file and value."""
    try:
        manifest = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not the JSON of a manifest: {error}; {_REMEDY}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        got = manifest.get("schema") if isinstance(manifest, dict) else type(manifest).__name__
        raise BundleError(f"{file} has schema {shown(got, 100)}, want {SCHEMA!r}; {_REMEDY}")
    check = _Check(file)
    check.keys("the manifest", manifest, _KEYS)
    check.keys("counts", manifest["counts"], _COUNTS)
    for name, value in manifest["counts"].items():
        check.integer(f"counts.{name}", value)
    check.integer("experts", manifest["experts"])
    optional = manifest["optional"]
    if not isinstance(optional, list) or not all(isinstance(name, str) for name in optional):
        check.refuse("optional", "a list of field names", optional)
    if optional != sorted(set(optional)) or not set(optional) <= OPTIONAL_FIELDS:
        check.refuse("optional", f"names out of {sorted(OPTIONAL_FIELDS)}, in order", optional)
    if not isinstance(manifest["provenance"], dict):
        check.refuse("provenance", "an object", manifest["provenance"])
    if _is_deeper(manifest["provenance"], MAX_DEPTH):  # whoever shows it recurses
        check.refuse("provenance", f"at most {MAX_DEPTH} levels", manifest["provenance"])
    _check_lists(check, manifest)
    return manifest


def _check_lists(check: _Check, manifest: Mapping[str, Any]) -> None:
    for name in ("shards", "trajectories"):
        if not isinstance(manifest[name], list) or not manifest[name]:
            check.refuse(name, "a list that is not empty", manifest[name])
    for number, shard in enumerate(manifest["shards"]):
        where = f"shards[{number}]"
        check.keys(where, shard, {"file", "nbytes", "sha256", "trajectories"})
        # the name is known beforehand: no path gets in, and none comes twice
        if shard["file"] != shard_name(number):
            check.refuse(f"{where}.file", shard_name(number), shard["file"])
        check.pattern(f"{where}.sha256", shard["sha256"], _SHA256)
        check.integer(f"{where}.nbytes", shard["nbytes"])
        check.integer(f"{where}.trajectories", shard["trajectories"], least=1)
    held = sum(shard["trajectories"] for shard in manifest["shards"])
    if held != len(manifest["trajectories"]):
        check.refuse("trajectories", f"{held} entries, as many as the shards hold", len(manifest["trajectories"]))
    for number, entry in enumerate(manifest["trajectories"]):
        where = f"trajectories[{number}]"
        check.keys(where, entry, {"id", "group", "batch", "policy_version", "length", "loss_tokens", "digest"})
        for name in ("id", "group"):
            if not isinstance(entry[name], str):
                check.refuse(f"{where}.{name}", "a string", entry[name])
        for name in ("batch", "policy_version", "length", "loss_tokens"):
            check.integer(f"{where}.{name}", entry[name])
        check.pattern(f"{where}.digest", entry["digest"], _DIGEST)


class _Check:
    """Refusals that name the file, the place, what was wanted and what is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def refuse(self, where: str, want: str, got: object) -> NoReturn:
        raise BundleError(f"{self.file}: {where} wants {want}, got {shown(got, 200)}; {_REMEDY}")

    def keys(self, where: str, value: object, want: set[str]) -> None:
        if not isinstance(value, dict) or value.keys() != want:
            got = list(value) if isinstance(value, dict) else value
            self.refuse(where, f"the keys {sorted(want)}", got)

    def integer(self, where: str, value: object, least: int = 0) -> None:
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            self.refuse(where, f"an integer from {least} to {MAX_INTEGER}", value)

    def pattern(self, where: str, value: object, pattern: re.Pattern[str]) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.refuse(where, f"text like {pattern.pattern}", value)


def _is_deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")

"""What a bundle says about its micro-batches, from its manifest and the header of its first shard: no array is read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shmstage.errors import BundleError
from shmstage.packing import manifest as manifests
from shmstage.packing.fields import ROUTING

_MAX_HEADER_NBYTES = 1 << 20
_REMEDY = "copy the bundle again or make it anew"


@final
@dataclass(frozen=True, slots=True)
class BundleFacts:
    """``nbytes`` of all trajectories' arrays, as they lie in memory; ``layers`` 0: no routing."""

    optional: frozenset[str]
    layers: int
    top_k: int
    experts: int
    tokens: int
    longest: int
    nbytes: int


def bundle_facts(path: Path) -> BundleFacts:
    """Raises ``BundleError`` where manifest or shard header is missing or malformed; hashes are not computed."""
    manifest = manifests.decode(_read(path / "manifest.json", manifests.MAX_NBYTES), path / "manifest.json")
    optional = frozenset(manifest["optional"])
    layers, top_k = (0, 0)
    if ROUTING.source in optional:
        layers, top_k = _routing_shape(path / manifest["shards"][0]["file"])
    return BundleFacts(
        optional=optional,
        layers=layers,
        top_k=top_k,
        experts=manifest["experts"],
        tokens=manifest["counts"]["tokens"],
        longest=max(entry["length"] for entry in manifest["trajectories"]),
        nbytes=sum(shard["nbytes"] for shard in manifest["shards"]),
    )


def _routing_shape(file: Path) -> tuple[int, int]:
    """Layers and top-k. A safetensors file begins with the length of its JSON header, eight bytes little-endian."""
    length = int.from_bytes(_read(file, 8, whole=False), "little")
    if not 0 < length <= _MAX_HEADER_NBYTES:
        raise BundleError(f"{file}: a header of {length} bytes, at most {_MAX_HEADER_NBYTES} were expected; {_REMEDY}")
    try:
        header = json.loads(_read(file, 8 + length, whole=False)[8:])
        _, layers, top_k = header[ROUTING.source]["shape"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BundleError(f"{file}: its header names no routing [n, layers, top_k]; {_REMEDY}") from None
    if any(type(size) is not int or not 1 <= size <= 1 << 20 for size in (layers, top_k)):
        raise BundleError(f"{file}: routing of {str([layers, top_k])[:80]} layers and top-k; {_REMEDY}")
    return layers, top_k


def _read(file: Path, limit: int, *, whole: bool = True) -> bytes:
    try:
        # non-blocking: opening a pipe would wait for a writer
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            if not os.path.isfile(descriptor):
                raise BundleError(f"{file} is not a regular file; a bundle holds nothing else")
            data = opened.read(limit + whole)
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror}; give the directory of a bundle") from None
    if len(data) > limit:
        raise BundleError(f"{file} has more than {limit} bytes; {_REMEDY}")
    return data

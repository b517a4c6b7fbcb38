"""One `shard-*.safetensors`: the per-token arrays of some trajectories, end to end, and where each begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import numpy as safetensors

from shmstage.errors import BundleError, TrajectoryError, named, shown
from shmstage.packing.fields import ROUTING, carried_fields, optional_fields
from shmstage.packing.trajectory import Trajectory

OFFSETS = "offsets"
ROUTING_OFFSETS = "routing_offsets"


def encode_shard(part: Sequence[Trajectory]) -> bytes:
    """The file's bytes; the same trajectories give the same bytes. `part` is not empty."""
    tensors: dict[str, npt.NDArray[Any]] = {OFFSETS: _offsets([trajectory.length for trajectory in part])}
    for field in carried_fields(optional_fields(part[0])):
        arrays = [getattr(trajectory, field.source) for trajectory in part]
        tensors[field.source] = np.concatenate(arrays)
        if field is ROUTING:
            tensors[ROUTING_OFFSETS] = _offsets([len(array) for array in arrays])
    data: bytes = safetensors.save(tensors)
    return data


def decode_shard(
    data: bytes,
    entries: Sequence[Mapping[str, Any]],
    optional: Sequence[str],
    experts: int,
    file: Path,
    *,
    remedy: str = "make the bundle anew",
) -> list[Trajectory]:
    """The trajectories of a shard, as views of one array per field.

    `entries`, `optional` and `experts` are the manifest's; `remedy` ends every error's text. Raises `BundleError`
    for tensors that are not exactly those, or hold what no trajectory may.
    """
    try:
        tensors = safetensors.load(data)
    except Exception as error:  # the library raises whatever a malformed header makes it stumble on
        raise BundleError(f"{file} is not a safetensors file: {named(str(error), 300)}; {remedy}") from None
    fields = carried_fields(optional)
    want = {field.source for field in fields} | {OFFSETS}
    if ROUTING in fields:
        want.add(ROUTING_OFFSETS)
    if tensors.keys() != want:
        raise BundleError(f"{file} holds {shown(sorted(tensors), 300)}, want {sorted(want)}; {remedy}")
    offsets = _checked_offsets(OFFSETS, tensors, "tokens", len(entries), file, remedy)
    pieces: dict[str, list[npt.NDArray[Any]]] = {}
    for field in fields:
        array = tensors[field.source]
        if array.dtype != np.dtype(field.dtype):
            raise BundleError(f"{file}: {field.source} is {array.dtype}, want {field.dtype}; {remedy}")
        cuts = offsets
        if field is ROUTING:
            cuts = _checked_offsets(ROUTING_OFFSETS, tensors, field.source, len(entries), file, remedy)
        elif array.shape != tensors["tokens"].shape:
            raise BundleError(
                f"{file}: {field.source} has shape {list(array.shape)}, tokens {list(tensors['tokens'].shape)}; "
                f"{remedy}"
            )
        pieces[field.source] = [array[begin:end] for begin, end in pairwise(cuts)]
    trajectories = []
    for number, entry in enumerate(entries):
        try:
            trajectory = Trajectory(
                trajectory_id=entry["id"],
                group_id=entry["group"],
                batch_index=entry["batch"],
                policy_version=entry["policy_version"],
                experts=experts,
                **{name: arrays[number] for name, arrays in pieces.items()},
            )
        except TrajectoryError as error:
            raise BundleError(f"{file}: {error}; {remedy}") from None
        trajectories.append(trajectory)
    return trajectories


def _offsets(lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _checked_offsets(
    name: str, tensors: Mapping[str, npt.NDArray[Any]], of: str, count: int, file: Path, remedy: str
) -> list[int]:
    offsets, cut = tensors[name], tensors[of]
    total = len(cut) if cut.ndim else 0
    if (
        offsets.dtype != np.int64
        or offsets.shape != (count + 1,)
        or offsets[0] != 0
        or offsets[-1] != total
        or (offsets[1:] < offsets[:-1]).any()  # compared, not subtracted: a difference could overflow
    ):
        raise BundleError(
            f"{file}: {name} must be int64 [{count + 1}], rising from 0 to {total}, the length of {of}; "
            f"got {offsets.dtype} {list(offsets.shape)}; {remedy}"
        )
    return [int(offset) for offset in offsets]

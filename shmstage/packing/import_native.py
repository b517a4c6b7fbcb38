"""Records with `Trajectory`'s own field names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shmstage.errors import TrajectoryError, shown
from shmstage.packing.fields import TOKEN_FIELDS
from shmstage.packing.import_rows import Row
from shmstage.packing.trajectory import Trajectory

_ARRAYS = {field.source: field for field in TOKEN_FIELDS}
_SCALARS = {"trajectory_id", "group_id", "batch_index", "policy_version", "experts"}
#: of a row of padded arrays: how many tokens are real
LENGTH = "length"
#: required key → what to write if there is no better value
_REQUIRED = {
    "tokens": '"tokens": [1, 2, 3]',
    "loss_mask": '"loss_mask": 1 to train on every token',
    "advantages": '"advantages": 1.0 for all tokens alike',
    "old_logprobs": '"old_logprobs": [..], one of the policy that sampled them per token, 0.0 for the prompt',
}
_BROADCAST = ("loss_mask", "advantages")


def native_trajectories(rows: Iterable[Row], named: str) -> Iterator[Trajectory]:
    """One of each row; `named`: what a trajectory without an id is called, before its number.

    `tokens`, `loss_mask`, `advantages`, `old_logprobs` are required; a number for `loss_mask` or `advantages` stands
    for all tokens. A missing `group_id` is the trajectory's id, a missing `batch_index` that of the group's first row,
    else (row number - 1) // 64. Raises `TrajectoryError` naming row, field, want and got.
    """
    batch_of: dict[str, int] = {}
    for row in rows:
        try:
            trajectory = Trajectory(**_arguments(row, named, batch_of))
        except TrajectoryError as error:
            text = str(error)
            raise TrajectoryError(text if text.startswith(row.where) else f"{row.where}: {text}") from None
        batch_of.setdefault(trajectory.group_id, trajectory.batch_index)
        yield trajectory


def _arguments(row: Row, named: str, batch_of: Mapping[str, int]) -> dict[str, Any]:
    given = row.values
    unknown = sorted(given.keys() - _ARRAYS.keys() - _SCALARS - {LENGTH})
    if unknown:
        known = ", ".join([*_ARRAYS, *sorted(_SCALARS)])
        row.refuse(f"unknown key {unknown[0][:80]!r}; known are {known}")
    for name, remedy in _REQUIRED.items():
        if name not in given:
            row.refuse(f"wants {name}, got only {row.names}; write {remedy}")
    arguments = {name: value for name, value in given.items() if value is not None}
    _cut(row, arguments)
    for name in ("trajectory_id", "group_id"):
        # datasets number their samples
        if type(arguments.get(name)) is int:
            arguments[name] = str(arguments[name])
    arguments.setdefault("trajectory_id", f"{named}-{row.number}")
    arguments.setdefault("group_id", arguments["trajectory_id"])
    if "batch_index" not in arguments:
        group = arguments["group_id"]
        batch = batch_of.get(group) if isinstance(group, str) else None
        arguments["batch_index"] = row.default_batch if batch is None else batch
    tokens = arguments.get("tokens")
    for name in _BROADCAST:
        value = arguments.get(name)
        if isinstance(value, (int, float)) and isinstance(tokens, (list, np.ndarray)):
            arguments[name] = [value] * len(tokens)
    for name, field in _ARRAYS.items():
        value = arguments.get(name)
        if isinstance(value, np.ndarray) and value.dtype == np.float64 and field.dtype == "float32":
            arguments[name] = value.tolist()  # rounded, as a number of JSON is
    for name in _REQUIRED:
        arguments.setdefault(name, None)  # null: refused with the trajectory's own words
    return arguments


def _cut(row: Row, arguments: dict[str, Any]) -> None:
    """Take padding away, where `length` says how much is none."""
    length = arguments.pop(LENGTH, None)
    if length is None:
        if row.is_padded:
            row.refuse(
                f"wants {LENGTH}, by which padding is told from tokens: rows of an array are all of one length; save "
                "how many tokens of each row are real"
            )
        return
    if type(length) is not int or length < 0:
        row.refuse(f"length wants an integer from 0, got {shown(length)}")
    for name in _ARRAYS:
        value = arguments.get(name)
        if isinstance(value, (list, np.ndarray)):
            # routing may have one row less
            if len(value) < length - (name == "routing"):
                row.refuse(f"{name} wants at least length = {length} values, got {len(value)}")
            arguments[name] = value[:length]

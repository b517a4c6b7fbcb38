"""A bundle out of JSON lines, one trajectory a line, with `Trajectory`'s field names as keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shmstage.errors import TrajectoryError, shown
from shmstage.packing.bundle import Bundle, write_bundle
from shmstage.packing.fields import TOKEN_FIELDS
from shmstage.packing.trajectory import Trajectory

LINES_PER_BATCH = 64
#: the longest line: a file without line ends is not read to its end
LINE_LIMIT_NBYTES = 1 << 30

_ARRAYS = {field.source for field in TOKEN_FIELDS}
_SCALARS = {"trajectory_id", "group_id", "batch_index", "policy_version", "experts"}
#: required key → what to write if there is no better value
_REQUIRED = {
    "tokens": '"tokens": [1, 2, 3]',
    "loss_mask": '"loss_mask": 1 to train on every token',
    "advantages": '"advantages": 1.0 for all tokens alike',
    "old_logprobs": '"old_logprobs": [..], one of the policy that sampled them per token, 0.0 for the prompt',
}
_BROADCAST = ("loss_mask", "advantages")


def import_jsonl(file: Path | str, out: Path | str) -> Bundle:
    """Read trajectories from `file`, write them as a bundle to `out`.

    Per line an object: `tokens`, `loss_mask`, `advantages`, `old_logprobs` are required; a number for `loss_mask`
    or `advantages` stands for all tokens. A missing `trajectory_id` is `line-<number>`, a missing `group_id` the
    trajectory's id, a missing `batch_index` that of the group's first line, else (line number - 1) // 64. Blank
    lines are passed over. Raises `TrajectoryError` naming file, line, field, want and got; `BundleError`.
    """
    file = Path(file)
    trajectories = list(_trajectories(file))
    if not trajectories:
        raise TrajectoryError(f"{file} holds 0 trajectories; give one JSON object a line")
    return write_bundle(out, trajectories, provenance={"imported_from": file.name, "format": "jsonl"})


def _trajectories(file: Path) -> Iterator[Trajectory]:
    batch_of: dict[str, int] = {}
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LINE_LIMIT_NBYTES + 1), b""), start=1):
                if not line.strip():
                    continue
                where = f"{file}, line {number}"
                if len(line) > LINE_LIMIT_NBYTES:
                    raise TrajectoryError(f"{where}: longer than {LINE_LIMIT_NBYTES} bytes; write one object a line")
                try:
                    trajectory = Trajectory(**_arguments(_parse(line, where), number, batch_of, where))
                except TrajectoryError as error:
                    text = str(error)
                    raise TrajectoryError(text if text.startswith(where) else f"{where}: {text}") from None
                batch_of.setdefault(trajectory.group_id, trajectory.batch_index)
                yield trajectory
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read: {error.strerror}; give a file of JSON lines") from None


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"{where}: not a JSON object: {error}; write one object a line") from None
    if not isinstance(value, dict):
        raise TrajectoryError(f"{where}: wants a JSON object, got {shown(value)}; write one object a line")
    return value


def _arguments(given: dict[str, Any], number: int, batch_of: Mapping[str, int], where: str) -> dict[str, Any]:
    unknown = sorted(given.keys() - _ARRAYS - _SCALARS)
    if unknown:
        known = ", ".join([field.source for field in TOKEN_FIELDS] + sorted(_SCALARS))
        raise TrajectoryError(f"{where}: unknown key {unknown[0][:80]!r}; known are {known}")
    for name, remedy in _REQUIRED.items():
        if name not in given:
            raise TrajectoryError(f"{where}: wants {name}, got only {', '.join(sorted(given))}; write {remedy}")
    arguments = {name: value for name, value in given.items() if value is not None}
    for name in ("trajectory_id", "group_id"):
        # datasets number their samples
        if type(arguments.get(name)) is int:
            arguments[name] = str(arguments[name])
    arguments.setdefault("trajectory_id", f"line-{number}")
    arguments.setdefault("group_id", arguments["trajectory_id"])
    default_batch = (number - 1) // LINES_PER_BATCH
    if "batch_index" not in arguments:
        group = arguments["group_id"]
        arguments["batch_index"] = batch_of.get(group, default_batch) if isinstance(group, str) else default_batch
    for name in _BROADCAST:
        value = arguments.get(name)
        if isinstance(value, (int, float)) and isinstance(given["tokens"], list):
            arguments[name] = [value] * len(given["tokens"])
    for name in _REQUIRED:
        arguments.setdefault(name, None)  # null: refused with the trajectory's own words
    return arguments


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")

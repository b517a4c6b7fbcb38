"""A bundle out of what people have: JSON lines, Parquet or `.npz`, with our names, verl's or TRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, final

from shmstage.errors import TrajectoryError
from shmstage.packing import import_trl, import_verl
from shmstage.packing.bundle import Bundle, write_bundle
from shmstage.packing.import_jsonl import jsonl_rows
from shmstage.packing.import_native import native_trajectories
from shmstage.packing.import_npz import npz_rows
from shmstage.packing.import_parquet import parquet_rows
from shmstage.packing.import_rollouts import Advantages, Names, Rollout, lonely_groups, trajectories_of
from shmstage.packing.import_rows import Row
from shmstage.packing.trajectory import Trajectory

#: the first three are containers with our own names in them; the others are names, in any container
Format = Literal["auto", "jsonl", "parquet", "npz", "verl", "trl"]
FORMATS: tuple[Format, ...] = ("auto", "jsonl", "parquet", "npz", "verl", "trl")

_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {"jsonl": jsonl_rows, "parquet": parquet_rows, "npz": npz_rows}
#: first bytes → container; everything else is taken for JSON lines
_MAGIC = {b"PAR1": "parquet", b"PK\x03\x04": "npz", b"PK\x05\x06": "npz"}
#: what a row without an id is called
_ROW = {"jsonl": "line", "parquet": "row", "npz": "row"}


@final
@dataclass(frozen=True)
class _Framework:
    """The names of one framework: what tells them, what reads them, which are used."""

    told_by: str
    read: Callable[[Row], Rollout]
    names: Names
    used: frozenset[str]


_FRAMEWORKS = {
    "verl": _Framework("responses", import_verl.verl_rollout, import_verl.NAMES, import_verl.USED),
    "trl": _Framework("completion_ids", import_trl.trl_rollout, import_trl.NAMES, import_trl.USED),
}


@final
@dataclass(frozen=True)
class Imported:
    """The bundle, and what a person should know of how it was made."""

    bundle: Bundle
    notes: tuple[str, ...] = ()


def import_bundle(
    file: Path | str, out: Path | str, *, format: Format = "auto", advantages: Advantages = "auto"
) -> Imported:
    """Read trajectories from `file`, write them as a bundle to `out`, which must not exist.

    Raises `TrajectoryError` naming file, row, field, want and got; `MissingExtraError` where a file needs what is not
    installed; `BudgetError` for what does not fit into memory; `BundleError`.
    """
    file = Path(file)
    container = _container(file, format)
    rows = _READERS[container](file)
    first = next(rows, None)
    if first is None:
        raise TrajectoryError(f"{file} holds 0 trajectories; give one record a {_ROW[container]}")
    rows = chain([first], rows)
    kind = format if format in _FRAMEWORKS else _kind(first) if format == "auto" else container
    if kind not in _FRAMEWORKS:
        if advantages not in ("auto", "given"):
            first.refuse(f"advantages = {advantages} is for verl and trl records; these name advantages of their own")
        provenance = {"imported_from": file.name, "format": container}
        return Imported(write_bundle(out, list(native_trajectories(rows, _ROW[container])), provenance=provenance))
    return _from_rollouts(file, out, container, kind, rows, advantages)


def _from_rollouts(
    file: Path, out: Path | str, container: str, kind: str, rows: Iterable[Row], choice: Advantages
) -> Imported:
    framework = _FRAMEWORKS[kind]
    seen: set[str] = set()
    rollouts = []
    for row in rows:
        seen.update(map(str, row.values))
        rollout = framework.read(row)
        # lists of numbers take eight times what their arrays do
        rollouts.append(replace(rollout, row=replace(row, values={})))
    made: list[Trajectory] = trajectories_of(rollouts, framework.names, choice)
    are_given = choice == "given" or (choice == "auto" and rollouts[0].advantages is not None)
    rule = "given" if are_given else "normalised" if choice == "auto" else choice
    ignored = sorted(seen - framework.used)
    provenance: Mapping[str, Any] = {
        "imported_from": file.name, "format": kind, "container": container, "advantages": rule,
        "epsilon": framework.names.epsilon if rule == "normalised" else None, "ignored": ignored,
    }  # fmt: skip
    notes = []
    if ignored:
        notes.append(f"not used: {', '.join(ignored)}")
    lonely = lonely_groups(rollouts) if rule in ("normalised", "centred") else 0
    if lonely:
        notes.append(f"groups of one answer, which is compared to nothing: {lonely}; its advantage is the reward")
    return Imported(write_bundle(out, made, provenance=provenance), tuple(notes))


def _container(file: Path, format: Format) -> str:
    try:
        with file.open("rb") as opened:
            begin = opened.read(4)
    except OSError as error:
        raise TrajectoryError(f"{file} cannot be read: {error.strerror}; give a file of records") from None
    found = _MAGIC.get(begin, "jsonl")
    if format in _READERS and found != format:
        raise TrajectoryError(f"{file} wants to be {format}, got {found} (it begins {begin!r}); give {found}")
    return found


def _kind(first: Row) -> str:
    """Whose names these are."""
    if "tokens" in first.values:
        return ""
    told = [name for name, framework in _FRAMEWORKS.items() if framework.told_by in first.values]
    if told:
        return told[0]
    return first.refuse(
        "wants tokens (our names), responses (verl's) or completion_ids (TRL's), got only "
        f"{first.names}; what verl and TRL log has texts only: keep token ids and log-probs of the rollouts beside them"
    )

"""Where the input stands after a micro-batch: all a new process needs to go on with the very next one.

The planner keeps no other state (see ``packing/plan.py``), and whatever is random is a function of seed, step and
index. So a state is small: where to begin reading again, and which of what comes then is done with already.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, final

from shmstage.errors import CheckpointError, shown

#: an encoding longer than this goes into a file beside the checkpoints, well below the frame cap of a message
INLINE_NBYTES = 256 << 10
MAX_STATE_NBYTES = 256 << 20
_MAX_INTEGER = 2**53  # exact in every JSON reader
_KEYS = frozenset({"state", "pass", "place", "first_arrival", "planned_through", "done", "dropped", "empty", "seed"})
_VERSION = 1
_REMEDY = "resume from an older checkpoint, or start anew with another --out"


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where reading one pass begins again. In arrival order ``cursor`` says it all.

    ``cursor``: number of the first group to read, in the source's own order. ``serving`` and ``seen``: the batch that
    was being served just before that group came, and how many groups of it and of the next one were known then.
    ``skip``: so many groups are then admitted that were wholly trained before.
    """

    cursor: int = 0
    serving: int = 0
    seen: tuple[int, int] = (0, 0)
    skip: int = 0


@final
@dataclass(frozen=True, slots=True)
class ResumeState:
    """``place``: of the oldest group not wholly trained, in pass ``pass_number``, counted from 1.

    ``first_arrival`` is the arrival number of that group's first trajectory. ``planned_through``: trajectories with a
    smaller arrival number have been planned; up to it ``done`` holds the [begin, end) ranges that are trained or never
    will be (dropped, empty), in order. ``dropped`` and ``empty`` count the latter since the first start.
    """

    pass_number: int = 1
    place: Place = field(default_factory=Place)
    first_arrival: int = 0
    planned_through: int = 0
    done: tuple[tuple[int, int], ...] = ()
    dropped: int = 0
    empty: int = 0
    seed: int = 0

    @classmethod
    def start(cls, seed: int = 0) -> ResumeState:
        """The beginning of the input."""
        return cls(seed=seed)

    @property
    def cursor(self) -> int:
        """Number of the first group to read, in its pass."""
        return self.place.cursor

    def to_wire(self) -> dict[str, Any]:
        """Plain integers and lists; the same for JSON and msgpack."""
        place = self.place
        return {
            "state": _VERSION,
            "pass": self.pass_number,
            "place": [place.cursor, place.serving, *place.seen, place.skip],
            "first_arrival": self.first_arrival,
            "planned_through": self.planned_through,
            "done": [bound for bounds in self.done for bound in bounds],
            "dropped": self.dropped,
            "empty": self.empty,
            "seed": self.seed,
        }

    @classmethod
    def from_wire(cls, wire: object) -> ResumeState:
        """The state that ``to_wire`` wrote. Raises ``CheckpointError`` for anything else."""
        if not isinstance(wire, Mapping) or frozenset(wire) != _KEYS:
            got = sorted(str(key) for key in wire) if isinstance(wire, Mapping) else wire
            _refuse("the state", f"the keys {sorted(_KEYS)}", got)
        if wire["state"] != _VERSION:
            _refuse("the version of the state", str(_VERSION), wire["state"])
        single = ("first_arrival", "planned_through", "dropped", "empty", "seed")
        first, through, dropped, empty, seed = (_integer(name, wire[name]) for name in single)
        place = _integers("place", wire["place"])
        if len(place) != 5:
            _refuse("place", "5 integers", wire["place"])
        bounds = _integers("done", wire["done"])
        edges = [first, *bounds, through]
        # between ranges lies at least one trajectory that is not done
        inside = all(a < b for a, b in pairwise(bounds)) and edges[0] <= edges[1] and edges[-2] <= edges[-1]
        if len(bounds) % 2 or not inside:
            _refuse("done", f"rising [begin, end) pairs from first_arrival = {first} to planned_through = {through}",
                    wire["done"])  # fmt: skip
        pass_number = _integer("pass", wire["pass"])
        if pass_number < 1:
            _refuse("pass", "an integer from 1", pass_number)
        return cls(
            pass_number=pass_number, place=Place(place[0], place[1], (place[2], place[3]), place[4]),
            first_arrival=first, planned_through=through, done=tuple(zip(bounds[::2], bounds[1::2], strict=True)),
            dropped=dropped, empty=empty, seed=seed,
        )  # fmt: skip


def ranges_between(begin: int, end: int, missing: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """The [begin, end) ranges that hold every number from ``begin`` to ``end`` but ``missing``, which rises."""
    found = []
    for number in missing:
        if number > begin:
            found.append((begin, number))
        begin = number + 1
    if end > begin:
        found.append((begin, end))
    return tuple(found)


def state_to_metadata(state: ResumeState, out_dir: Path, step: int) -> dict[str, Any]:
    """What a checkpoint's metadata hold of the state, under the key ``state``.

    A state too long for a message goes durably to ``OUT/state/<step>.json``, and its sha256 stands in for it. Raises
    ``CheckpointError`` when the file cannot be written.
    """
    wire = state.to_wire()
    text = json.dumps(wire, separators=(",", ":")).encode()
    if len(text) <= INLINE_NBYTES:
        return {"state": wire}
    file = out_dir / "state" / f"{step}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace_durably(file, text)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error.strerror}; free space or use another --out") from None
    return {"state": {"file": f"state/{step}.json", "sha256": hashlib.sha256(text).hexdigest()}}


def state_from_metadata(metadata: Mapping[str, Any], out_dir: Path) -> ResumeState:
    """The state that a checkpoint was written with. Raises ``CheckpointError`` naming what is wrong."""
    if "state" not in metadata:
        raise CheckpointError(
            f"the checkpoint of step {shown(metadata.get('step'))} does not say where the input stands: it was written "
            "by a version of shmstage that could not resume exactly; start anew with another --out"
        )
    wire = metadata["state"]
    if isinstance(wire, Mapping) and frozenset(wire) == {"file", "sha256"}:
        wire = _read_state(out_dir, wire["file"], wire["sha256"])
    return ResumeState.from_wire(wire)


def _read_state(out_dir: Path, name: object, sha256: object) -> object:
    number = name.removeprefix("state/").removesuffix(".json") if isinstance(name, str) else ""
    if not (number.isascii() and number.isdigit()) or name != f"state/{number}.json":
        _refuse("the file of the state", "state/<step>.json", name)
    file = out_dir / "state" / f"{number}.json"
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            nbytes = min(os.fstat(descriptor).st_size, MAX_STATE_NBYTES)  # a buffer of the limit would be made
            text = opened.read(nbytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; {_REMEDY}") from None
    got = hashlib.sha256(text).hexdigest()
    if got != sha256:
        _refuse(f"the sha256 of {file}", repr(sha256)[:80], got)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}; {_REMEDY}") from None


def _replace_durably(file: Path, text: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    partial.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _integer(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        _refuse(name, f"an integer from 0 to {_MAX_INTEGER}", value)
    return value


def _integers(name: str, value: object) -> list[int]:
    if not isinstance(value, (list, tuple)):
        _refuse(name, "a list of integers", value)
    return [_integer(name, each) for each in value]


def _refuse(name: str, want: str, got: object) -> NoReturn:
    raise CheckpointError(f"resume: {name} wants {want}, got {shown(got, 200)}; {_REMEDY}")

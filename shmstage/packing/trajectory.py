"""One prompt and completion with its per-token arrays, checked once, when it arrives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, final

import numpy as np
import numpy.typing as npt
import xxhash

from shmstage import _native
from shmstage.errors import TrajectoryError, shown
from shmstage.packing.fields import ROUTING, TOKEN_FIELDS, WORD_FIELDS, TokenField
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.reference import Carrier

Float32 = npt.NDArray[np.float32]
_Known = TypeVar("_Known", bound=Carrier)

#: integers up to here are exact in float32
_EXACT_FLOAT32 = 1 << 24
MAX_ID_CHARACTERS = 200
MAX_INTEGER = 2**53  # exact in every JSON reader
MAX_EXPERTS = 1 << 15


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """Per-token arrays of one prompt and completion; n = `length` tokens, 0 allowed.

    * `tokens` int32 `[n]`, prompt then completion. A pad token inside it is a token like any other.
    * `loss_mask` float32 `[n]`, 0 or 1: 1 where the token trains. Holes (tool turns) are fine.
    * `advantages`, `old_logprobs` float32 `[n]`; optional `ref_logprobs`, `returns`, `old_values` float32 `[n]`.
    * optional `routing` int16 `[n or n-1, layers, top_k]`: expert ids in order of preference; distinct and below
      `experts` (0: number of experts unknown), or all -1 where a token's choice in a layer is not known. With
      n-1 rows the last token, sampled but never fed, has none.
    * `group_id` empty = a group of its own; `batch_index` and `policy_version` count from 0.

    Lists and other dtypes are taken if every value stays exact (a list of floats is rounded to float32); arrays
    that are already right are not copied, so do not write to them afterwards. The attributes are read-only views;
    while a trajectory waits its `routing` may be packed (`HeldRouting`). Raises `TrajectoryError` naming trajectory,
    field, want and got.
    """

    trajectory_id: str
    tokens: npt.NDArray[np.int32]
    loss_mask: Float32
    advantages: Float32
    old_logprobs: Float32
    ref_logprobs: Float32 | None = None
    returns: Float32 | None = None
    old_values: Float32 | None = None
    routing: npt.NDArray[np.int16] | HeldRouting | None = None
    experts: int = 0
    group_id: str = ""
    batch_index: int = 0
    policy_version: int = 0
    #: xxh3-128 over names, shapes and values of the arrays that are present; ids do not enter
    digest: bytes = field(init=False)
    #: tokens that train: `loss_mask` is 1 and a token comes before them to predict them from
    loss_tokens: int = field(init=False)
    #: names of the optional arrays that are present
    optional: frozenset[str] = field(init=False)
    #: where the arrays lie, for the fill: noted once, so that it need not ask each of them again
    record: _native.TrajectoryRecord = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_id == "":
            object.__setattr__(self, "group_id", self.trajectory_id)
        self._check_ids()
        if self.experts > MAX_EXPERTS:
            self._refuse("experts", f"an integer from 0 to {MAX_EXPERTS}: ids are int16", str(self.experts))
        if self.experts and self.routing is None:
            self._refuse("experts", "0 without routing", str(self.experts))
        hasher = xxhash.xxh3_128()
        for row in TOKEN_FIELDS:
            value = getattr(self, row.source)
            if value is None and row.optional:
                continue
            array = self._exact(row.source, value, np.dtype(row.dtype))
            if row is ROUTING:
                self._check_routing(array)
            elif array.ndim != 1 or (row.source != "tokens" and len(array) != self.length):
                want = f"shape [{self.length}], one per token" if row.source != "tokens" else "one dimension"
                self._refuse(row.source, want, f"shape {list(array.shape)}")
            object.__setattr__(self, row.source, array)
            hash_array(hasher, row, array.shape, array)
        if self.length and self.tokens.min() < 0:
            self._refuse("tokens", "ids from 0", f"{self.tokens.min()}; it would index the embedding from its end")
        neither = (self.loss_mask != 0) & (self.loss_mask != 1)
        if neither.any():
            wrong = self.loss_mask[neither][0]
            self._refuse("loss_mask", "0 or 1 for each token", f"{wrong}; weights go into advantages")
        object.__setattr__(self, "digest", hasher.digest())
        carried = (row.source for row in TOKEN_FIELDS if row.optional and getattr(self, row.source) is not None)
        object.__setattr__(self, "optional", frozenset(carried))
        object.__setattr__(self, "loss_tokens", int(np.count_nonzero(self.loss_mask[1:])))
        object.__setattr__(self, "record", self._noted())

    def renamed(self, *, trajectory_id: str, group_id: str, batch_index: int) -> Trajectory:
        """The same arrays, with the same digest, under other ids."""
        found = object.__new__(Trajectory)
        ids = {"trajectory_id": trajectory_id, "group_id": group_id, "batch_index": batch_index}
        found.__setstate__({**self.__getstate__(), **ids})
        found._check_ids()
        return found

    def with_held_routing(self, bits: int) -> Trajectory:
        """The same trajectory with its routing packed in `bits` bits an id, which all ids have been found to fit."""
        routing = self.routing
        if routing is None or (isinstance(routing, HeldRouting) and routing.bits == bits):
            return self
        held = object.__new__(Trajectory)  # everything else has been checked, the digest is of decoded values
        held.__setstate__({**self.__getstate__(), "routing": HeldRouting.of(np.asarray(routing), bits)})
        return held

    @property
    def length(self) -> int:
        """Number of tokens, prompt and completion."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are present."""
        present = (getattr(self, row.source) for row in TOKEN_FIELDS)
        return sum(array.nbytes for array in present if array is not None)

    def _noted(self) -> _native.TrajectoryRecord:
        routing: tuple[Any, int, int, int, int] | None = None
        if isinstance(self.routing, HeldRouting):
            routing = (self.routing.data, *self.routing.shape, self.routing.bits)
        elif self.routing is not None:
            routing = (self.routing, *self.routing.shape, 0)
        words = [getattr(self, row.source) for row in WORD_FIELDS]
        return _native.TrajectoryRecord(self.length, words, routing, self.loss_tokens, self.experts)

    def __getstate__(self) -> dict[str, Any]:
        # the record points into this process's memory
        return {name: getattr(self, name) for name in self.__slots__ if name != "record"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "record", self._noted())

    def _check_ids(self) -> None:
        for name in ("trajectory_id", "group_id"):
            value = getattr(self, name)
            # ids go into error lines, tables and file names of reports
            if type(value) is not str or not 0 < len(value) <= MAX_ID_CHARACTERS or not value.isprintable():
                self._refuse(name, f"1 to {MAX_ID_CHARACTERS} printable characters", shown(value, 300))
        for name in ("batch_index", "policy_version", "experts"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_INTEGER:
                self._refuse(name, f"an integer from 0 to {MAX_INTEGER}", shown(value))

    def _refuse(self, name: str, want: str, got: str) -> NoReturn:
        who = shown(self.trajectory_id, 300)
        raise TrajectoryError(f"trajectory {who}: {name} wants {want}, got {got}")

    def _exact(self, name: str, value: Any, want: np.dtype[Any]) -> npt.NDArray[Any]:
        """`value` as a C-contiguous, little-endian, read-only array of dtype `want`, every value unchanged."""
        listed = isinstance(value, (list, tuple))
        try:
            given = np.asarray(value)
        except Exception as error:  # ragged lists, and whatever a foreign __array__ raises
            self._refuse(name, f"an array of {want}", f"{type(value).__name__} ({str(error)[:200]})")
        if given.ndim == 0:
            self._refuse(name, f"an array of {want}", shown(value))
        if listed and given.size == 0:
            given = given.astype(want)
        if given.dtype.hasobject or given.dtype.names is not None or given.dtype.kind in "USMmc":
            self._refuse(name, f"dtype {want}", f"dtype {given.dtype}")
        if given.dtype != want:
            self._check_conversion(name, given, want, rounds=listed)
        with np.errstate(over="ignore"):  # seen below
            array = np.ascontiguousarray(given, dtype=want).view(np.ndarray)
        if listed and want.kind == "f" and not np.isfinite(array).all():
            self._refuse(name, "finite float32 values", f"{given[~np.isfinite(array)].flat[0]}")
        array.flags.writeable = False
        return array

    def _check_conversion(self, name: str, given: npt.NDArray[Any], want: np.dtype[Any], *, rounds: bool) -> None:
        if given.dtype.kind in "iub":
            if want.kind == "f":
                low, high = -_EXACT_FLOAT32, _EXACT_FLOAT32
            else:
                low, high = int(np.iinfo(want).min), int(np.iinfo(want).max)
            if given.size and not (low <= int(given.min()) and int(given.max()) <= high):
                self._refuse(name, f"values from {low} to {high} ({want})", f"{given.min()} to {given.max()}")
        elif want.kind != "f" or not (rounds or np.can_cast(given.dtype, want, "safe")):
            self._refuse(name, f"dtype {want}", f"dtype {given.dtype}; convert it with .astype({str(want)!r})")

    def _check_routing(self, routing: npt.NDArray[Any]) -> None:
        if routing.ndim != 3 or 0 in routing.shape[1:] or routing.shape[0] not in (self.length, self.length - 1):
            rows = f"{self.length} or {max(self.length - 1, 0)}"
            self._refuse("routing", f"shape [{rows}, layers, top_k]", f"shape {list(routing.shape)}")
        _, layers, top_k = routing.shape
        limit = self.experts or int(np.iinfo(np.int16).max) + 1
        wrong = _native.routing_fault(routing, top_k, limit)
        if wrong >= 0:
            token, layer = divmod(wrong, layers)
            want = f"distinct expert ids from 0 to {limit - 1}, or only -1, in each [token, layer]"
            self._refuse("routing", want, f"{shown(routing[token, layer].tolist(), 200)} at [{token}, {layer}]")


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt, all of one batch."""

    group_id: str
    batch_index: int
    trajectories: tuple[Trajectory, ...]


def hash_array(hasher: xxhash.xxh3_128, row: TokenField, shape: tuple[int, ...], array: npt.NDArray[Any]) -> None:
    """One field of a trajectory's digest, of `array`'s bytes."""
    hasher.update(f"{row.source} {row.dtype} {shape};".encode())
    hasher.update(array.data)


def check_same_fields(trajectories: Iterable[_Known]) -> _Known | None:
    """All carry the same optional fields, routing of one shape and experts; returns the first of them.

    Raises `TrajectoryError` naming both trajectories otherwise.
    """
    first: _Known | None = None
    for trajectory in trajectories:
        if first is None:
            first = trajectory
            continue
        if trajectory.optional != first.optional:
            name = min(first.optional ^ trajectory.optional)
            has, lacks = (first, trajectory) if name in first.optional else (trajectory, first)
            raise TrajectoryError(
                f"trajectory {has.trajectory_id!r} has {name} and trajectory {lacks.trajectory_id!r} has not; "
                "give an optional field to all of them or to none"
            )
        if first.routing is not None and trajectory.routing is not None:
            want = (*first.routing.shape[1:], first.experts)
            got = (*trajectory.routing.shape[1:], trajectory.experts)
            if want != got:
                raise TrajectoryError(
                    f"trajectory {trajectory.trajectory_id!r}: routing wants [layers, top_k], experts = {want} "
                    f"as in trajectory {first.trajectory_id!r}, got {got}"
                )
    return first

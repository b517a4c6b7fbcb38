"""Spans of trajectories on their way from a store to a host: a head, then their arrays from where they are held.

| part       | bytes           | what                                                                              |
|------------|-----------------|-----------------------------------------------------------------------------------|
| head       | 0 to 64         | magic, version, size of an entry, count, bytes of all parts, xxh3-64 of these     |
|            | 128 for a piece | entry: xxh3-128 of its other bytes, its id and its arrays; what `_Entry` names    |
|            | then            | the ids, a 0 after each                                                           |
| each array | its own         | piece by piece those that are present, in the order of the table in `fields.py`   |

Nothing is copied here: whoever sends gathers the parts. Each byte is under one of the hashes, and how many arrays of
which sizes a piece has follows from its entry.

Routing is dense, or packed in whole groups of 8 tokens (`HeldRouting`): a piece that begins inside a group has all of
that group, ids and then validity, and its record says how many tokens of it are not meant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import xxhash

from shmstage import _native
from shmstage.errors import ProtocolError, TrajectoryError, shown
from shmstage.packing.fields import ROUTING, WORD_FIELDS, TokenField
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.reference import RoutingShape
from shmstage.packing.routing import GROUP
from shmstage.packing.trajectory import MAX_EXPERTS, MAX_ID_CHARACTERS, Trajectory, hash_array

Bytes = npt.NDArray[np.uint8]

_MAGIC, _VERSION = b"shmPIECE", 2
_HEADER = struct.Struct("<8sIIQQ24x")  # then 8 bytes of hash
_HEADER_NBYTES = 64
_HASH_NBYTES = 16
_ENTRY = struct.Struct("<16sQQQQQQIII36x")  # after 16 bytes of hash
_ENTRY_NBYTES = _HASH_NBYTES + _ENTRY.size
_WORD_NBYTES = 4
_MANDATORY = sum(1 << number for number, row in enumerate(WORD_FIELDS) if not row.optional)
#: of optional fields; routing is told by its shape
_BITS = {row.source: 1 << number for number, row in enumerate(WORD_FIELDS)} | {ROUTING.source: 0}
_MAX_TOKENS = (1 << 31) - 1
_MAX_BITS = 15


class _Entry(NamedTuple):
    """`length` and `routed` (tokens with routing) are of the whole trajectory; `bits` 0: routing is dense."""

    digest: bytes
    length: int
    begin: int
    end: int
    routed: int
    layers: int
    top_k: int
    experts: int
    present: int  # bit i: field i of WORD_FIELDS
    bits: int

    @property
    def routed_here(self) -> int:
        """Tokens of the span that have routing."""
        return max(min(self.end, self.routed) - self.begin, 0)

    @property
    def groups(self) -> tuple[int, int]:
        """First and last of the groups that the span's packed routing lies in."""
        first, routed = self.begin // GROUP, self.routed_here
        return first, -(-(self.begin + routed) // GROUP) if routed else first

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array."""
        found = [(self.end - self.begin) * _WORD_NBYTES] * self.present.bit_count()
        if self.layers and self.bits:
            first, last = self.groups
            found.append((last - first) * self.layers * (self.top_k * self.bits + 1))
        elif self.layers:
            found.append(self.routed_here * self.layers * self.top_k * 2)
        return found


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens `begin` to `end` of a trajectory, in the memory it came in.

    `digest`, `length` and `routing` are of the whole trajectory, `nbytes` of the arrays that are here.
    """

    trajectory_id: str
    #: where they lie, for the fill; holds them
    record: _native.TrajectoryRecord
    _entry: _Entry
    _arrays: list[Bytes]

    @property
    def digest(self) -> bytes:
        return self._entry.digest

    @property
    def length(self) -> int:
        return self._entry.length

    @property
    def begin(self) -> int:
        return self._entry.begin

    @property
    def end(self) -> int:
        return self._entry.end

    @property
    def experts(self) -> int:
        return self._entry.experts

    @property
    def optional(self) -> frozenset[str]:
        return frozenset(row.source for row in _rows(self._entry) if row.optional)

    @property
    def routing(self) -> RoutingShape | None:
        entry = self._entry
        return RoutingShape((entry.routed, entry.layers, entry.top_k)) if entry.layers else None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._arrays))


def hash_of_whole(trajectory: Trajectory) -> bytes:
    """What its entry begins with if all of it is sent: made ahead, sending needs not read it once more."""
    entry = _entry(trajectory, 0, trajectory.length)
    return _hash(_ENTRY.pack(*entry), _name(trajectory), _arrays_of(trajectory, entry))


def encode_pieces(
    trajectories: Sequence[Trajectory], spans: Iterable[Sequence[int]], hashes: Sequence[bytes] = ()
) -> list[Bytes]:
    """Tokens [begin, end) of each trajectory, one span for each: the parts, uint8 `[nbytes]` each.

    The arrays are views of what the trajectories hold; of packed routing that is cut they are copies. `hashes`: what
    `hash_of_whole` made of each. Raises ``TrajectoryError`` for a span that is not within its trajectory.
    """
    entries = [_entry(one, begin, end) for one, (begin, end) in zip(trajectories, spans, strict=True)]
    names = [_name(one) for one in trajectories]
    arrays: list[Bytes] = []
    told = []
    for number, (trajectory, entry, name) in enumerate(zip(trajectories, entries, names, strict=True)):
        own = _arrays_of(trajectory, entry)
        assert [len(array) for array in own] == entry.sizes, "a piece's array is not as large as its entry says"
        packed = _ENTRY.pack(*entry)
        is_known = hashes and (entry.begin, entry.end) == (0, entry.length)
        told.append((hashes[number] if is_known else _hash(packed, name, own)) + packed)
        arrays += own
    head_nbytes = _HEADER_NBYTES + _ENTRY_NBYTES * len(entries) + sum(map(len, names))
    nbytes = head_nbytes + sum(map(len, arrays))
    header = _HEADER.pack(_MAGIC, _VERSION, _ENTRY_NBYTES, len(entries), nbytes)
    head = b"".join([header, xxhash.xxh3_64_digest(header), *told, *names])
    return [np.frombuffer(head, np.uint8), *arrays]


def decode_pieces(parts: Sequence[Bytes]) -> list[Piece]:
    """What `encode_pieces` made, in its order; nothing is copied, the parts live as long as their piece.

    Raises ``ProtocolError`` if a byte is not as it was written, naming the trajectory.
    """
    for part in parts:
        if part.dtype != np.uint8 or part.ndim != 1 or not part.flags.c_contiguous:
            raise ProtocolError(f"pieces come as uint8 [nbytes]; got {part.dtype}{list(part.shape)}")
    if not parts:
        raise ProtocolError("pieces begin with a head; got nothing")
    head, arrays = parts[0].tobytes(), iter(parts[1:])
    count = _count(head, sum(map(len, parts)))
    names = head[_HEADER_NBYTES + count * _ENTRY_NBYTES :].split(b"\0")
    if len(names) != count + 1 or names[-1]:
        raise ProtocolError(f"{count} pieces with {len(names) - 1} ids: the head was damaged on its way")
    pieces = [_piece(head, number, count, name, arrays) for number, name in enumerate(names[:-1])]
    if left := sum(1 for _ in arrays):
        raise ProtocolError(f"{count} pieces came with {left} arrays too many")
    return pieces


def verify_whole(piece: Piece) -> bool:
    """Whether the piece is a whole trajectory; then its digest is made again, of the decoded values.

    Raises ``ProtocolError`` if that is another than the piece came with.
    """
    if (piece.begin, piece.end) != (0, piece.length):
        return False
    hasher = xxhash.xxh3_128()
    for row, found in zip(_rows(piece._entry), piece._arrays, strict=True):
        if row is not ROUTING:
            hash_array(hasher, row, (piece.length,), found)
            continue
        assert piece.routing is not None
        dense: npt.NDArray[Any] = found
        if piece._entry.bits:
            dense = np.empty(piece.routing.shape, np.int16)
            _native.unpack_routing(dense, found, *piece.routing.shape[1:], piece._entry.bits)
        hash_array(hasher, row, piece.routing.shape, dense)
    if hasher.digest() != piece.digest:
        raise ProtocolError(
            f"trajectory {piece.trajectory_id!r}: what came has digest {hasher.hexdigest()}, its store says "
            f"{piece.digest.hex()}"
        )
    return True


def _rows(entry: _Entry) -> list[TokenField]:
    """The fields that are here, in order."""
    words = [row for number, row in enumerate(WORD_FIELDS) if entry.present >> number & 1]
    return [*words, ROUTING] if entry.layers else words


def _name(trajectory: Trajectory) -> bytes:
    return trajectory.trajectory_id.encode() + b"\0"


def _hash(packed: bytes, name: bytes, arrays: Iterable[Bytes]) -> bytes:
    hasher = xxhash.xxh3_128(packed + name)
    for array in arrays:
        hasher.update(array.data)
    return hasher.digest()


def _entry(trajectory: Trajectory, begin: int, end: int) -> _Entry:
    begin, end = int(begin), int(end)
    if not 0 <= begin <= end <= trajectory.length:
        raise TrajectoryError(
            f"trajectory {trajectory.trajectory_id!r}: tokens {begin} to {end} of {trajectory.length} were asked for"
        )
    present = _MANDATORY
    for name in trajectory.optional:
        present |= _BITS[name]
    routing = trajectory.routing
    routed, layers, top_k = (0, 0, 0) if routing is None else routing.shape
    bits = routing.bits if isinstance(routing, HeldRouting) else 0
    return _Entry(
        trajectory.digest, trajectory.length, begin, end, routed, layers, top_k, trajectory.experts, present, bits
    )


def _arrays_of(trajectory: Trajectory, entry: _Entry) -> list[Bytes]:
    """The bytes of the span in every array that is present."""
    found = [
        getattr(trajectory, row.source)[entry.begin : entry.end].view(np.uint8)
        for number, row in enumerate(WORD_FIELDS)
        if entry.present >> number & 1
    ]
    routing = trajectory.routing
    if isinstance(routing, HeldRouting):
        data = np.frombuffer(routing.data, np.uint8)
        (first, last), groups = entry.groups, -(-entry.routed // GROUP)
        if (first, last) != (0, groups):  # cut, ids and validity lie apart
            each = entry.layers * entry.top_k * entry.bits
            validity = data[groups * each :]
            cut = data[first * each : last * each], validity[first * entry.layers : last * entry.layers]
            data = np.concatenate(cut)
        found.append(data)
    elif routing is not None:
        found.append(routing[entry.begin : entry.begin + entry.routed_here].reshape(-1).view(np.uint8))
    return found


def _count(head: bytes, came_nbytes: int) -> int:
    if len(head) < _HEADER_NBYTES:
        raise ProtocolError(f"pieces begin with {_HEADER_NBYTES} bytes; got {len(head)}")
    header = head[: _HEADER.size]
    magic, version, entry_nbytes, count, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError(f"no pieces: the head of {len(head)} bytes begins with {magic!r}")
    if xxhash.xxh3_64_digest(header) != head[_HEADER.size : _HEADER_NBYTES]:
        raise ProtocolError(f"the head of {came_nbytes} bytes of pieces was damaged on its way")
    if (version, entry_nbytes) != (_VERSION, _ENTRY_NBYTES):
        raise ProtocolError(f"pieces of version {version}, this is version {_VERSION}; run one version on all hosts")
    if nbytes != came_nbytes or count > (len(head) - _HEADER_NBYTES) // _ENTRY_NBYTES:
        raise ProtocolError(f"{count} pieces in {nbytes} bytes were sent, {came_nbytes} bytes came")
    return int(count)


def _piece(head: bytes, number: int, count: int, name: bytes, arrays: Iterator[Bytes]) -> Piece:
    """The next piece, of the next arrays."""
    begin = _HEADER_NBYTES + number * _ENTRY_NBYTES
    told, packed = head[begin : begin + _HASH_NBYTES], head[begin + _HASH_NBYTES : begin + _ENTRY_NBYTES]
    try:
        entry = _Entry._make(_ENTRY.unpack(packed))
        if not entry.begin <= entry.end <= entry.length <= _MAX_TOKENS or entry.bits > _MAX_BITS:
            raise ValueError("its entry was damaged on its way")
        sizes = entry.sizes
        own = list(islice(arrays, len(sizes)))
        if [len(array) for array in own] != sizes:
            raise ValueError(f"arrays of {sizes} bytes were sent, of {[len(array) for array in own]} bytes came")
        if _hash(packed, name + b"\0", own) != told:
            raise ValueError("its bytes were damaged on their way")
        _check(entry)
        return _made(entry, name.decode(), own)
    except (ValueError, TypeError, OverflowError) as error:  # native code's and the name's too
        who = shown(name.decode(errors="replace"), MAX_ID_CHARACTERS)
        raise ProtocolError(f"piece {number} of {count}, trajectory {who}: {error}") from None


def _check(entry: _Entry) -> None:
    """What an honest sender never gets wrong. Raises ``ValueError``."""
    known = (1 << len(WORD_FIELDS)) - 1
    if entry.present & ~known or entry.present & _MANDATORY != _MANDATORY:
        raise ValueError(f"fields {entry.present:#x}, of which {_MANDATORY:#x} are mandatory")
    if entry.layers and entry.top_k:
        fits = entry.routed in (entry.length, entry.length - 1) and entry.experts <= MAX_EXPERTS
    else:
        fits = not (entry.layers or entry.top_k or entry.routed or entry.experts or entry.bits)
    if not fits:
        shape = [entry.routed, entry.layers, entry.top_k]
        raise ValueError(f"routing of shape {shape}, experts = {entry.experts}, for {entry.length} tokens")


def _made(entry: _Entry, name: str, arrays: list[Bytes]) -> Piece:
    here = iter(arrays)
    words = [next(here) if entry.present >> number & 1 else None for number in range(len(WORD_FIELDS))]
    routing = (next(here), entry.routed_here, entry.layers, entry.top_k, entry.bits) if entry.layers else None
    record = _native.TrajectoryRecord(
        entry.end - entry.begin, words, routing, experts=entry.experts, begin=entry.begin
    )
    return Piece(name, record, entry, arrays)

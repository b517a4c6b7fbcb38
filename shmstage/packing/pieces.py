"""Spans of trajectories on their way from a store to a host: one buffer, as they are held, nothing pickled.

| bytes                   | what                                                                                    |
|-------------------------|-----------------------------------------------------------------------------------------|
| 0 to 64                 | magic, version, size of an entry, count of pieces, size of the buffer, xxh3-64 of these |
| 128 for a piece         | entry: xxh3-128 of its other bytes and its block; what `_Entry` names                   |
| then a block for each   | the id and a 0; the arrays that are present, in the order of the table in `fields.py`   |

Everything begins at a multiple of 64 and is filled up with zeros to the next. Each byte is under one of the hashes, and
where a block and its arrays lie follows from the entries: no number in them is used as an offset.

Routing is dense, or packed in whole groups of 8 tokens (`HeldRouting`): a piece that begins inside a group has all of
that group, ids and then validity, and its record says how many tokens of it are not meant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

_MAGIC, _VERSION = b"shmPIECE", 1
_HEADER = struct.Struct("<8sIIQQ24x")  # then 8 bytes of hash
_HEADER_NBYTES = 64
_HASH_NBYTES = 16
_ENTRY = struct.Struct("<16sQQQQQQIII36x")  # after 16 bytes of hash
_ENTRY_NBYTES = _HASH_NBYTES + _ENTRY.size
_LINE = 64
_WORD_NBYTES = 4
_MANDATORY = sum(1 << number for number, row in enumerate(WORD_FIELDS) if not row.optional)
#: of optional fields; routing is told by its shape
_BITS = {row.source: 1 << number for number, row in enumerate(WORD_FIELDS)} | {ROUTING.source: 0}
_MAX_TOKENS = (1 << 31) - 1
_MAX_BITS = 15
_MAX_NAME_NBYTES = 4 * MAX_ID_CHARACTERS


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

    def places(self, at: int, name_nbytes: int) -> tuple[list[tuple[int, int]], int]:
        """Begin and end of every array of a block that begins at `at`, and where the block ends."""
        at = _line(at + name_nbytes + 1)
        found = []
        nbytes = (self.end - self.begin) * _WORD_NBYTES
        for _ in range(self.present.bit_count()):
            found.append((at, at + nbytes))
            at = _line(at + nbytes)
        if self.layers:
            if self.bits:
                first, last = self.groups
                nbytes = (last - first) * self.layers * (self.top_k * self.bits + 1)
            else:
                nbytes = self.routed_here * self.layers * self.top_k * 2
            found.append((at, at + nbytes))
            at = _line(at + nbytes)
        return found, at


@final
@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens `begin` to `end` of a trajectory, in memory that belongs to the buffer it came in.

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


def encoded_nbytes(trajectories: Sequence[Trajectory], spans: Iterable[Sequence[int]]) -> int:
    """Size of the buffer that `encode_pieces` makes of the same."""
    at = _HEADER_NBYTES + _ENTRY_NBYTES * len(trajectories)
    for trajectory, (begin, end) in zip(trajectories, spans, strict=True):
        at = _entry(trajectory, begin, end).places(at, len(trajectory.trajectory_id.encode()))[1]
    return at


def encode_pieces(trajectories: Sequence[Trajectory], spans: Iterable[Sequence[int]]) -> Bytes:
    """Tokens [begin, end) of each trajectory, one span for each: uint8 `[nbytes]`, 64-byte aligned.

    Every array is copied once. Raises ``TrajectoryError`` for a span that is not within its trajectory.
    """
    entries = [_entry(one, begin, end) for one, (begin, end) in zip(trajectories, spans, strict=True)]
    names = [one.trajectory_id.encode() for one in trajectories]
    blocks = []
    at = _HEADER_NBYTES + _ENTRY_NBYTES * len(entries)
    for entry, name in zip(entries, names, strict=True):
        places, end = entry.places(at, len(name))
        blocks.append((at, end, places))
        at = end
    out = _aligned_zeros(at)
    header = _HEADER.pack(_MAGIC, _VERSION, _ENTRY_NBYTES, len(entries), at)
    out[:_HEADER_NBYTES] = np.frombuffer(header + xxhash.xxh3_64_digest(header), np.uint8)
    for number, (trajectory, entry, name, block) in enumerate(zip(trajectories, entries, names, blocks, strict=True)):
        begin, end, places = block
        out[begin : begin + len(name)] = np.frombuffer(name, np.uint8)
        for (offset, last), parts in zip(places, _arrays_of(trajectory, entry), strict=True):
            for part in parts:
                out[offset : offset + len(part)] = part
                offset += len(part)
            assert offset == last, "a piece's array is not as large as its entry says"
        packed = _ENTRY.pack(*entry)
        at = _HEADER_NBYTES + number * _ENTRY_NBYTES
        out[at : at + _ENTRY_NBYTES] = np.frombuffer(_hash(packed, out[begin:end]) + packed, np.uint8)
    return out


def decode_pieces(buffer: Any) -> list[Piece]:
    """What `encode_pieces` made, in its order; nothing is copied, `buffer` lives as long as a piece.

    Raises ``ProtocolError`` if a byte is not as it was written, naming the trajectory.
    """
    whole = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if whole.dtype != np.uint8 or whole.ndim != 1 or not whole.flags.c_contiguous:
        raise ProtocolError(f"pieces come as uint8 [nbytes]; got {whole.dtype}{list(whole.shape)}")
    count = _count(whole)
    pieces = []
    at = _HEADER_NBYTES + count * _ENTRY_NBYTES
    for number in range(count):
        piece, at = _piece(whole, number, count, at)
        pieces.append(piece)
    if at != len(whole):
        raise ProtocolError(f"{count} pieces of {at} bytes in a buffer of {len(whole)}")
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


def _line(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


def _aligned_zeros(nbytes: int) -> Bytes:
    # fresh pages are zeros anyway
    room = np.zeros(nbytes + _LINE, np.uint8)
    skipped = -room.ctypes.data % _LINE
    return room[skipped : skipped + nbytes]


def _hash(packed: bytes, block: Bytes) -> bytes:
    hasher = xxhash.xxh3_128(packed)
    hasher.update(block.data)
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


def _arrays_of(trajectory: Trajectory, entry: _Entry) -> Iterator[tuple[Bytes, ...]]:
    """The bytes of the span in every array that is present; packed routing lies in two places."""
    for number, row in enumerate(WORD_FIELDS):
        if entry.present >> number & 1:
            yield (getattr(trajectory, row.source)[entry.begin : entry.end].view(np.uint8),)
    routing = trajectory.routing
    if isinstance(routing, HeldRouting):
        data = np.frombuffer(routing.data, np.uint8)
        first, last = entry.groups
        each = entry.layers * entry.top_k * entry.bits
        validity = data[-(-entry.routed // GROUP) * each :]
        yield data[first * each : last * each], validity[first * entry.layers : last * entry.layers]
    elif routing is not None:
        yield (routing[entry.begin : entry.begin + entry.routed_here].reshape(-1).view(np.uint8),)


def _count(whole: Bytes) -> int:
    if len(whole) < _HEADER_NBYTES:
        raise ProtocolError(f"pieces begin with {_HEADER_NBYTES} bytes; got {len(whole)}")
    header = whole[: _HEADER.size].tobytes()
    magic, version, entry_nbytes, count, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ProtocolError(f"no pieces: the buffer of {len(whole)} bytes begins with {magic!r}")
    if xxhash.xxh3_64_digest(header) != whole[_HEADER.size : _HEADER_NBYTES].tobytes():
        raise ProtocolError(f"the head of a buffer of {len(whole)} bytes of pieces was damaged on its way")
    if (version, entry_nbytes) != (_VERSION, _ENTRY_NBYTES):
        raise ProtocolError(f"pieces of version {version}, this is version {_VERSION}; run one version on all hosts")
    if nbytes != len(whole) or count > (len(whole) - _HEADER_NBYTES) // _ENTRY_NBYTES:
        raise ProtocolError(f"{count} pieces in {nbytes} bytes were sent, {len(whole)} bytes came")
    return int(count)


def _piece(whole: Bytes, number: int, count: int, at: int) -> tuple[Piece, int]:
    """The piece whose block begins at `at`, and where that ends."""
    # up to a 0, whatever the entry says: it has a name for what is wrong with it
    name, ended, _ = whole[at : at + _MAX_NAME_NBYTES + 1].tobytes().partition(b"\0")
    begin = _HEADER_NBYTES + number * _ENTRY_NBYTES
    head = whole[begin : begin + _ENTRY_NBYTES].tobytes()
    try:
        if not ended:
            raise ValueError("its id was damaged on its way")
        entry = _Entry._make(_ENTRY.unpack_from(head, _HASH_NBYTES))
        if not entry.begin <= entry.end <= entry.length <= _MAX_TOKENS or entry.bits > _MAX_BITS:
            raise ValueError("its entry was damaged on its way")
        places, end = entry.places(at, len(name))
        if end > len(whole):
            raise ValueError(f"{end - at} bytes from byte {at} on, in a buffer of {len(whole)}")
        if _hash(head[_HASH_NBYTES:], whole[at:end]) != head[:_HASH_NBYTES]:
            raise ValueError("its bytes were damaged on their way")
        _check(entry)
        return _made(whole, entry, name.decode(), places), end
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


def _made(whole: Bytes, entry: _Entry, name: str, places: list[tuple[int, int]]) -> Piece:
    arrays = [whole[begin:end] for begin, end in places]
    here = iter(arrays)
    words = [next(here) if entry.present >> number & 1 else None for number in range(len(WORD_FIELDS))]
    routing = (next(here), entry.routed_here, entry.layers, entry.top_k, entry.bits) if entry.layers else None
    record = _native.TrajectoryRecord(
        entry.end - entry.begin, words, routing, experts=entry.experts, begin=entry.begin
    )
    return Piece(name, record, entry, arrays)

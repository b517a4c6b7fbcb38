"""One file of a journal: records end to end, each with its number, length and hashes in front.

| byte | what                                                           |
|------|----------------------------------------------------------------|
| 0    | `MAGIC`                                                        |
| 8    | number of the group, little-endian uint64                      |
| 16   | bytes of the body, uint64                                      |
| 24   | xxh3-128 of the body                                           |
| 40   | xxh3-64 of bytes 0 to 40                                       |
| 48   | the body                                                       |

A record is synced before the next one is begun, so a kill can tear the last one only. That is how a torn tail, which is
dropped, is told from damage, which is an error.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import xxhash

from shmstage.errors import BundleError
from shmstage.packing.group_record import REMEDY
from shmstage.packing.room import check_room

MAGIC = b"shmjrn1\n"
_FRONT = struct.Struct("<8sQQ16s")
_CHECK = struct.Struct("<Q")
HEADER_NBYTES = _FRONT.size + _CHECK.size
_LOOK_NBYTES = 1 << 20
_READ_NBYTES = 1 << 26


@final
@dataclass(frozen=True, slots=True)
class Record:
    """Where the body of group ``number`` lies in its file, and what it hashes to."""

    number: int
    begin: int
    nbytes: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def frame(number: int, pieces: Sequence[bytes]) -> bytes:
    """What stands in front of a body made of ``pieces``."""
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    front = _FRONT.pack(MAGIC, number, sum(len(piece) for piece in pieces), hasher.digest())
    return front + _CHECK.pack(xxhash.xxh3_64_intdigest(front))


def scan(descriptor: int, file: Path, first: int, *, may_be_torn: bool) -> Iterator[Record]:
    """The whole records of a segment that begins with number ``first``, in order.

    Bodies are not read, but for the last one of a file that ``may_be_torn``. Raises ``BundleError`` for damage.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{file} is not a regular file; {REMEDY}")
    size = status.st_size
    position, number = 0, first
    while position < size:
        record = _record_at(descriptor, position, size, number)
        at_end = record is None or record.end == size
        if may_be_torn and at_end and (record is None or not _is_whole(descriptor, record)):
            if not _holds_later_record(descriptor, position, size, number):
                return
            record = None
        if record is None:
            raise BundleError(f"{file} is damaged at byte {position} of {size}, group {number}; {REMEDY}")
        yield record
        position, number = record.end, number + 1


def read_body(descriptor: int, record: Record, file: Path) -> bytes:
    """Raises ``BundleError`` if it is not what was written, ``BudgetError`` if there is no room for it."""
    if record.nbytes > _READ_NBYTES:
        check_room(record.nbytes, f"group {record.number} of {file}", "free memory")
    body = b"".join(_pieces(descriptor, record))
    if xxhash.xxh3_128_digest(body) != record.digest:
        raise BundleError(f"{file}: group {record.number} at byte {record.begin} was altered or damaged; {REMEDY}")
    return body


def _pieces(descriptor: int, record: Record) -> Iterator[bytes]:
    for begin in range(record.begin, record.end, _READ_NBYTES):
        yield os.pread(descriptor, min(_READ_NBYTES, record.end - begin), begin)


def _record_at(descriptor: int, position: int, size: int, number: int) -> Record | None:
    header = os.pread(descriptor, HEADER_NBYTES, position)
    record = _parse(header, position)
    # subtracted, not added: a length read from a file may be anything
    if record is None or record.number != number or record.nbytes > size - record.begin:
        return None
    return record


def _parse(header: bytes, position: int) -> Record | None:
    if len(header) < HEADER_NBYTES or not header.startswith(MAGIC):
        return None
    (check,) = _CHECK.unpack_from(header, _FRONT.size)
    if check != xxhash.xxh3_64_intdigest(header[: _FRONT.size]):
        return None
    _, number, nbytes, digest = _FRONT.unpack_from(header)
    return Record(number, position + HEADER_NBYTES, nbytes, digest)


def _is_whole(descriptor: int, record: Record) -> bool:
    hasher = xxhash.xxh3_128()
    for piece in _pieces(descriptor, record):
        hasher.update(piece)
    return hasher.digest() == record.digest


def _holds_later_record(descriptor: int, position: int, size: int, number: int) -> bool:
    """Whether a record with a higher number begins behind ``position``: then what lies there was synced once."""
    position += 1
    while position < size:
        piece = os.pread(descriptor, _LOOK_NBYTES + HEADER_NBYTES, position)
        found = piece.find(MAGIC)
        while 0 <= found < _LOOK_NBYTES:
            record = _parse(piece[found : found + HEADER_NBYTES], position + found)
            if record is not None and record.number > number:
                return True
            found = piece.find(MAGIC, found + 1)
        position += _LOOK_NBYTES
    return False

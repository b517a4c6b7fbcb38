"""Where things lie in a pool file, and mapping it."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmstage import _native
from shmstage.errors import PoolError
from shmstage.memory.failures import cannot
from shmstage.memory.layout import PAGE_NBYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things lie in a pool file. All sizes in bytes, from the file's first byte.

    ``payload_shift`` (tests only, 0 or 4) puts every payload that many bytes behind a page's start: it stands in
    for hosts whose buffers are not 64-byte aligned.
    """

    slot_count: int
    slot_nbytes: int
    payload_shift: int = 0

    @property
    def payload_offset(self) -> int:
        """The first payload page; the bytes before it are headers."""
        headers = _native.POOL_HEADER_NBYTES + self.slot_count * _native.SLOT_HEADER_NBYTES
        return -(-headers // PAGE_NBYTES) * PAGE_NBYTES

    @property
    def slot_stride(self) -> int:
        """From one payload to the next."""
        return self.slot_nbytes + (PAGE_NBYTES if self.payload_shift else 0)

    @property
    def pool_nbytes(self) -> int:
        """The whole file."""
        return self.payload_offset + self.slot_count * self.slot_stride

    def payload_of(self, slot: int) -> int:
        """Where slot's first payload byte lies."""
        return self.payload_offset + self.payload_shift + slot * self.slot_stride


class Mapping:
    """One mmap and a byte array over it. Arrays made over ``array`` keep the memory mapped."""

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool, offset: int = 0) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self.mmap = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection, offset=offset)
        except OSError as error:
            raise cannot(f"cannot map {nbytes} bytes of a pool", error) from None
        except (ValueError, OverflowError) as error:
            raise PoolError(f"cannot map {nbytes} bytes of a pool: {error}") from None
        self.array: Bytes | None = np.frombuffer(self.mmap, np.uint8)
        self._end = offset + nbytes

    def check_backed(self, name: str) -> None:
        """Raises ``PoolError`` if somebody has shrunk the file since: touching the lost part would be SIGBUS."""
        if not self.is_backed():
            nbytes = self.mmap.size()
            raise PoolError(
                f"pool {name} was shrunk to {nbytes} bytes under its users, who map {self._end}; what lay in it is "
                "lost: find out who truncates files in /dev/shm, and start again"
            )

    def is_backed(self) -> bool:
        """Whether the file is still as long as what is mapped of it."""
        return self.mmap.size() >= self._end

    def close(self) -> bool:
        """Unmaps unless arrays still use the memory; then it stays until the last of them is gone."""
        self.array = None
        try:
            self.mmap.close()
        except BufferError:
            return False
        return True

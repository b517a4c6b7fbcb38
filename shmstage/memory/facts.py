"""What the header page of a pool file says, read without trusting it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from shmstage import _native
from shmstage.errors import PoolError
from shmstage.memory.layout import PAGE_NBYTES
from shmstage.memory.mapping import Geometry
from shmstage.memory.names import SHM_DIR, is_ours
from shmstage.memory.objects import why_foreign

#: what ``Headers.counters`` counts since a pool's creation, in its order
COUNTERS = ("published", "ended_leases", "withdrawn", "abandoned", "waits", "waited_ns")


def read_facts(descriptor: int) -> dict[str, Any] | None:
    """The header of a pool file without mapping it, or ``None`` if the file is too short to have one."""
    page = bytearray(os.pread(descriptor, _native.POOL_HEADER_NBYTES, 0))
    if len(page) < _native.POOL_HEADER_NBYTES:
        return None
    return _native.Headers(page, 0, 0, 0).describe()


def unended_leases(generation: int, mask: int, ended: Sequence[int]) -> dict[int, int]:
    """Consumers whose lease of what is published in a slot has not ended → the last generation they ended.

    ``generation`` (odd: being written, nobody's), ``mask`` of those it is published to and ``ended`` are of the slot's
    header.
    """
    if generation % 2:
        return {}
    return {consumer: done for consumer, done in enumerate(ended) if mask >> consumer & 1 and done < generation}


def checked_facts(name: str, descriptor: int, run_id: str, epoch: int) -> dict[str, Any]:
    """What the header says, once it is proven consistent with the size the kernel reports."""
    status = os.fstat(descriptor)
    if reason := why_foreign(status):
        raise PoolError(f"{name} is not a regular file of this user: {reason}")
    facts = read_facts(descriptor)
    if facts is None or not facts["magic"]:
        raise PoolError(f"{name} is not a pool, or not yet one")
    if facts["abi_version"] != _native.ABI_VERSION:
        raise PoolError(f"{name} has layout version {facts['abi_version']}; this is {_native.ABI_VERSION}")
    if not facts["ready"]:
        raise PoolError(f"{name} is half made: its owner has not finished, or died while making it")
    if facts["run_id"] != run_id.encode(errors="surrogatepass"):
        raise PoolError(f"{name} belongs to run {facts['run_id'].decode(errors='replace')!r}, not {run_id!r}")
    if facts["epoch"] != epoch:
        raise PoolError(f"{name} is of epoch {facts['epoch']}, not {epoch}")
    facts["nbytes"] = status.st_size
    facts["lock_path"] = facts["lock_path"].decode(errors="replace")
    lock_dir, lock_name = os.path.split(facts["lock_path"])
    slots, stride, consumers = facts["slot_count"], facts["slot_stride"], facts["consumer_count"]
    shift = facts["payload_shift"]
    expected = Geometry(slots, stride - (PAGE_NBYTES if shift else 0), shift)
    if (
        not 0 < consumers <= _native.MAX_CONSUMERS
        or not 0 < slots <= status.st_size // _native.SLOT_HEADER_NBYTES
        or not 0 <= facts["aux_slot_count"] < slots
        or shift not in (0, 4)
        or stride % PAGE_NBYTES
        or expected.slot_nbytes < PAGE_NBYTES
        or expected.payload_offset != facts["payload_offset"]
        or not expected.pool_nbytes == facts["pool_nbytes"] == status.st_size
        or lock_dir != SHM_DIR
        or not is_ours(lock_name)
    ):
        raise PoolError(f"the header of {name} contradicts its size of {status.st_size} bytes")
    # mapping it would make the missing pages: a few bytes could claim all of memory
    if status.st_blocks * 512 < status.st_size:
        raise PoolError(f"{name} has {status.st_size} bytes and occupies {status.st_blocks * 512}: it was not reserved")
    return facts

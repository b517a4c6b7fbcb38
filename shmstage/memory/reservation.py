"""Making a pool file: its space is reserved before anyone relies on it, and its header is ready last of all."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import Literal

from shmstage import _native
from shmstage.errors import BudgetError, InputError, PoolError
from shmstage.memory.failures import OUT_OF_SPACE, cannot, limit_hit
from shmstage.memory.identity import ProcessIdentity, namespace_word
from shmstage.memory.layout import MAX_NBYTES
from shmstage.memory.limits import Limit, check_fits, format_nbytes
from shmstage.memory.mapping import Geometry, Mapping
from shmstage.memory.mounts import huge_pages_of
from shmstage.memory.names import SHM_DIR, new_name

REMEDY = "use fewer slots, or fewer rows or tokens per micro-batch"
#: where pages lie on a machine of several NUMA nodes: where they are first touched, or spread evenly
Numa = Literal["default", "interleave"]


@dataclass(frozen=True, slots=True)
class Backing:
    """What a pool's memory is made of; there is no fallback to another directory or to a disk.

    ``huge_pages``: mount and kernel give them (always, or where they are asked for, which is done then).
    ``huge_nbytes`` of the pool are mapped by them, as the kernel counted right after the reservation. ``numa_nodes``:
    over how many NUMA nodes the pages are spread, 0 with ``numa = "default"``.
    """

    directory: str
    huge_pages: bool
    huge_nbytes: int
    numa: Numa
    numa_nodes: int


def make_pool_file(
    run_id: str,
    geometry: Geometry,
    *,
    epoch: int,
    aux_slots: int,
    consumers: int,
    identity: ProcessIdentity,
    limits: list[Limit] | None,
    numa: Numa = "default",
    remedy: str = REMEDY,
) -> tuple[str, Mapping, _native.Headers, Backing]:
    """A reserved, pre-faulted pool file with a ready header: its path, mapping, headers and what backs it.

    Raises ``BudgetError`` if it exceeds the smallest of ``limits`` (read now if ``None``), before anything is
    allocated, or if the space is gone after all. A failure leaves no file behind.
    """
    if geometry.pool_nbytes > MAX_NBYTES:
        raise BudgetError(f"a pool of {geometry.pool_nbytes} bytes; the limit is {MAX_NBYTES}; {remedy}")
    what = f"{geometry.slot_count} slots of {format_nbytes(geometry.slot_nbytes)}"
    check_fits(geometry.pool_nbytes, what, remedy, limits)
    path, descriptor = _create_file(run_id)
    try:
        mapping, headers, backing = _fill_file(
            descriptor, geometry, run_id, epoch, aux_slots, consumers, identity, numa
        )
        # From here on the owner's lifetime lock decides whether the pool may be swept.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BaseException as error:
        os.unlink(path)
        if isinstance(error, BudgetError):
            raise BudgetError(f"{error}; {remedy}") from None
        raise
    finally:
        os.close(descriptor)
    return path, mapping, headers, backing


def _fill_file(
    descriptor: int,
    geometry: Geometry,
    run_id: str,
    epoch: int,
    aux_slots: int,
    consumers: int,
    identity: ProcessIdentity,
    numa: Numa,
) -> tuple[Mapping, _native.Headers, Backing]:
    """Reserves an empty pool file and writes its header, ``ready`` last."""
    nbytes = geometry.pool_nbytes
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        raise _out_of_space(error.errno, nbytes) from None
    _reserve(descriptor, 0, geometry.payload_offset)
    mapping = Mapping(descriptor, nbytes, writable=True)
    headers = _native.Headers(mapping.mmap, geometry.slot_count, consumers, epoch)
    try:
        # The owner first: if we are killed from here on, a sweep knows whose death to look for.
        try:
            headers.write_owner(
                run_id, identity.lock_path, identity.pid, identity.start_ticks, namespace_word()
            )
        except (ValueError, TypeError) as error:  # too long, or no text that UTF-8 can hold
            reason = error if isinstance(error, ValueError) else "it cannot be written in UTF-8"
            raise InputError(f"run id {run_id[:40]!r} does not fit a pool header: {reason}") from None
        nodes = _interleave(mapping) if numa == "interleave" else 0  # before the pages exist
        huge = huge_pages_of(SHM_DIR)
        if huge == "advise":
            _native.advise_huge_pages(mapping.mmap)
            _prefault(mapping, nbytes)
        _reserve(descriptor, 0, nbytes)
        _prefault(mapping, nbytes)
        headers.write_geometry(
            pool_nbytes=nbytes,
            payload_offset=geometry.payload_offset,
            slot_stride=geometry.slot_stride,
            aux_slot_count=aux_slots,
            payload_shift=geometry.payload_shift,
            huge_pages=huge != "never",
            interleaved=nodes > 0,
        )
        headers.mark_ready()
    except BaseException:
        headers.release()
        mapping.close()
        raise
    huge_nbytes = _huge_nbytes(mapping) if huge != "never" else 0
    return mapping, headers, Backing(SHM_DIR, huge != "never", huge_nbytes, numa, nodes)


def _create_file(run_id: str) -> tuple[str, int]:
    """A new, empty, locked pool file, mode 0600: its path and descriptor. Raises ``PoolError``.

    The lock says "being made": a sweep that cannot take it leaves the file alone.
    """
    while True:
        path = os.path.join(SHM_DIR, new_name(run_id))
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot(f"cannot make a pool in {SHM_DIR}", error) from None
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # swept between its creation and its lock


def _reserve(descriptor: int, begin: int, nbytes: int) -> None:
    """Backs a range of the file with memory now, so that no later write can be SIGBUS. Raises ``BudgetError``."""
    try:
        os.posix_fallocate(descriptor, begin, nbytes)
    except OSError as error:
        raise _out_of_space(error.errno, nbytes) from None


def _prefault(mapping: Mapping, nbytes: int) -> None:
    """Enters every page into this process's tables: the first micro-batch is then as fast as the others."""
    code = _native.populate(mapping.mmap, True)
    if code in OUT_OF_SPACE:
        raise _out_of_space(code, nbytes)
    # Any other answer is an old kernel; the bytes are reserved, only the first touch is slower.


def _out_of_space(code: int | None, nbytes: int) -> BudgetError | PoolError:
    """What an errno from reserving ``nbytes`` means to the caller."""
    reason = os.strerror(code or 0)
    if code in OUT_OF_SPACE:
        return BudgetError(f"reserving {nbytes} bytes in {SHM_DIR} failed: {reason} ({limit_hit(code)})")
    return PoolError(f"reserving {nbytes} bytes in {SHM_DIR} failed: {reason}")


def _interleave(mapping: Mapping) -> int:
    """Spreads the pages over the NUMA nodes; returns how many. Raises ``PoolError`` where the kernel refuses."""
    nodes = _native.interleave(mapping.mmap)
    if nodes < 0:
        raise PoolError(f'numa = "interleave": the kernel refuses, {os.strerror(-nodes)}; use numa = "default"')
    return nodes


def _huge_nbytes(mapping: Mapping, *, proc_root: str = "/proc") -> int:
    """How many bytes of a mapping the kernel maps by huge pages now; 0 if it does not say."""
    assert mapping.array is not None
    begin = f"{mapping.array.ctypes.data:08x}-"
    inside = False
    try:
        with open(f"{proc_root}/self/smaps") as smaps:
            for line in smaps:
                if "-" in line.partition(" ")[0]:
                    inside = line.startswith(begin)
                elif inside and line.startswith("ShmemPmdMapped:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0

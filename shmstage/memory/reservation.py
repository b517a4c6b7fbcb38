"""Making a pool file: its space is reserved before anyone relies on it, and its header is ready last of all."""

from __future__ import annotations

import errno
import fcntl
import os

from shmstage import _native
from shmstage.errors import BudgetError, InputError, PoolError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import MAX_NBYTES
from shmstage.memory.limits import Limit, check_fits, format_nbytes
from shmstage.memory.mapping import Geometry, Mapping
from shmstage.memory.names import SHM_DIR, new_name

REMEDY = "use fewer slots, or fewer rows or tokens per micro-batch"
_OUT_OF_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EFAULT)


def make_pool_file(
    run_id: str,
    geometry: Geometry,
    *,
    epoch: int,
    aux_slots: int,
    consumers: int,
    identity: ProcessIdentity,
    limits: list[Limit] | None,
) -> tuple[str, Mapping, _native.Headers]:
    """A reserved, pre-faulted pool file with a ready header: its path, mapping and headers.

    Raises ``BudgetError`` if it exceeds the smallest of ``limits`` (read now if ``None``), before anything is
    allocated, or if the space is gone after all. A failure leaves no file behind.
    """
    if geometry.pool_nbytes > MAX_NBYTES:
        raise BudgetError(f"a pool of {geometry.pool_nbytes} bytes; the limit is {MAX_NBYTES}; {REMEDY}")
    what = f"{geometry.slot_count} slots of {format_nbytes(geometry.slot_nbytes)}"
    check_fits(geometry.pool_nbytes, what, REMEDY, limits)
    path, descriptor = _create_file(run_id)
    try:
        mapping, headers = _fill_file(descriptor, geometry, run_id, epoch, aux_slots, consumers, identity)
        # From here on the owner's lifetime lock decides whether the pool may be swept.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path, mapping, headers


def _fill_file(
    descriptor: int,
    geometry: Geometry,
    run_id: str,
    epoch: int,
    aux_slots: int,
    consumers: int,
    identity: ProcessIdentity,
) -> tuple[Mapping, _native.Headers]:
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
            headers.write_owner(run_id, identity.lock_path, identity.pid, identity.start_ticks)
        except ValueError as error:
            raise InputError(f"run id {run_id[:40]!r} does not fit a pool header: {error}") from None
        if _wants_advice():
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
        )
        headers.mark_ready()
    except BaseException:
        headers.release()
        mapping.close()
        raise
    return mapping, headers


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
            raise PoolError(f"cannot make a pool in {SHM_DIR}: {error.strerror}") from None
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
    if code in _OUT_OF_SPACE:
        raise _out_of_space(code, nbytes)
    # Any other answer is an old kernel; the bytes are reserved, only the first touch is slower.


def _out_of_space(code: int | None, nbytes: int) -> BudgetError | PoolError:
    """What an errno from reserving ``nbytes`` means to the caller."""
    reason = os.strerror(code or 0)
    if code in _OUT_OF_SPACE:
        return BudgetError(f"reserving {nbytes} bytes in {SHM_DIR} failed: {reason}; {REMEDY}")
    return PoolError(f"reserving {nbytes} bytes in {SHM_DIR} failed: {reason}")


def _wants_advice(shm_dir: str = SHM_DIR) -> bool:
    """Whether the mount gives huge pages only where a mapping asks for them, before the pages exist."""
    try:
        with open("/proc/self/mounts") as mounts:
            rows = [line.split() for line in mounts]
    except OSError:
        return False
    return any(row[1] == shm_dir and "huge=advise" in row[3].split(",") for row in rows)

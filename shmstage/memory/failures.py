"""What the kernel's refusal to open, make or map a file of shared memory means to whoever asked."""

from __future__ import annotations

import errno
import os
import resource

from shmstage.errors import BudgetError, LimitUnreadableError, PoolError
from shmstage.memory.limits import format_nbytes, read_limits, tightest
from shmstage.memory.names import SHM_DIR

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
#: MADV_POPULATE_WRITE says EFAULT where touching the page would be SIGBUS
OUT_OF_SPACE = (*NO_SPACE, errno.ENOMEM, errno.EFBIG, errno.EFAULT)


def cannot(what: str, error: OSError) -> PoolError | BudgetError:
    """The error to raise instead of an ``OSError``; ``what`` begins "cannot ...". A full mount is a ``BudgetError``."""
    reason = os.strerror(error.errno or 0)
    if error.errno in NO_SPACE:
        return BudgetError(f"{what}: {reason} ({limit_hit(error.errno)}); `shmstage gc` removes what the dead left")
    return PoolError(f"{what}: {reason}{_remedy(error.errno)}")


def limit_hit(code: int | None) -> str:
    """Which limit made the kernel refuse space with this errno, with its numbers: never the size ``df`` shows alone."""
    if code in NO_SPACE:
        return _mount()
    if code == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"the limit of a file's size, ulimit -f, is {most} bytes" if most >= 0 else "a file cannot be that large"
    try:
        binding = tightest(read_limits())
    except LimitUnreadableError as unreadable:
        return str(unreadable)
    assert binding is not None  # there is always a mount, or it could not be read
    return f"the tightest limit is {binding.name}, which leaves {format_nbytes(binding.available_nbytes)}"


def _mount() -> str:
    try:
        stat = os.statvfs(SHM_DIR)
    except OSError as error:
        return f"the size of {SHM_DIR} cannot be read: {error.strerror}"
    if stat.f_files and not stat.f_favail:
        return f"the mount {SHM_DIR} has no inode left of {stat.f_files}"
    left, total = (format_nbytes(blocks * stat.f_frsize) for blocks in (stat.f_bavail, stat.f_blocks))
    return f"the mount {SHM_DIR} has {left} of {total} left"


def _remedy(code: int | None) -> str:
    if code == errno.EMFILE:
        return f"; this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files open: raise ulimit -n"
    if code == errno.ENFILE:
        return "; the machine has no descriptor left: raise fs.file-max"
    if code == errno.ENOMEM:
        return "; this process may map no more: look at ulimit -v and vm.max_map_count"
    return ""

"""Opening a file of /dev/shm that anybody may have put there: its name proves nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from shmstage.errors import PoolError
from shmstage.memory.names import SHM_DIR


def why_foreign(status: os.stat_result) -> str:
    """Why an open file cannot be a pool or lock of this user; "" if it can."""
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_uid != os.getuid():  # a name may say anything
        return f"belongs to user {status.st_uid}"
    return ""


@contextlib.contextmanager
def open_object(name: str) -> Iterator[int]:
    """A descriptor of a regular file of this user, for reading. Raises ``FileNotFoundError``, and ``PoolError``, whose
    text is the reason alone, for anything that is none."""
    try:
        # not blocking: somebody may have put a fifo there
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(os.path.join(SHM_DIR, name), flags)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, or another user's: never our business, never fatal
        reason = "a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise PoolError(reason) from None
    try:
        if reason := why_foreign(os.fstat(descriptor)):
            raise PoolError(reason)
        yield descriptor
    finally:
        os.close(descriptor)

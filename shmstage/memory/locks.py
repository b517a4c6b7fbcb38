"""Taking a lock file for oneself, though others look at it."""

from __future__ import annotations

import fcntl
import time

_PATIENCE_S = 0.1
_AGAIN_S = 0.005


def lock_exclusively(descriptor: int) -> bool:
    """Takes the exclusive flock of an open file; False if somebody keeps it.

    Tried for a tenth of a second: ``status`` and ``gc`` look whether a lock is held by taking it for an instant, and a
    start in that instant must not take them for an owner.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_AGAIN_S)

"""Removing what the dead left behind: never by age, never what another user owns, never anything of the living."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass

from shmstage.errors import PoolError
from shmstage.memory.facts import read_facts
from shmstage.memory.identity import PeerWatch, read_start_ticks
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, list_objects

__all__ = ["SweptObject", "list_objects", "sweep"]


@dataclass(frozen=True, slots=True)
class SweptObject:
    """A removed file of /dev/shm, why it could be removed, and the bytes it held."""

    name: str
    reason: str
    nbytes: int


def sweep(run_id: str | None = None, *, dry_run: bool = False) -> list[SweptObject]:
    """Removes pools and lifetime locks of this user (and of that run) whose owner is provably dead.

    Half-made pools go too unless somebody is making them right now. Any number of processes may sweep at once;
    what one of them works on the others skip. ``dry_run`` only reports.
    """
    swept = []
    # Pools first: a pool is judged by its owner's lock.
    for name in sorted(list_objects(run_id), key=lambda name: name.endswith(LOCK_SUFFIX)):
        found = _sweep_one(name, dry_run)
        if found is not None:
            swept.append(found)
    return swept


def _sweep_one(name: str, dry_run: bool) -> SweptObject | None:
    path = os.path.join(SHM_DIR, name)
    try:
        # not blocking: somebody may have put a fifo there
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone already, a link, or another user's: never our business, never fatal
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a living owner's lock, a pool being made, or another sweep at work
            return None
        # Removed while we hold the lock: its maker, who locks next, sees that it has no name any more.
        if os.fstat(descriptor).st_nlink == 0:
            return None
        reason = "nobody holds this lock" if name.endswith(LOCK_SUFFIX) else _why_dead(descriptor)
        if reason is None:
            return None
        if not dry_run:
            os.unlink(path)
        return SweptObject(name, reason, status.st_blocks * 512)
    finally:
        os.close(descriptor)


def _why_dead(descriptor: int) -> str | None:
    facts = read_facts(descriptor)
    if facts is None or not facts["magic"]:
        return "half made, and nobody is making it"
    pid, start_ticks = facts["owner_pid"], facts["owner_start_ticks"]
    try:
        owner = PeerWatch(facts["lock_path"].decode(errors="replace"), pid, start_ticks)
    except (PoolError, ValueError):  # a lock we may not look at proves nothing
        return None
    try:
        if not owner.dead():
            return None
        # A tidy-up script may have removed the lock of a living process; then the pid still speaks for it.
        lock_gone = owner.fileno_for_lock() < 0
        if lock_gone and start_ticks and read_start_ticks(pid) == start_ticks:
            return None
    finally:
        owner.close()
    return f"its owner, process {pid}, is dead" + ("" if facts["ready"] else " and had not finished making it")

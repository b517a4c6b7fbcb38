"""Removing what the dead left behind: never by age, never what another user owns, never anything of the living."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from shmstage.errors import PoolError
from shmstage.memory.facts import read_facts
from shmstage.memory.inspect import look_at_process
from shmstage.memory.names import LOCK_SUFFIX, PREFIX, SHM_DIR, is_ours, list_objects
from shmstage.memory.objects import open_object

__all__ = ["LeftObject", "SweepReport", "SweptObject", "list_objects", "sweep", "sweep_with_reasons"]

BUSY = "being made, or swept by another process, right now"


@dataclass(frozen=True, slots=True)
class SweptObject:
    """A removed file of /dev/shm, why it could be removed, and the bytes it held."""

    name: str
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeftObject:
    """A file that was left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Every file looked at is in one of the two, but for those that vanished meanwhile."""

    removed: tuple[SweptObject, ...]
    left_alone: tuple[LeftObject, ...]


def sweep(run_id: str | None = None, *, dry_run: bool = False) -> list[SweptObject]:
    """Removes pools and lifetime locks of this user (and of that run) whose owner is provably dead.

    Half-made pools go too unless somebody is making them right now. Any number of processes may sweep at once;
    what one of them works on the others skip. ``dry_run`` only reports.
    """
    return list(sweep_with_reasons(run_id, dry_run=dry_run).removed)


def sweep_with_reasons(run_id: str | None = None, *, dry_run: bool = False) -> SweepReport:
    """``sweep``, and what was left alone. Without ``run_id`` also what looks like ours and is not."""
    removed: list[SweptObject] = []
    left: list[LeftObject] = []
    # Pools first: a pool is judged by its owner's lock.
    for name in sorted(list_objects(run_id), key=lambda name: name.endswith(LOCK_SUFFIX)):
        found = _sweep_one(name, dry_run)
        if isinstance(found, SweptObject):
            removed.append(found)
        elif found is not None:
            left.append(found)
    if run_id is None:
        foreign = sorted(name for name in os.listdir(SHM_DIR) if name.startswith(PREFIX) and not is_ours(name))
        left += [LeftObject(name, "not a name that a process of this user gives") for name in foreign]
    return SweepReport(tuple(removed), tuple(left))


def _sweep_one(name: str, dry_run: bool) -> SweptObject | LeftObject | None:
    """``None``: it is gone."""
    try:
        with open_object(name) as descriptor:
            return _sweep_open(name, descriptor, dry_run)
    except FileNotFoundError:
        return None
    except PoolError as error:
        return LeftObject(name, str(error))


def _sweep_open(name: str, descriptor: int, dry_run: bool) -> SweptObject | LeftObject | None:
    """``None``, as ``FileNotFoundError``: it is gone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return LeftObject(name, _why_locked(name))
    # Removed while we hold the lock: its maker, who locks next, sees that it has no name any more.
    if os.fstat(descriptor).st_nlink == 0:
        return None
    dead, reason = (True, "nobody holds this lock") if name.endswith(LOCK_SUFFIX) else _judge_pool(descriptor)
    if not dead:
        return LeftObject(name, reason)
    nbytes = os.fstat(descriptor).st_blocks * 512
    # An owner that ends in order removes its pool and gives up its lock: judged in between, it is dead and the pool
    # gone.
    if dry_run:
        os.stat(os.path.join(SHM_DIR, name), follow_symlinks=False)
    else:
        try:
            os.unlink(os.path.join(SHM_DIR, name))
        except FileNotFoundError:
            raise
        except OSError as error:
            return LeftObject(name, f"cannot be removed: {error.strerror}")
    return SweptObject(name, reason, nbytes)


def _why_locked(name: str) -> str:
    """A living owner's lock, a pool being made, or another sweep at work."""
    if not name.endswith(LOCK_SUFFIX):
        return BUSY
    holder = look_at_process(os.path.join(SHM_DIR, name))
    return f"held by {holder.role or 'process'} {holder.pid}, which is alive" if holder.alive else BUSY


def _judge_pool(descriptor: int) -> tuple[bool, str]:
    """Whether a pool's owner is provably dead, and how that is known."""
    facts = read_facts(descriptor)
    if facts is None or not facts["magic"]:
        return True, "half made, and nobody is making it"
    pid = facts["owner_pid"]
    claims = (pid, facts["owner_start_ticks"], facts["owner_namespace"])
    owner = look_at_process(facts["lock_path"].decode(errors="replace"), *claims)
    if owner.alive is None:
        return False, f"its owner, process {pid}, cannot be seen from here: nothing proves its death"
    if owner.alive:
        return False, f"its owner, {owner.role or 'process'} {pid}, is alive"
    return True, f"its owner, process {pid}, is dead" + ("" if facts["ready"] else " and had not finished making it")

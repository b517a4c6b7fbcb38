"""How much memory a pool may take: the smallest of the mount, every cgroup above us, and available RAM.

It is asked before anything is allocated: past a mount's limit the first touch is SIGBUS, and past a cgroup's
every allocation call is SIGKILL. The size ``df`` shows is not trusted alone; containers often show half the
machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from shmstage.errors import BudgetError, LimitUnreadableError
from shmstage.memory.names import SHM_DIR

# cgroup v1 writes "no limit" as a page-rounded 2**63 - 1.
_UNLIMITED_NBYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit, how many bytes it leaves now and how many it allows in all (0: not known).

    A mount limits what lies in shared memory; a cgroup, available RAM and a limit that was given bound that and private
    memory together.
    """

    name: str
    available_nbytes: int
    kind: Literal["mount", "cgroup", "ram", "given"] = "given"
    total_nbytes: int = 0


def read_limits(
    shm_dir: str = SHM_DIR, *, proc_root: str = "/proc", cgroup_root: str = "/sys/fs/cgroup", cgroups: bool = True
) -> list[Limit]:
    """Every limit that applies to bytes in ``shm_dir``. Raises ``LimitUnreadableError``, never guesses.

    Without ``cgroups`` only mount and RAM, for a report: whoever allocates by it may be killed.
    """
    limits = [_mount_limit(shm_dir)]
    if cgroups:
        limits += _cgroup_limits(Path(proc_root, "self", "cgroup"), Path(cgroup_root))
    try:
        memory = psutil.virtual_memory()
    except (OSError, ValueError, KeyError, psutil.Error) as error:
        raise LimitUnreadableError(f"cannot read how much available RAM there is: {error}") from None
    limits.append(Limit("available RAM", int(memory.available), "ram", int(memory.total)))
    return limits


def tightest(limits: Iterable[Limit]) -> Limit | None:
    """The one that leaves least; ``None`` of none."""
    return min(limits, key=lambda limit: limit.available_nbytes, default=None)


def check_fits(nbytes: int, what: str, remedy: str, limits: list[Limit] | None = None) -> Limit:
    """Returns the limit that binds; if exceeded, ``BudgetError`` names it, both numbers and ``remedy``."""
    binding = tightest(read_limits() if limits is None else limits)
    if binding is None:
        raise LimitUnreadableError(f"no memory limit is known, so it cannot be said whether {what} fit")
    if nbytes > binding.available_nbytes:
        left = format_nbytes(binding.available_nbytes)
        raise BudgetError(f"{what} need {format_nbytes(nbytes)}; {binding.name} leaves {left}; {remedy}")
    return binding


def format_nbytes(nbytes: int) -> str:
    """Decimal units, three digits: 5.15 GB."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5 or (unit == "B" and abs(value) < 1000):  # three digits of more are a thousand
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def _mount_limit(shm_dir: str) -> Limit:
    try:
        stat = os.statvfs(shm_dir)
    except OSError as error:
        raise LimitUnreadableError(f"cannot read the size of {shm_dir}: {error.strerror}") from None
    name = f"the mount {shm_dir} (docker: --shm-size, kubernetes: a memory emptyDir)"
    return Limit(name, stat.f_bavail * stat.f_frsize, "mount", stat.f_blocks * stat.f_frsize)


def _cgroup_limits(membership: Path, cgroup_root: Path) -> list[Limit]:
    try:
        lines = os.fsdecode(membership.read_bytes()).splitlines()  # a group's name may be any bytes
    except FileNotFoundError:  # a kernel without cgroups
        return []
    except OSError as error:
        raise LimitUnreadableError(f"cannot read {membership}: {error.strerror}") from None
    limits: list[Limit] = []
    for line in lines:
        if line.count(":") < 2:
            raise LimitUnreadableError(f"cannot read {membership}: {line[:80]!r} names no cgroup")
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for root in (cgroup_root, cgroup_root / "unified"):
                limits += _chain(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _chain(cgroup_root / "memory", path, *names)
    return limits


def _chain(root: Path, path: str, limit_file: str, usage_file: str, cache_key: str) -> list[Limit]:
    """Limits of the cgroup at ``path`` and of all above it: any of them can bind."""
    limits = []
    inner = path.strip("/")
    # In a container the path may be the host's while the mount shows the container's own group at its root; seen from
    # a cgroup namespace, what lies above it begins with /..
    start = root / inner if ".." not in Path(inner).parts and _is_there(root / inner) else root
    for group in (start, *start.parents):
        if not group.is_relative_to(root):
            break
        if _is_there(group / limit_file):
            found = _available(group, limit_file, usage_file, cache_key)
            if found is not None:
                name = f"the cgroup /{group.relative_to(root)}".replace("/.", "/")
                limits.append(Limit(name, found[0], "cgroup", found[1]))
    return limits


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise LimitUnreadableError(f"cannot look at the cgroup {path}: {error}") from None


def _available(group: Path, limit_file: str, usage_file: str, cache_key: str) -> tuple[int, int] | None:
    """Bytes left and bytes allowed."""
    try:
        text = (group / limit_file).read_text().strip()
        if text == "max" or int(text) >= _UNLIMITED_NBYTES:
            return None
        used = int((group / usage_file).read_text())
        # File cache not used lately is given back before anyone is killed; shared memory is not in it.
        reclaimable = 0
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache_key:
                reclaimable = int(value)
        return max(int(text) - max(used - reclaimable, 0), 0), int(text)
    except (OSError, ValueError) as error:
        raise LimitUnreadableError(f"cannot read the memory limit of cgroup {group}: {error}") from None

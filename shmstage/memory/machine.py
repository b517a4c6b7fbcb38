"""What kind of machine this is, as far as shared memory is concerned: facts only, judged elsewhere.

Everything is read from files below roots that tests can replace; what cannot be read is empty or ``None``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import pwd
import resource
from dataclasses import dataclass
from pathlib import Path

from shmstage.errors import LimitUnreadableError
from shmstage.memory.limits import Limit, read_limits
from shmstage.memory.mounts import huge_option, kernel_huge_policy, mount_of
from shmstage.memory.names import SHM_DIR

_MADV_POPULATE_WRITE = 23
#: of the kernel's first pid and ipc namespace, include/linux/proc_ns.h; others are of containers
_FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}
_RLIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "fsize": resource.RLIMIT_FSIZE,
            "as": resource.RLIMIT_AS}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts. Sizes in bytes; ``rlimits`` are soft limits, ``None`` without one.

    ``foreign_namespaces``: "pid" and "ipc" where this process is not in the kernel's first one, as in a container.
    ``remove_ipc``: what logind is told, ``None`` where no logind runs. ``huge_option``: of the mount of shared memory;
    ``huge_policy``: the kernel's, which may overrule it (``mounts.huge_choice``).
    """

    uid: int
    user: str
    shm_dir: str
    shm_fstype: str
    shm_options: tuple[str, ...]
    shm_writable: bool
    limits: tuple[Limit, ...]
    limits_problem: str
    remove_ipc: bool | None
    lingers: bool
    foreign_namespaces: tuple[str, ...]
    huge_policy: str
    numa_nodes: int
    rlimits: dict[str, int | None]
    kernel: str
    can_populate: bool
    has_pidfd: bool

    @property
    def huge_option(self) -> str:
        return huge_option(self.shm_options)

    def limit(self, kind: str) -> Limit | None:
        """The smallest of a kind: "mount", "cgroup", "ram"."""
        found = [limit for limit in self.limits if limit.kind == kind]
        return min(found, key=lambda limit: limit.total_nbytes or limit.available_nbytes, default=None)


def read_machine(root: str = "/", *, shm_dir: str = SHM_DIR) -> Machine:
    """This machine. ``root``: where /proc, /sys, /etc and the like are looked for."""
    base = Path(root)
    fstype, options = mount_of(shm_dir, root=base)
    limits, problem = _limits(base, shm_dir)
    user = _user_name(os.getuid())
    return Machine(
        uid=os.getuid(),
        user=user,
        shm_dir=shm_dir,
        shm_fstype=fstype,
        shm_options=options,
        shm_writable=os.access(shm_dir, os.W_OK | os.X_OK),
        limits=limits,
        limits_problem=problem,
        remove_ipc=_remove_ipc(base),
        lingers=(base / "var/lib/systemd/linger" / user).exists(),
        foreign_namespaces=_foreign_namespaces(base / "proc/self/ns"),
        huge_policy=kernel_huge_policy(root=base),
        numa_nodes=_count(base / "sys/devices/system/node", "node[0-9]*") or 1,
        rlimits={name: _rlimit(number) for name, number in _RLIMITS.items()},
        kernel=platform.release(),
        can_populate=_can_populate(),
        has_pidfd=_has_pidfd(),
    )


def _limits(base: Path, shm_dir: str) -> tuple[tuple[Limit, ...], str]:
    """Every limit; where one cannot be read, why, and the others."""
    problem = ""
    roots = {"proc_root": str(base / "proc"), "cgroup_root": str(base / "sys/fs/cgroup")}
    for cgroups in (True, False):
        try:
            return tuple(read_limits(shm_dir, **roots, cgroups=cgroups)), problem
        except LimitUnreadableError as error:
            problem = problem or str(error)
    return (), problem


def _remove_ipc(base: Path) -> bool | None:
    """systemd-logind's setting, yes unless a file says no: the main file, then its drop-ins by name."""
    if not (base / "run/systemd/system").is_dir() or not _count(base / "run/systemd", "seats"):
        return None
    folders = [base / "usr/lib/systemd", base / "run/systemd", base / "etc/systemd"]
    main = [folder / "logind.conf" for folder in reversed(folders) if (folder / "logind.conf").exists()][:1]
    # of two drop-ins of one name that in the more special folder counts
    drop_ins = {path.name: path for folder in folders for path in folder.glob("logind.conf.d/*.conf")}
    value = "yes"
    for path in (*main, *(drop_ins[name] for name in sorted(drop_ins))):
        for line in _read(path).splitlines():
            key, separator, said = line.partition("=")
            if separator and key.strip() == "RemoveIPC":
                value = said.strip() or "yes"
    return value.lower() in ("yes", "true", "on", "1", "y", "t")


def _foreign_namespaces(folder: Path) -> tuple[str, ...]:
    found = []
    for name, first in _FIRST_NAMESPACES.items():
        with contextlib.suppress(OSError):
            if os.readlink(folder / name) != f"{name}:[{first}]":
                found.append(name)
    return tuple(found)


def _count(folder: Path, pattern: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in folder.glob(pattern))
    return 0


def _rlimit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _user_name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _can_populate() -> bool:
    """MADV_POPULATE_WRITE came with Linux 5.14."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True

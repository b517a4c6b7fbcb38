"""What of a machine makes shared memory fail or slow, each with one remedy. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from shmstage.memory.limits import format_nbytes, tightest
from shmstage.memory.machine import Machine
from shmstage.memory.mounts import huge_choice

Level = Literal["ok", "note", "problem"]

DOCKER_SHM_NBYTES = 64 << 20
#: logind counts users below as the system's, whose memory it never removes
FIRST_USER_UID = 1000
#: pool and sockets, imports and checkpoints of both processes stay far below
FEW_FILES = 256
#: leftovers of more than this part of the tightest limit stand in the way of a new run
MUCH_LEFT = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """``remedy`` is empty where there is nothing to do."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def check_machine(machine: Machine) -> list[Finding]:
    """Every check, in order."""
    return [check(machine) for check in _CHECKS]


def _check_mount(machine: Machine) -> Finding:
    name, mount = machine.shm_dir, machine.limit("mount")
    if mount is None:
        return Finding("mount", "problem", f"the size of {name} is not known", f"mount a tmpfs at {name}")
    size = f"{name} has {format_nbytes(mount.available_nbytes)} of {format_nbytes(mount.total_nbytes)} left"
    if machine.shm_fstype not in ("tmpfs", "ramfs"):
        kind = machine.shm_fstype or "no mount of its own"
        return Finding("mount", "problem", f"{name} is {kind}, not memory", f"mount a tmpfs at {name}")
    if "ro" in machine.shm_options or not machine.shm_writable:
        return Finding("mount", "problem", f"{name} cannot be written", f"mount -o remount,rw,mode=1777 {name}")
    if mount.total_nbytes <= DOCKER_SHM_NBYTES:
        return Finding(
            "mount", "problem", f"{size}; 64 MB is docker's default and holds no real micro-batch",
            "docker run --shm-size=SIZE (or --ipc=host); kubernetes: a memory emptyDir at /dev/shm; else mount -o "
            f"remount,size=SIZE {name}",
        )  # fmt: skip
    if mount.available_nbytes < mount.total_nbytes * MUCH_LEFT:
        return Finding("mount", "problem", f"{size}: it is nearly full", f"see what lies in {name}; `shmstage gc`")
    return Finding("mount", "ok", size)


def _check_limits(machine: Machine) -> Finding:
    if machine.limits_problem:
        remedy = "mount /sys/fs/cgroup and /proc readable: without the limit every start ends with exit code 3"
        return Finding("limits", "problem", machine.limits_problem, remedy)
    binding, mount = tightest(machine.limits), machine.limit("mount")
    if binding is None or mount is None or binding.kind == "mount":
        return Finding("limits", "ok", "the mount is the tightest memory limit")
    left = f"{binding.name} leaves {format_nbytes(binding.available_nbytes)}"
    if binding.kind == "cgroup":
        text = f"{left}, less than the mount shows ({format_nbytes(mount.available_nbytes)}); pools count against it"
        return Finding("limits", "note", text, "plan with `shmstage budget`, or raise the container's memory limit")
    total = binding.total_nbytes or binding.available_nbytes
    if mount.total_nbytes > total:
        text = f"{machine.shm_dir} shows {format_nbytes(mount.total_nbytes)}, the machine has {format_nbytes(total)}"
        return Finding("limits", "note", text, "go by `shmstage budget`, not by df: the smallest limit counts")
    return Finding("limits", "ok", left)


def _check_remove_ipc(machine: Machine) -> Finding:
    if machine.remove_ipc is None:
        return Finding("RemoveIPC", "ok", "no logind runs here: nobody removes pools at a logout")
    if machine.uid < FIRST_USER_UID:
        return Finding("RemoveIPC", "ok", f"user {machine.user} is a system user: logind leaves its pools alone")
    if not machine.remove_ipc:
        return Finding("RemoveIPC", "ok", "logind is told to leave shared memory alone (RemoveIPC=no)")
    if machine.lingers:
        return Finding("RemoveIPC", "ok", f"user {machine.user} lingers: no logout removes its pools")
    return Finding(
        "RemoveIPC", "problem",
        f"logind removes the shared memory of {machine.user} at the last logout, also under a run in the background",
        f"loginctl enable-linger {machine.user}, or RemoveIPC=no in /etc/systemd/logind.conf",
    )  # fmt: skip


def _check_namespaces(machine: Machine) -> Finding:
    if not machine.foreign_namespaces:
        return Finding("namespaces", "ok", "pid and ipc namespace are the machine's own")
    names = " and ".join(machine.foreign_namespaces)
    plural = "namespaces" if len(machine.foreign_namespaces) > 1 else "namespace"
    return Finding(
        "namespaces", "note",
        f"this is a container with its own {names} {plural}: processes outside share no pool with it",
        "run orchestrator, trainer and shmstage status in one container, or share /dev/shm and the runtime directory",
    )  # fmt: skip


def _check_huge_pages(machine: Machine) -> Finding:
    option, policy = machine.huge_option, machine.huge_policy
    choice = huge_choice(option, policy)
    if choice != "never":
        who = "the kernel" if policy == "force" else "the mount"
        return Finding("huge pages", "ok", f"{who} gives huge pages ({choice})")
    if policy == "deny":
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        text = "the kernel denies huge pages to shared memory: making a pool takes longer"
        return Finding("huge pages", "note", text, remedy)
    text = "the mount gives no huge pages: making a pool takes about three times as long"
    return Finding("huge pages", "note", text, f"mount -o remount,huge=advise {machine.shm_dir}")


def _check_numa(machine: Machine) -> Finding:
    if machine.numa_nodes < 2:
        return Finding("NUMA", "ok", "one memory node")
    text = f"{machine.numa_nodes} memory nodes: a pool lies on the one that touches it first"
    return Finding("NUMA", "note", text, 'numa = "interleave" spreads it over all')


def _check_ulimits(machine: Machine) -> Finding:
    files, size, space = (machine.rlimits.get(name) for name in ("nofile", "fsize", "as"))
    mount = machine.limit("mount")
    wanted = mount.total_nbytes if mount is not None else 0
    if files is not None and files < FEW_FILES:
        text = f"ulimit -n allows {files} open files; orchestrator or trainer may need {FEW_FILES}"
        return Finding("ulimits", "problem", text, "ulimit -n 4096 before the start")
    for name, limit, flag in (("a file", size, "f"), ("a process's memory", space, "v")):
        if limit is not None and limit < wanted:
            text = f"ulimit -{flag} bounds {name} at {format_nbytes(limit)}, less than {machine.shm_dir} holds"
            return Finding("ulimits", "problem", text, f"ulimit -{flag} unlimited before the start")
    locked = machine.rlimits.get("memlock")
    pinned = "without a bound" if locked is None else f"up to {format_nbytes(locked)}"
    return Finding("ulimits", "ok", f"{files or 'any number of'} open files, locked memory {pinned} (pools lock none)")


def _check_kernel(machine: Machine) -> Finding:
    missing = [name for name, there in (("MADV_POPULATE_WRITE", machine.can_populate), ("pidfd", machine.has_pidfd))
               if not there]  # fmt: skip
    if not missing:
        return Finding("kernel", "ok", f"Linux {machine.kernel}")
    text = f"Linux {machine.kernel} lacks {' and '.join(missing)}: the first touch of a pool is slower"
    if not machine.has_pidfd:
        text = f"Linux {machine.kernel} lacks {' and '.join(missing)}: deaths are noticed by locks alone"
    return Finding("kernel", "note", text, "Linux 5.14 or newer has both")


_CHECKS: tuple[Callable[[Machine], Finding], ...] = (
    _check_mount, _check_limits, _check_remove_ipc, _check_namespaces, _check_huge_pages, _check_numa, _check_ulimits,
    _check_kernel,
)  # fmt: skip


# --- what other layers know ---------------------------------------------------------------------------------


def check_runtime_dir(path: str, error: str, mode: int, wanted: str) -> Finding:
    """``wanted``: where the sockets would be but for the length of the path; "" if they are there."""
    if error:
        return Finding("sockets", "problem", error, "set XDG_RUNTIME_DIR to a directory of this user, mode 0700")
    if mode & 0o077:
        return Finding("sockets", "problem", f"{path} has mode {mode:04o}: others can reach it", f"chmod 0700 {path}")
    if wanted:
        text = f"sockets are in {path}: below {wanted} their paths would be too long, or it is no directory"
        return Finding("sockets", "note", text, "set XDG_RUNTIME_DIR to a short directory, the same in all processes")
    return Finding("sockets", "ok", f"{path}, mode {mode:04o}")


def check_leftovers(machine: Machine, nbytes: int, count: int, endpoints: int = 0) -> Finding:
    """What ``shmstage gc`` would remove now; ``endpoints``: sockets, and locks of such, beside what is in memory."""
    if not count + endpoints:
        return Finding("leftovers", "ok", "the dead have left nothing, neither in shared memory nor among the sockets")
    binding = tightest(machine.limits)
    much = binding is not None and nbytes > (binding.available_nbytes + nbytes) * MUCH_LEFT
    parts = []
    if count:
        files = f"{count} file{'s' * (count > 1)} of dead processes hold{'s' * (count == 1)}"
        parts.append(f"{files} {format_nbytes(nbytes)} of shared memory")
    if endpoints:
        parts.append(f"{endpoints} socket{'s' * (endpoints > 1)} or lock{'s' * (endpoints > 1)} of dead processes")
    text = ", and ".join(parts)
    return Finding("leftovers", "problem" if much else "note", text, "shmstage gc")


def check_software(versions: Iterable[tuple[str, str]]) -> Finding:
    """``versions``: name and version, "" for what is not installed."""
    known = list(versions)
    missing = [name for name, version in known if not version]
    text = ", ".join(f"{name} {version}" for name, version in known if version)
    if "jax" in missing:
        return Finding("software", "problem", f"{text}; jax is missing", "pip install jax")
    if missing:
        return Finding("software", "note", f"{text}; without {', '.join(missing)}", "pip install 'shmstage[train]'")
    return Finding("software", "ok", text)

"""Machines to be had for a test: small mounts, pid namespaces, memory cgroups. As root; elsewhere a skip says why."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from skipping import skip_unless_ci

MEMORY_TESTS = Path(__file__).parent / "memory"
#: for code that ``run_on_mount`` runs
PRELUDE = "import os, sys, signal\nfrom pool_making import *\nfrom shmstage.memory.identity import ProcessIdentity\n"
CGROUP_V1, CGROUP_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@cache
def _can(*unshare: str) -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", *unshare, "true"], capture_output=True, check=False).returncode == 0
    )


def need_namespaces(*unshare: str) -> None:
    if not _can(*(unshare or ("--mount",))):
        skip_unless_ci(f"needs root, for unshare {' '.join(unshare) or '--mount'}")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(MEMORY_TESTS), *sys.path])}


def run_on_mount(options: str, code: str, *arguments: object, unshare: tuple[str, ...] = ("--mount",)) -> list[str]:
    """Lines that ``code`` prints in a process whose /dev/shm is a tmpfs of its own; its exit code must be 0."""
    done = on_mount(options, [sys.executable, "-c", PRELUDE + code, *map(str, arguments)], unshare=unshare)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def on_mount(
    options: str, command: list[str], *, unshare: tuple[str, ...] = ("--mount",), before: str = "true", cwd: str = "."
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` where /dev/shm is a tmpfs with these mount options; ``before`` is shell, run in there first."""
    mount = f"mount -t tmpfs -o {options} none /dev/shm && {before}"
    return in_namespace(mount, command, unshare=unshare, cwd=cwd)


def in_namespace(
    before: str, command: list[str], *, unshare: tuple[str, ...] = ("--mount",), cwd: str | Path = "."
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in namespaces of its own; ``before`` is shell, run in there first, as for mounts."""
    need_namespaces(*unshare)
    return subprocess.run(
        ["unshare", *unshare, "sh", "-c", f'{before} && exec "$@"', "sh", *command],
        env=environment(), capture_output=True, text=True, timeout=90, check=False, cwd=cwd,
    )  # fmt: skip


@contextlib.contextmanager
def memory_cgroup(limit_nbytes: int) -> Iterator[Path]:
    """A group of the real memory controller with that limit, removed afterwards. Its processes must have ended.

    A skip in CI, too: a plain container sees the controller read-only, or under v2 has a group of its own that holds
    processes and can have no child with a controller.
    """
    is_v1 = (CGROUP_V1 / "memory.limit_in_bytes").exists()
    parent = CGROUP_V1 if is_v1 else CGROUP_V2
    try:
        group = Path(tempfile.mkdtemp(prefix="shmstage-test-", dir=parent))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made under {parent}: {error}")
    try:
        try:
            (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit_nbytes))
        except OSError as error:
            pytest.skip(f"the group {group} has no memory controller: {error}")
        yield group
    finally:
        group.rmdir()

"""How much memory a process really takes, as the kernel counts it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from shmstage.memory.names import SHM_DIR, is_ours

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Proportional set size: a page that n processes map counts 1/n. ``pool_nbytes`` of it lies in pools of ours."""

    pid: int
    pss_nbytes: int
    pool_nbytes: int

    @property
    def private_nbytes(self) -> int:
        """What is left without the pools: heap, code, device buffers of a CPU trainer."""
        return self.pss_nbytes - self.pool_nbytes


def own_use() -> dict[str, int | float | str]:
    """``rss_nbytes`` and, of it, ``shared_nbytes`` (pools, files, libraries) of this process, in microseconds."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared = file.read().split()[:3]
    return {"rss_nbytes": int(resident) * _PAGE_NBYTES, "shared_nbytes": int(shared) * _PAGE_NBYTES}


def process_use(pid: int, *, started_before_s: float) -> ProcessUse | None:
    """``None`` if there is no such process, it may not be looked at, or it started later (then the pid was reused).

    ``started_before_s`` in seconds since the epoch, as ``os.stat`` and ``time.time`` have them.
    """
    try:
        process = psutil.Process(pid)
        # the kernel counts start times in ticks from a boot time that is rounded to seconds
        if process.create_time() > started_before_s + 2.0:
            return None
        maps = process.memory_maps(grouped=True)
    except (psutil.Error, OSError):
        return None
    pools = (each.pss for each in maps if _is_pool(each.path.removesuffix(" (deleted)")))
    return ProcessUse(pid, sum(each.pss for each in maps), sum(pools))


def _is_pool(path: str) -> bool:
    directory, name = os.path.split(path)
    return directory == SHM_DIR and is_ours(name)

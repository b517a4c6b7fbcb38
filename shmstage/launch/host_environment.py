"""The environment of what a Ray actor starts: the host's own, not that of a Ray worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

#: what the launcher was started with goes to every host: it says how trainers compute and where code lies
FORWARDED = ("JAX_", "XLA_", "PJRT_", "LIBTPU_", "TPU_", "NCCL_", "SHMSTAGE_", "PYTHONPATH")
#: set by Ray in its workers, for the worker's own purposes: an actor without GPUs sees none, one of one CPU has one
#: thread, and a trainer started from there would go without, too
OF_A_WORKER = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS",
    "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV",
)  # fmt: skip


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Of the launcher's environment what every trainer gets."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED)}


def child_environment(worker: Mapping[str, str], host: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """``worker``: of the Ray worker; ``host``: of whoever started Ray there; ``given``: by the launcher.

    Nothing of Ray's own is handed on: a child that found it would take itself for a worker.
    """
    found = {name: value for name, value in worker.items() if not name.startswith("RAY_") and name not in OF_A_WORKER}
    found |= {name: host[name] for name in OF_A_WORKER if name in host}
    return {**found, **given, "PYTHONUNBUFFERED": "1"}


def environment_of(pid: int) -> dict[str, str]:
    """What a process of ours was started with; empty where that cannot be read."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {}

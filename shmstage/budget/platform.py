"""Whether a trainer on this machine has an accelerator, told without importing jax."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shmstage.budget.formula import Platform

#: device nodes of GPUs (NVIDIA, AMD) and TPUs
_NODES = ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*")


def platform_here(environment: Mapping[str, str], dev: Path = Path("/dev")) -> Platform:
    """``JAX_PLATFORMS`` decides where it is set, device nodes do otherwise."""
    named = environment.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if named:
        return "cpu" if named == "cpu" else "accelerator"
    return "accelerator" if any(next(dev.glob(node), None) is not None for node in _NODES) else "cpu"

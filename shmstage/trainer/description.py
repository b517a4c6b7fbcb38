"""What a worker says about itself: in its welcome and to ``info``."""

from __future__ import annotations

from typing import Any

from shmstage.trainer.engine import TrainEngine, optional_of
from shmstage.trainer.gate import GateState
from shmstage.trainer.jax_seam import local_devices


def describe(engine: TrainEngine, state: GateState, host_memory: dict[str, object] | None) -> dict[str, Any]:
    """Plain facts: devices, what the engine can do, where the gate stands."""
    return {
        **local_devices(),
        "host_memory": host_memory,
        "engine": type(engine).__name__,
        "snapshots": bool(getattr(engine, "snapshots", True)),
        "optional": optional_of(engine),
        "gate": state.phase,
        "deferred": state.deferred_step,
        "staged": state.staged,
        "last_step": state.closed_step,
    }

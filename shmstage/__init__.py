"""shmstage joins the two halves of reinforcement-learning training on JAX through shared memory.

The public names are imported when they are first used (PEP 562), so that ``import shmstage`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmstage.memory.handle import Handle
    from shmstage.memory.layout import Layout
    from shmstage.packing.source import Group, Source
    from shmstage.packing.trajectory import Trajectory
    from shmstage.trainer.double_buffer import DoubleBuffer
    from shmstage.trainer.engine import TrainEngine
    from shmstage.trainer.optax_engine import OptaxEngine
    from shmstage.transport.consumer import Consumer
    from shmstage.transport.producer import Producer
    from shmstage.transport.weights_reader import WeightsReader

#: the one place it is written; a literal, so that a build reads it without importing anything
__version__ = "0.1.0.dev0"

_PUBLIC = {
    "Consumer": "shmstage.transport.consumer",
    "DoubleBuffer": "shmstage.trainer.double_buffer",
    "Group": "shmstage.packing.source",
    "Handle": "shmstage.memory.handle",
    "Layout": "shmstage.memory.layout",
    "OptaxEngine": "shmstage.trainer.optax_engine",
    "Producer": "shmstage.transport.producer",
    "Source": "shmstage.packing.source",
    "TrainEngine": "shmstage.trainer.engine",
    "Trajectory": "shmstage.packing.trajectory",
    "WeightsReader": "shmstage.transport.weights_reader",
}

__all__ = [
    "Consumer",
    "DoubleBuffer",
    "Group",
    "Handle",
    "Layout",
    "OptaxEngine",
    "Producer",
    "Source",
    "TrainEngine",
    "Trajectory",
    "WeightsReader",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shmstage' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])

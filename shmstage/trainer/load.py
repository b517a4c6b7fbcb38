"""Engines named by the user as ``engine = "module:factory"``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shmstage.plugins import make
from shmstage.trainer.engine import TrainEngine

REQUIRED = ("shardings", "fwd_bwd", "update", "metrics", "save", "restore", "weights")


def load_engine(name: str, settings: Mapping[str, Any], checkpoint_dir: Path | str | None = None) -> TrainEngine:
    """Call the factory that ``name`` points at with ``settings``; see ``shmstage.plugins.make`` for what it raises.

    The factory gets ``checkpoint_dir`` (a string or ``None``) among them unless they name one.
    """
    directory = None if checkpoint_dir is None else str(checkpoint_dir)
    return cast(TrainEngine, make("engine", name, {"checkpoint_dir": directory, **settings}, needs=REQUIRED))

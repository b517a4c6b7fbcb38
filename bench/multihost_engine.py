"""The trainer of ``multihost.py``'s launch: a linear model whose rows lie on the devices of all hosts. It takes every
byte of a micro-batch onto its devices and computes next to nothing from it.

    engine = "multihost_engine:make_engine"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shmstage.testing.engines_packed import packed_loss
from shmstage.trainer.jax_seam import partition_spec
from shmstage.trainer.optax_engine import OptaxEngine


def make_engine(settings: Mapping[str, Any]) -> OptaxEngine:
    """Settings: ``tokens`` of a row, ``checkpoint_dir``."""
    params = {"b": jnp.zeros((), jnp.float32), "w": jnp.ones((settings["tokens"],), jnp.float32)}
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return OptaxEngine(packed_loss, params, optax.sgd(1e-3), mesh, partition_spec("rows"), settings["checkpoint_dir"])

"""Placing arrays on the devices the plain way, for the reference loop: nothing shared with the double buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def place_private_copies(
    arrays: Mapping[str, np.ndarray[Any, Any]], shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
    """Each array copied to memory of its own, which nobody writes again, then put on the devices and waited for."""
    placed = {name: jax.device_put(np.array(array), shardings[name]) for name, array in arrays.items()}
    for array in placed.values():
        array.block_until_ready()
    return placed

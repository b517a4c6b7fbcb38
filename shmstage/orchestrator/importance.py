"""Importance weights between the sampler's policy and the one that is trained, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

#: log-ratios are cut off here before exp(): float32 overflows at 88
MAX_LOG_RATIO = 20.0


def sampler_is_weights(
    sampled: npt.NDArray[Any], recomputed: npt.NDArray[Any], mask: npt.NDArray[Any], cap: float
) -> Float32:
    """``min(exp(recomputed - sampled), cap)`` where ``mask`` is not 0, and 0 elsewhere; float32 ``[rows, tokens]``.

    ``sampled`` are the sampler's log-probs, ``recomputed`` the trainer's of the same tokens. Source: truncated
    importance sampling (Espeholt et al., IMPALA, 2018, sec. 4.1, with the truncation level ``cap``).
    """
    counted = mask != 0
    log_ratio = np.where(counted, recomputed - sampled, 0.0)
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return np.where(counted, np.minimum(ratio, cap), 0.0).astype(np.float32)

"""Rewards of the answers to one prompt → their advantages. Pure.

| choice       | advantage of answer i            | where from                                                     |
|--------------|----------------------------------|----------------------------------------------------------------|
| `normalised` | (r_i - mean) / (std + epsilon)   | GRPO: Shao et al. 2024, DeepSeekMath (arXiv 2402.03300)        |
| `centred`    | r_i - mean                       | Dr. GRPO: Liu et al. 2025 (arXiv 2503.20783)                   |
| `rewards`    | r_i                              | for a loss with a baseline of its own                          |

`std` divides by n - 1, as torch does and with it verl's `compute_grpo_outcome_advantage` and TRL's `GRPOTrainer`;
their epsilons are 1e-6 and 1e-4. A group of one keeps its reward, as in verl: there is nothing to compare it to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Rule = Literal["normalised", "centred", "rewards"]


def group_advantages(rewards: Sequence[float], rule: Rule, *, epsilon: float) -> list[float]:
    """One for each reward, in order; `rewards` are those of one group."""
    if rule == "rewards" or len(rewards) < 2:
        return list(rewards)
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # the mean of equal numbers may be rounded to another one
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if rule == "centred":
        return centred
    std = math.sqrt(math.fsum(each * each for each in centred) / (len(rewards) - 1))
    return [each / (std + epsilon) for each in centred]

from __future__ import annotations

import statistics

import pytest

from shmstage.packing.import_advantages import group_advantages

REWARDS = [0.0, 1.0, 1.0, 0.5]


def test_normalised_is_the_difference_to_the_mean_over_the_sample_deviation() -> None:
    found = group_advantages(REWARDS, "normalised", epsilon=1e-4)
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    assert found == pytest.approx([(reward - mean) / (std + 1e-4) for reward in REWARDS])
    assert std != statistics.pstdev(REWARDS), "the deviation that divides by n would give other numbers"


def test_equal_rewards_are_no_advantage_to_anybody() -> None:
    assert group_advantages([0.7] * 3, "normalised", epsilon=1e-6) == [0.0] * 3


def test_centred_is_the_difference_to_the_mean() -> None:
    assert group_advantages(REWARDS, "centred", epsilon=1e-4) == [-0.625, 0.375, 0.375, -0.125]


def test_rewards_stay_as_they_are() -> None:
    assert group_advantages(REWARDS, "rewards", epsilon=1e-4) == REWARDS


@pytest.mark.parametrize("rule", ["normalised", "centred", "rewards"])
def test_a_group_of_one_keeps_its_reward(rule: str) -> None:
    assert group_advantages([0.25], rule, epsilon=1e-4) == [0.25]  # type: ignore[arg-type]

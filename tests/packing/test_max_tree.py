from __future__ import annotations

import random
from typing import Any

import pytest

from shmstage.packing.max_tree import MaxTree


class CountingList(list[int]):
    """Counts reads."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_the_first_index_of_at_least_a_value_is_found(size: int) -> None:
    noise = random.Random(size)
    tree, plain = MaxTree(size, 3), [3] * size
    for _ in range(200):
        index, value = noise.randrange(size), noise.randrange(6)
        tree.set(index, value)
        plain[index] = value
        wanted = noise.randrange(1, 7)
        assert tree.first_at_least(wanted) == next((i for i, v in enumerate(plain) if v >= wanted), -1)
        assert tree.largest == max(plain)


def test_doubling_keeps_the_values_and_adds_room() -> None:
    tree = MaxTree(2, -1)
    tree.set(0, 4)
    tree.set(1, 7)
    grown = tree.doubled()
    assert grown.leaves == 4
    grown.set(3, 9)
    assert [grown.first_at_least(value) for value in (4, 5, 8, 10)] == [0, 1, 3, -1]


def test_searching_and_setting_read_a_logarithmic_number_of_nodes() -> None:
    tree = MaxTree(1 << 16, 5)
    tree.nodes = counting = CountingList(tree.nodes)
    tree.first_at_least(5)
    tree.set(12_345, 9)
    assert tree.first_at_least(6) == 12_345
    assert counting.reads < 6 * 17

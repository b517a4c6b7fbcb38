"""A tree of maxima: what makes first-fit over many rows cheap."""

from __future__ import annotations

from typing import final


@final
class MaxTree:
    """Values 0 to size - 1, with "first index whose value is at least x" and "set" in log2(size) steps."""

    __slots__ = ("leaves", "nodes")

    def __init__(self, size: int, value: int) -> None:
        self.leaves = 1 << max(size - 1, 0).bit_length()
        self.nodes = [-1] * (2 * self.leaves)
        self.nodes[self.leaves : self.leaves + size] = [value] * size
        for node in range(self.leaves - 1, 0, -1):
            self.nodes[node] = max(self.nodes[2 * node], self.nodes[2 * node + 1])

    @property
    def largest(self) -> int:
        return self.nodes[1]

    def first_at_least(self, value: int) -> int:
        """First such index, -1 if there is none."""
        nodes, leaves = self.nodes, self.leaves
        if nodes[1] < value:
            return -1
        node = 1
        while node < leaves:
            node *= 2
            if nodes[node] < value:
                node += 1
        return node - leaves

    def set(self, index: int, value: int) -> None:
        nodes = self.nodes
        node = index + self.leaves
        nodes[node] = value
        while node > 1:
            left = nodes[node & ~1]
            right = nodes[node | 1]
            larger = left if left > right else right
            node >>= 1
            if nodes[node] == larger:
                return
            nodes[node] = larger

    def doubled(self) -> MaxTree:
        grown = MaxTree(2 * self.leaves, -1)
        for index in range(self.leaves):
            value = self.nodes[self.leaves + index]
            if value >= 0:
                grown.set(index, value)
        return grown

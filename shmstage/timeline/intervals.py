"""Arithmetic of [begin, end) intervals in ns: what two things cover together, apart, and after one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same ground as sorted intervals that neither overlap nor touch; empty ones are left out."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What both cover. Both sorted and disjoint, as ``union`` gives them."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What ``first`` covers and ``second`` does not. Both sorted and disjoint, as ``union`` gives them."""
    left, j = [], 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        reached, k = begin, j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > reached:
                left.append((reached, second[k][0]))
            reached = max(reached, second[k][1])
            k += 1
        if reached < end:
            left.append((reached, end))
    return left


def length_ns(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)

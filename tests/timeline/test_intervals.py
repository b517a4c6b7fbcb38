"""Interval arithmetic against sets of single nanoseconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shmstage.timeline.intervals import Interval, difference, intersection, length_ns, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def points(intervals: list[Interval]) -> set[int]:
    return {t for begin, end in intervals for t in range(begin, end)}


@given(INTERVALS, INTERVALS)
def test_it_is_what_sets_say(first: list[Interval], second: list[Interval]) -> None:
    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert points(intersection(a, b)) == points(first) & points(second)
    assert points(difference(a, b)) == points(first) - points(second)
    assert length_ns(a) == len(points(first))


@given(INTERVALS, INTERVALS)
def test_results_are_sorted_and_disjoint(first: list[Interval], second: list[Interval]) -> None:
    a, b = union(first), union(second)
    for result in (a, intersection(a, b), difference(a, b)):
        assert all(begin < end for begin, end in result)
        assert all(before[1] <= after[0] for before, after in pairwise(result))

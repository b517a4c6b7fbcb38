"""The planner by example. Lines P1 to P11 of the project's list of faults."""

from __future__ import annotations

import random

import pytest

from shmstage.errors import SettingsError, TrajectoryError
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings


def planned(lengths: list[int], settings: PlanSettings) -> list[PlannedMicrobatch]:
    planner = Planner(settings)
    for arrival, length in enumerate(lengths):
        planner.add(arrival, length)
    return planner.flush()


def rows_of(microbatches: list[PlannedMicrobatch]) -> list[list[tuple[int, int, int]]]:
    """(arrival, start, length) per row that is not padding."""
    return [
        [(segment.arrival, segment.start, segment.length) for segment in row.segments]
        for microbatch in microbatches
        for row in microbatch.rows
        if row.segments
    ]


def test_rows_never_exceed_their_capacity() -> None:
    """P1: lengths [7]*8 at capacity 8 take 8 rows; 16 trajectories of 30,720 at 32,768 take 16."""
    assert rows_of(planned([7] * 8, PlanSettings(rows=4, tokens=8))) == [[(i, 0, 7)] for i in range(8)]
    assert len(rows_of(planned([30_720] * 16, PlanSettings(rows=4, tokens=32_768)))) == 16


def test_a_row_may_be_filled_to_the_last_token() -> None:
    """P1, from the other side: a fit that is exact is a fit."""
    assert rows_of(planned([8, 5, 3], PlanSettings(rows=2, tokens=8))) == [[(0, 0, 8)], [(1, 0, 5), (2, 5, 3)]]


def test_an_over_long_trajectory_is_an_error_that_names_it() -> None:
    """P2"""
    planner = Planner(PlanSettings(rows=1, tokens=8))
    with pytest.raises(TrajectoryError, match=r"'story-9' has 9 tokens, more than tokens = 8; .*on_overlong"):
        planner.add(0, 9, "story-9")
    assert planner.flush() == []


def test_an_over_long_trajectory_is_a_counted_drop_if_asked() -> None:
    """P2: never truncated, never split."""
    planner = Planner(PlanSettings(rows=1, tokens=8, on_overlong="drop"))
    assert [planner.add(i, length) for i, length in enumerate([9, 8, 100])] == [False, True, False]
    assert planner.dropped == 2
    assert rows_of(planner.flush()) == [[(1, 0, 8)]]


def test_first_fit_decreasing_needs_at_most_eleven_rows_for_the_classic_case() -> None:
    """P3: 6x501, 6x252, 6x251, 12x248 at capacity 1000, in any order of arrival."""
    lengths = [501] * 6 + [252] * 6 + [251] * 6 + [248] * 12
    orders = [sorted(lengths)]  # first-fit in this order of arrival takes 13
    orders += [random.Random(seed).sample(lengths, len(lengths)) for seed in range(5)]
    for order in orders:
        rows = rows_of(planned(order, PlanSettings(rows=4, tokens=1000)))
        assert len(rows) <= 11
        assert sorted(length for row in rows for _, _, length in row) == sorted(lengths)


def test_an_empty_trajectory_is_counted_and_skipped() -> None:
    """P5: it takes no place, so segment ids have no gap."""
    planner = Planner(PlanSettings(rows=1, tokens=8))
    assert [planner.add(i, length) for i, length in enumerate([3, 0, 2])] == [True, False, True]
    assert planner.skipped_empty == 1
    assert planner.leftovers == (0, 2)
    assert rows_of(planner.flush()) == [[(0, 0, 3), (2, 3, 2)]]


def test_equal_lengths_are_planned_in_order_of_arrival() -> None:
    """P10: the order of the calls does not matter, the arrival number does."""
    want = [[(0, 0, 4), (1, 4, 4)], [(2, 0, 4), (3, 4, 4)]]
    settings = PlanSettings(rows=2, tokens=8)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        planner = Planner(settings)
        for arrival in order:
            planner.add(arrival, 4)
        assert rows_of(planner.flush()) == want


def test_segments_per_row_is_a_hard_limit() -> None:
    """P11"""
    rows = rows_of(planned([1] * 7, PlanSettings(rows=2, tokens=100, max_segments_per_row=3)))
    assert [len(row) for row in rows] == [3, 3, 1]


def test_segments_start_at_multiples_of_the_alignment() -> None:
    rows = rows_of(planned([5, 5, 3, 1], PlanSettings(rows=1, tokens=12, segment_align=4)))
    assert rows == [[(0, 0, 5), (2, 8, 3)], [(1, 0, 5), (3, 8, 1)]]


def test_the_alignment_gap_counts_against_the_row() -> None:
    """4 + 5 tokens are 9, but the second segment would end at token 13."""
    assert len(rows_of(planned([5, 5], PlanSettings(rows=2, tokens=12, segment_align=8)))) == 2
    assert len(rows_of(planned([5, 5], PlanSettings(rows=2, tokens=13, segment_align=8)))) == 1


def test_real_tokens_of_a_microbatch_stay_under_their_cap() -> None:
    microbatches = planned([6, 6, 6, 6, 3, 3], PlanSettings(rows=4, tokens=8, max_real_tokens=15))
    assert [microbatch.real_tokens for microbatch in microbatches] == [15, 15]
    assert all(len(microbatch.rows) == 4 for microbatch in microbatches)


def test_what_can_never_fit_under_the_cap_of_real_tokens_is_over_long() -> None:
    planner = Planner(PlanSettings(rows=4, tokens=8, max_real_tokens=5))
    with pytest.raises(TrajectoryError, match="6 tokens, more than max_real_tokens = 5"):
        planner.add(0, 6)


def test_a_window_gives_out_complete_microbatches_and_keeps_the_rest() -> None:
    planner = Planner(PlanSettings(rows=2, tokens=8))
    for arrival, length in enumerate([3, 8, 7, 8, 6, 7]):
        planner.add(arrival, length)
    # 8 8 | 7 7 | 6 (and 3 fits nowhere else)
    assert [mb.arrivals for mb in planner.close_window()] == [(1, 3), (2, 5), (4, 0)]
    assert planner.leftovers == ()
    planner.add(6, 2)
    planner.add(7, 1)
    assert planner.close_window() == []
    assert planner.leftovers == (6, 7)


def test_leftovers_are_planned_with_the_next_window_and_flushed_at_the_end() -> None:
    """B5"""
    planner = Planner(PlanSettings(rows=2, tokens=8))
    planner.add(0, 2)
    assert planner.close_window() == []
    planner.add(1, 8)
    planner.add(2, 5)
    assert [microbatch.arrivals for microbatch in planner.close_window()] == [(1, 2, 0)]
    planner.add(3, 4)
    last = planner.flush()
    assert rows_of(last) == [[(3, 0, 4)]]
    assert len(last[0].rows) == 2, "padded with an empty row"
    assert planner.flush() == []


def test_an_arrival_number_that_is_held_cannot_be_added_again() -> None:
    """P4"""
    planner = Planner(PlanSettings(rows=2, tokens=8))
    planner.add(0, 2)
    planner.close_window()
    with pytest.raises(TrajectoryError, match="arrival number 0 is held already"):
        planner.add(0, 3)


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"tokens": -1}, {"segment_align": 0}, {"max_real_tokens": 2.5}, {"on_overlong": "cut"}],
)
def test_settings_out_of_range_are_refused_with_name_and_value(wrong: dict[str, object]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(SettingsError, match=rf"{name} = {value!r}"):
        PlanSettings(**{"rows": 1, "tokens": 1, **wrong})


@pytest.mark.slow
def test_a_hundred_thousand_trajectories_leave_less_than_one_percent_of_the_rows_empty() -> None:
    lengths = random.Random(0).choices(range(1, 30_000), k=100_000)
    microbatches = planned(lengths, PlanSettings(rows=64, tokens=65_536))
    assert sum(len(microbatch.arrivals) for microbatch in microbatches) == 100_000
    assert sum(lengths) / len(rows_of(microbatches)) / 65_536 > 0.99

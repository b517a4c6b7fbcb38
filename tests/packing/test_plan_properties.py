"""What holds for every plan. Lines P1, P4, P10 and P11 of the project's list of faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings

TOKENS = 20
FAST = settings(max_examples=35, derandomize=True, database=None, deadline=None)

plan_settings = st.builds(
    PlanSettings,
    rows=st.integers(1, 4),
    tokens=st.just(TOKENS),
    max_segments_per_row=st.integers(0, 3),
    segment_align=st.sampled_from([1, 4]),
    max_real_tokens=st.sampled_from([0, TOKENS, 33]),
    on_overlong=st.just("drop"),
)
#: lengths of some windows; 0 is empty, above TOKENS over-long
windows = st.lists(st.lists(st.integers(0, TOKENS + 2), max_size=12), max_size=5)


def plan_windows(chosen: PlanSettings, lengths: Iterable[list[int]]) -> tuple[Planner, list[PlannedMicrobatch]]:
    planner = Planner(chosen)
    out: list[PlannedMicrobatch] = []
    arrival = 0
    for window in lengths:
        for length in window:
            planner.add(arrival, length)
            arrival += 1
        out += planner.close_window()
    return planner, out + planner.flush()


@FAST
@given(plan_settings, windows)
def test_what_goes_in_comes_out_once_and_whole(chosen: PlanSettings, lengths: list[list[int]]) -> None:
    """P4: multisets of (arrival, length) are compared; a union would miss what comes twice."""
    planner, microbatches = plan_windows(chosen, lengths)
    every = [length for window in lengths for length in window]
    kept = Counter((arrival, length) for arrival, length in enumerate(every) if 0 < length <= TOKENS)
    out = Counter((s.arrival, s.length) for microbatch in microbatches for s in microbatch.segments())
    assert out == kept
    assert planner.skipped_empty == every.count(0)
    assert planner.dropped == sum(length > TOKENS for length in every)
    assert planner.leftovers == ()


@FAST
@given(plan_settings, windows)
def test_no_row_and_no_microbatch_exceeds_a_limit(chosen: PlanSettings, lengths: list[list[int]]) -> None:
    """P1, P11"""
    _, microbatches = plan_windows(chosen, lengths)
    for microbatch in microbatches:
        assert len(microbatch.rows) == chosen.rows
        assert microbatch.real_tokens <= (chosen.max_real_tokens or chosen.rows * TOKENS)
        for row in microbatch.rows:
            assert len(row.segments) <= (chosen.max_segments_per_row or TOKENS)
            end = 0
            for segment in row.segments:
                assert segment.start >= end
                assert segment.start % chosen.segment_align == 0
                assert segment.start - end < chosen.segment_align
                end = segment.start + segment.length
            assert end <= TOKENS


@FAST
@given(plan_settings, st.lists(st.integers(1, TOKENS), max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_calls_inside_a_window_changes_nothing(chosen: PlanSettings, lengths: list[int], rng) -> None:  # type: ignore[no-untyped-def]
    """P10: a producer may hand over in any chunks and interleaving; the arrival numbers decide."""
    _, want = plan_windows(chosen, [lengths])
    shuffled = list(enumerate(lengths))
    rng.shuffle(shuffled)
    planner = Planner(chosen)
    for arrival, length in shuffled:
        planner.add(arrival, length)
    assert planner.close_window() + planner.flush() == want


@FAST
@given(plan_settings, st.lists(st.integers(1, TOKENS), max_size=25), st.integers(0, 6))
def test_planning_the_rest_again_gives_the_rest_of_the_plan(
    chosen: PlanSettings, lengths: list[int], done: int
) -> None:
    """P4 over a resume: trajectories not trained yet, in arrival order, are all the state there is."""
    _, whole = plan_windows(chosen, [lengths])
    trained = {arrival for microbatch in whole[:done] for arrival in microbatch.arrivals}
    resumed = Planner(chosen)
    for arrival, length in enumerate(lengths):
        if arrival not in trained:
            resumed.add(arrival, length)
    assert resumed.flush() == whole[done:]


@FAST
@given(plan_settings, st.lists(st.integers(1, TOKENS), max_size=25))
def test_a_window_holds_back_less_than_one_microbatch(chosen: PlanSettings, lengths: list[int]) -> None:
    planner = Planner(chosen)
    for arrival, length in enumerate(lengths):
        planner.add(arrival, length)
    complete = planner.close_window()
    rest = planner.flush()
    assert len(rest) <= 1
    for microbatch in rest:
        assert not microbatch.rows[-1].segments, "held back although every row was in use"
    assert all(microbatch.rows[-1].segments for microbatch in complete[-1:]) or chosen.max_real_tokens

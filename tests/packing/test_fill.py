"""The native fill: what it writes, compared with numpy, and what it refuses before it writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_making import make_trajectory

from shmstage.errors import LayoutError, SlotStateError, TrajectoryError
from shmstage.packing.fields import OPTIONAL_FIELDS, microbatch_layout
from shmstage.packing.fill import FillStats, fill_microbatch, microbatch_digest
from shmstage.packing.plan import PlannedMicrobatch, PlannedRow, PlannedSegment, Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory
from shmstage.testing.numpy_packer import pack_with_numpy

GARBAGE = 0xA5
LAYERS, TOP_K = 2, 3


def plan_of(
    trajectories: dict[int, Trajectory], rows: int, tokens: int, segment_align: int = 1
) -> list[PlannedMicrobatch]:
    planner = Planner(PlanSettings(rows=rows, tokens=tokens, segment_align=segment_align))
    for arrival, trajectory in trajectories.items():
        planner.add(arrival, trajectory.length)
    return planner.flush()


def slot_views(
    rows: int, tokens: int, optional: frozenset[str] = frozenset(), shift: int = 0
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """A slot full of garbage, with a garbage fence before and after, and its views."""
    layout = microbatch_layout(rows, tokens, optional=optional, layers=LAYERS, top_k=TOP_K)
    slot = np.full(layout.nbytes + 128, GARBAGE, np.uint8)
    return slot, layout.views(slot, 64 + shift)


def assert_bits_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].tobytes() == want[name].tobytes(), name


@settings(max_examples=20, derandomize=True, database=None, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    optional=st.sets(st.sampled_from(sorted(OPTIONAL_FIELDS))).map(frozenset),
    rows=st.integers(1, 4),
    segment_align=st.sampled_from([1, 4]),
    whole_routing=st.booleans(),
    shift=st.sampled_from([0, 1, 2, 4]),
)
def test_every_byte_is_what_numpy_would_write(
    lengths: list[int], optional: frozenset[str], rows: int, segment_align: int, whole_routing: bool, shift: int
) -> None:
    """All optional fields, routing of n and n - 1 rows, padding rows, any address, garbage underneath."""
    trajectories = {
        arrival: make_trajectory(
            length,
            seed=arrival,
            optional=optional,
            layers=LAYERS,
            top_k=TOP_K,
            routing_rows=length if whole_routing else length - 1,
        )
        for arrival, length in enumerate(lengths)
    }
    for plan in plan_of(trajectories, rows, 12, segment_align):
        slot, views = slot_views(rows, 12, optional, shift)
        untouched = slot.copy()
        fill_microbatch(plan, trajectories, views)
        assert_bits_equal(views, pack_with_numpy(plan, trajectories, 12))
        for view in views.values():
            view.view(np.uint8)[:] = GARBAGE
        assert np.array_equal(slot, untouched), "bytes outside the fields were written"


def test_a_microbatch_of_padding_is_zeros_and_unset_routing() -> None:
    """P13: padding is -1, never expert 0."""
    _, views = slot_views(2, 4, frozenset({"routing"}))
    stats = fill_microbatch(PlannedMicrobatch((PlannedRow(()),) * 2), {}, views)
    assert stats == FillStats(loss_tokens=0, segments=0, real_tokens=0)
    assert (views.pop("routed_experts") == -1).all()
    assert all((view == 0).all() for view in views.values())


def test_segments_are_numbered_from_one_and_positions_restart() -> None:
    """P5, P8, P11: ids are dense, the mask is its own array."""
    trajectories = {7: make_trajectory(3, loss_mask=[0, 0, 0]), 9: make_trajectory(2, loss_mask=[1, 1])}
    (plan,) = plan_of(trajectories, 1, 8, segment_align=4)
    _, views = slot_views(1, 8)
    stats = fill_microbatch(plan, trajectories, views)
    assert views["segment_ids"].tolist() == [[1, 1, 1, 0, 2, 2, 0, 0]]
    assert views["segment_positions"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert views["completion_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0]]
    # P11: the fully masked segment is not an active one
    assert stats == FillStats(loss_tokens=1, segments=1, real_tokens=5)


def test_pad_tokens_and_holes_in_the_mask_do_not_shorten_a_segment() -> None:
    """P6"""
    trajectories = {0: make_trajectory(4, tokens=[0, 0, 0, 0], loss_mask=[0, 1, 0, 0])}
    (plan,) = plan_of(trajectories, 1, 6)
    _, views = slot_views(1, 6)
    fill_microbatch(plan, trajectories, views)
    assert views["segment_ids"].tolist() == [[1, 1, 1, 1, 0, 0]]


def test_no_token_gets_its_neighbours_experts() -> None:
    """P13: with n - 1 rows the last token of each segment is unset, all others keep their own."""
    optional = frozenset({"routing"})
    trajectories = {i: make_trajectory(3, seed=i, optional=optional, routing_rows=2) for i in range(2)}
    (plan,) = plan_of(trajectories, 1, 8)
    _, views = slot_views(1, 8, optional)
    fill_microbatch(plan, trajectories, views)
    packed = views["routed_experts"][0]
    for number in range(2):
        assert np.array_equal(packed[3 * number : 3 * number + 2], trajectories[number].routing)
    assert (packed[[2, 5, 6, 7]] == -1).all()


def test_loss_tokens_do_not_depend_on_the_packing() -> None:
    """P9: the denominator of 1 x N, N x M, with padding rows and without, is that of the trajectories."""
    trajectories = {i: make_trajectory(2 + i, seed=i) for i in range(6)}
    want = sum(int(t.loss_mask[1:].sum()) for t in trajectories.values())
    for rows, tokens, segment_align in ((1, 40, 1), (6, 7, 1), (4, 16, 1), (9, 8, 8)):
        got = 0
        for plan in plan_of(trajectories, rows, tokens, segment_align):
            stats = fill_microbatch(plan, trajectories, slot_views(rows, tokens)[1])
            got += stats.loss_tokens
        assert got == want


def one_segment(start: int = 0, length: int = 3, rows: int = 2, row: int = 0) -> PlannedMicrobatch:
    chosen = [PlannedRow(()) for _ in range(rows)]
    chosen[row] = PlannedRow((PlannedSegment(0, start, length),))
    return PlannedMicrobatch(tuple(chosen))


def assert_refused_unwritten(
    error: type[Exception],
    match: str,
    plan: PlannedMicrobatch,
    views: dict[str, Any],
    slot: np.ndarray[Any, Any],
    trajectories: dict[int, Trajectory] | None = None,
) -> None:
    before = slot.copy()
    with pytest.raises(error, match=match):
        fill_microbatch(plan, {0: make_trajectory(3)} if trajectories is None else trajectories, views)
    assert np.array_equal(slot, before)


@pytest.mark.parametrize("name", ["completion_ids", "segment_ids", "segment_positions", "completion_mask"])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda view: view[:, :-1], LayoutError, "wants|lack|rows"),
        (lambda view: view[:1], LayoutError, "wants|rows"),
        (lambda view: view.reshape(-1), LayoutError, "wants|has segment_ids"),
        (lambda view: view.view(np.int16), LayoutError, "wants"),
        (lambda view: np.asfortranarray(view), LayoutError, r"^view \w+ is not C-contiguous"),
    ],
    ids=["short rows", "few rows", "flat", "narrow dtype", "column order"],
)
def test_a_view_that_does_not_match_is_refused_before_anything_is_written(
    name: str, change: Any, error: type[Exception], match: str
) -> None:
    slot, views = slot_views(2, 6)
    views[name] = change(views[name])
    assert_refused_unwritten(error, match, one_segment(), views, slot)


def test_a_published_view_is_refused() -> None:
    slot, views = slot_views(2, 6)
    views["advantages"].flags.writeable = False
    assert_refused_unwritten(SlotStateError, "advantages is read-only", one_segment(), views, slot)


@pytest.mark.parametrize(("extra", "missing"), [("ghosts", None), (None, "advantages"), (None, "segment_positions")])
def test_views_that_are_missing_or_too_many_are_named(extra: str | None, missing: str | None) -> None:
    slot, views = slot_views(2, 6)
    if extra:
        views[extra] = np.zeros((2, 6), np.float32)
    if missing:
        del views[missing]
    assert_refused_unwritten(LayoutError, str(extra or missing), one_segment(), views, slot)


@pytest.mark.parametrize("carried", [True, False])
def test_an_optional_field_and_its_view_go_together(carried: bool) -> None:
    """P12: neither is a field dropped silently nor are zeros passed off as data."""
    optional = frozenset({"returns"})
    slot, views = slot_views(2, 6, frozenset() if carried else optional)
    trajectories = {0: make_trajectory(3, optional=optional if carried else frozenset())}
    assert_refused_unwritten(LayoutError, "returns", one_segment(), views, slot, trajectories)


def test_a_field_that_only_some_trajectories_carry_is_refused() -> None:
    """P12"""
    trajectories = {0: make_trajectory(3, name="has", returns=[0.0] * 3), 1: make_trajectory(2, name="lacks")}
    (plan,) = plan_of(trajectories, 2, 6)
    slot, views = slot_views(2, 6, frozenset({"returns"}))
    assert_refused_unwritten(TrajectoryError, "'has' has returns .*'lacks' has not", plan, views, slot, trajectories)


@pytest.mark.parametrize(
    "plan",
    [
        one_segment(start=4),
        one_segment(start=2**63),
        one_segment(start=2**64 - 2),
        one_segment(start=2**64),
        one_segment(start=-1),
        PlannedMicrobatch((PlannedRow((PlannedSegment(0, 0, 3), PlannedSegment(0, 2, 3))), PlannedRow(()))),
        PlannedMicrobatch((PlannedRow((PlannedSegment(0, 3, 3), PlannedSegment(0, 0, 3))), PlannedRow(()))),
    ],
    ids=["past the end", "huge", "overflowing", "past 64 bits", "negative", "overlapping", "out of order"],
)
def test_a_plan_that_would_write_out_of_bounds_is_refused(plan: PlannedMicrobatch) -> None:
    """S75: compared without an overflow."""
    slot, views = slot_views(2, 6)
    match = "the plan does not fit (into 2 rows of 6 tokens|its trajectories)"
    assert_refused_unwritten(LayoutError, match, plan, views, slot)


def test_a_plan_of_another_number_of_rows_is_refused() -> None:
    slot, views = slot_views(2, 6)
    assert_refused_unwritten(LayoutError, "2 rows, the plan 3", one_segment(rows=3), views, slot)


def test_a_plan_for_other_trajectories_is_refused() -> None:
    slot, views = slot_views(2, 6)
    assert_refused_unwritten(TrajectoryError, "number 0, which was not given", one_segment(), views, slot, {})
    assert_refused_unwritten(TrajectoryError, "planned with 4 tokens, got 3", one_segment(length=4), views, slot)


def test_the_digest_follows_content_row_and_start_only() -> None:
    trajectories = {0: make_trajectory(3)}
    digest = microbatch_digest(one_segment(), trajectories)
    assert len(digest) == 16
    others = [
        microbatch_digest(one_segment(start=1), trajectories),
        microbatch_digest(one_segment(row=1), trajectories),
        microbatch_digest(one_segment(rows=3), trajectories),
        microbatch_digest(one_segment(), {0: make_trajectory(3, seed=1)}),
    ]
    assert len({digest, *others}) == 5
    renamed = {0: make_trajectory(3, name="other", group_id="g", batch_index=4)}
    assert microbatch_digest(one_segment(), renamed) == digest


def test_the_same_arrivals_give_the_same_bytes_and_digest() -> None:
    """P10: byte-identical micro-batches, whatever the order of the calls."""
    trajectories = {i: make_trajectory(3 + i % 2, seed=i) for i in range(8)}
    results = []
    for order in (list(trajectories), list(reversed(trajectories))):
        plans = plan_of({arrival: trajectories[arrival] for arrival in order}, 2, 8)
        packed = []
        for plan in plans:
            slot, views = slot_views(2, 8)
            fill_microbatch(plan, trajectories, views)
            packed.append((slot.tobytes(), microbatch_digest(plan, trajectories)))
        results.append(packed)
    assert results[0] == results[1]

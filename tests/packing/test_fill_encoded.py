"""The fill writes routing straight into its encoded form: what it writes, compared with numpy, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_making import make_trajectory

from shmstage.errors import LayoutError, TrajectoryError
from shmstage.packing.expert_check import check_experts
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import FillStats, fill_microbatch, microbatch_digest
from shmstage.packing.plan import PlannedMicrobatch, PlannedRow, Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory
from shmstage.testing.numpy_packer import encode_routing, pack_with_numpy

GARBAGE, TOKENS, LAYERS, TOP_K = 0xA5, 12, 3, 2
ROUTED = frozenset({"routing", "returns"})
ENCODED = ("ragged", "ragged_packed")

Slot = np.ndarray[Any, Any]
Views = dict[str, Slot]


def slot_views(
    encoding: str, *, rows: int, experts: int, max_real_tokens: int = 0, shift: int = 0
) -> tuple[Slot, Views]:
    """A slot full of garbage, with a garbage fence before and after, and its views."""
    layout = microbatch_layout(
        rows, TOKENS, optional=ROUTED, layers=LAYERS, top_k=TOP_K, encoding=encoding, experts=experts,
        max_real_tokens=max_real_tokens,
    )  # fmt: skip
    slot = np.full(layout.nbytes + 128, GARBAGE, np.uint8)
    return slot, layout.views(slot, 64 + shift)


def routed(lengths: list[int], experts: int, unset: bool = False) -> dict[int, Trajectory]:
    found = {}
    for number, length in enumerate(lengths):
        rows = length - number % 2  # some with a row for the last token, some without
        one = make_trajectory(
            length, name=f"t{number}", seed=number, optional=ROUTED, layers=LAYERS, top_k=TOP_K, experts=experts,
            routing_rows=rows,
        )  # fmt: skip
        if unset:
            routing = np.array(one.routing)
            routing[np.random.default_rng(number).random(routing.shape[:2]) < 0.4] = -1
            one = make_trajectory(
                length, name=f"t{number}", seed=number, optional=ROUTED, layers=LAYERS, top_k=TOP_K, experts=experts,
                routing=routing,
            )  # fmt: skip
        found[number] = one
    return found


def planned(trajectories: dict[int, Trajectory], rows: int, **limits: int) -> list[PlannedMicrobatch]:
    planner = Planner(PlanSettings(rows=rows, tokens=TOKENS, **limits))
    for arrival, trajectory in trajectories.items():
        planner.add(arrival, trajectory.length)
    return planner.flush()


@settings(max_examples=30, derandomize=True, database=None, deadline=None)
@given(
    lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=12),
    rows=st.integers(1, 4),
    segment_align=st.sampled_from([1, 4]),
    max_real_tokens=st.sampled_from([0, 13, 16]),
    experts=st.sampled_from([2, 5, 16, 300, 1 << 15]),
    shift=st.sampled_from([0, 1, 4]),
    encoding=st.sampled_from(ENCODED),
    unset=st.booleans(),
)
def test_every_byte_is_what_numpy_would_write(
    lengths: list[int], rows: int, segment_align: int, max_real_tokens: int, experts: int, shift: int, encoding: str,
    unset: bool,
) -> None:  # fmt: skip
    """Gaps, padding rows, capacity to spare, any address, garbage underneath and none written outside."""
    trajectories = routed(lengths, experts, unset)
    for plan in planned(trajectories, rows, segment_align=segment_align, max_real_tokens=max_real_tokens):
        slot, views = slot_views(encoding, rows=rows, experts=experts, max_real_tokens=max_real_tokens, shift=shift)
        untouched = slot.copy()
        fill_microbatch(plan, trajectories, views)
        want = encode_routing(
            pack_with_numpy(plan, trajectories, TOKENS), encoding, experts=experts, max_real_tokens=max_real_tokens
        )
        assert views.keys() == want.keys()
        for name in want:
            assert views[name].tobytes() == want[name].tobytes(), name
        for view in views.values():
            view.view(np.uint8)[:] = GARBAGE
        assert np.array_equal(slot, untouched), "bytes outside the fields were written"


@pytest.mark.parametrize("encoding", ENCODED)
def test_a_microbatch_of_padding_has_no_token_and_nothing_set(encoding: str) -> None:
    _, views = slot_views(encoding, rows=2, experts=16)
    stats = fill_microbatch(PlannedMicrobatch((PlannedRow(()),) * 2), {}, views)
    assert stats == FillStats(loss_tokens=0, segments=0, real_tokens=0)
    if encoding == "ragged":
        assert (views.pop("routed_experts_ragged") == -1).all()
    assert all((view == 0).all() for view in views.values())


@pytest.mark.parametrize("encoding", ENCODED)
def test_more_real_tokens_than_there_is_room_for_are_refused_unwritten(encoding: str) -> None:
    trajectories = routed([12, 12], 16)
    (plan,) = planned(trajectories, 2)
    slot, views = slot_views(encoding, rows=2, experts=16, max_real_tokens=16)
    before = slot.copy()
    with pytest.raises(LayoutError, match="24 real tokens; the slot has room for the routing of 16"):
        fill_microbatch(plan, trajectories, views)
    assert np.array_equal(slot, before)


def test_a_view_with_too_few_bits_for_the_ids_is_refused_unwritten() -> None:
    trajectories = routed([4], 17)
    (plan,) = planned(trajectories, 1)
    slot, views = slot_views("ragged_packed", rows=1, experts=16)
    before = slot.copy()
    with pytest.raises(LayoutError, match="ids of 17 experts take 5 bits, the view routed_experts_packed has 4"):
        fill_microbatch(plan, trajectories, views)
    assert np.array_equal(slot, before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("routed_experts_packed", lambda view: view[:-1]),
        ("routed_experts_packed", lambda view: view[:, :, :1]),
        ("routed_experts_packed", lambda view: view.reshape(-1)),
        ("routed_experts_validity", lambda view: view.view(np.int8)),
        ("routed_experts_validity", lambda view: view[:, :1]),
        ("routed_experts_offsets", lambda view: view[:-1]),
        ("routed_experts_offsets", lambda view: view.view(np.uint32)),
    ],
)
def test_a_view_of_another_form_is_refused_unwritten(name: str, change: Any) -> None:
    trajectories = routed([4], 16)
    (plan,) = planned(trajectories, 1)
    slot, views = slot_views("ragged_packed", rows=1, experts=16)
    before = slot.copy()
    with pytest.raises(LayoutError):
        fill_microbatch(plan, trajectories, {**views, name: change(views[name])})
    assert np.array_equal(slot, before)


def test_an_encoding_without_one_of_its_fields_is_refused() -> None:
    trajectories = routed([4], 16)
    (plan,) = planned(trajectories, 1)
    _, views = slot_views("ragged_packed", rows=1, experts=16)
    del views["routed_experts_validity"]
    with pytest.raises(LayoutError, match=r"the views lack \['routed_experts_validity'\]"):
        fill_microbatch(plan, trajectories, views)


def test_the_micro_batch_digest_is_of_the_trajectories_whatever_the_slot_holds() -> None:
    trajectories = routed([4, 7], 16)
    (plan,) = planned(trajectories, 2)
    want = microbatch_digest(plan, trajectories)
    for encoding in ("dense", *ENCODED):
        fill_microbatch(plan, trajectories, slot_views(encoding, rows=2, experts=16)[1])
        assert microbatch_digest(plan, trajectories) == want


def test_an_id_that_does_not_fit_is_refused_on_arrival_with_the_number_to_set() -> None:
    unknown = routed([6], 16)[0]
    unknown = make_trajectory(6, name="t", optional=ROUTED, routing=unknown.routing, experts=0)
    largest = int(unknown.routing.max())  # type: ignore[union-attr]
    check_experts(unknown, largest + 1)
    check_experts(unknown, 0)  # nobody knows
    check_experts(make_trajectory(6), 1)  # nothing to know
    with pytest.raises(TrajectoryError, match=rf"'t': routing wants .* below experts = {largest}, got {largest}; set"):
        check_experts(unknown, largest)
    check_experts(routed([6], 16)[0], 16)

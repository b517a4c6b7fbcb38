"""Trajectories wait with their routing packed: nothing that is made of them differs, and what they take is counted."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fill_encoded import LAYERS, TOP_K, planned, routed, slot_views
from trajectory_making import make_trajectory

from shmstage.errors import LayoutError, SettingsError, TrajectoryError
from shmstage.packing.bundle import read_bundle, write_bundle
from shmstage.packing.fill import fill_microbatch, microbatch_digest
from shmstage.packing.group_record import decode_group, encode_group
from shmstage.packing.held_form import HeldForm
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.routing import id_bits
from shmstage.packing.source import BundleSource
from shmstage.packing.trajectory import Group
from shmstage.testing.numpy_packer import encode_routing, pack_with_numpy

TOKENS = 12


@settings(max_examples=25, derandomize=True, database=None, deadline=None)
@given(
    lengths=st.lists(st.integers(1, TOKENS), min_size=1, max_size=12),
    experts=st.sampled_from([2, 5, 128, 256, 300, 384, 512, 1 << 15]),
    encoding=st.sampled_from(["dense", "ragged", "ragged_packed"]),
    held=st.sampled_from(["all", "some"]),
    unset=st.booleans(),
)
def test_a_slot_is_the_same_whether_its_trajectories_waited_packed_or_not(
    lengths: list[int], experts: int, encoding: str, held: str, unset: bool
) -> None:
    raw = routed(lengths, experts, unset)
    form = HeldForm("ragged_packed", experts)
    waiting = {number: form.of(one) if held == "all" or number % 2 else one for number, one in raw.items()}
    for plan in planned(raw, 2):
        want = pack_with_numpy(plan, raw, TOKENS)
        if encoding != "dense":
            want = encode_routing(want, encoding, experts=experts)
        views, others = (slot_views(encoding, rows=2, experts=experts)[1] for _ in range(2))
        assert fill_microbatch(plan, waiting, views) == fill_microbatch(plan, raw, others)
        for name in want:
            assert views[name].tobytes() == want[name].tobytes(), name
        assert microbatch_digest(plan, waiting) == microbatch_digest(plan, raw)
        oracle = pack_with_numpy(plan, waiting, TOKENS)
        assert all(np.array_equal(array, oracle[name]) for name, array in want.items() if name in oracle)


def test_packed_it_is_the_same_trajectory_in_fewer_bytes() -> None:
    (raw,) = routed([12], 512, unset=True).values()
    held = HeldForm("ragged_packed", 512).of(raw)
    assert isinstance(held.routing, HeldRouting)
    assert (held.digest, held.loss_tokens, held.optional) == (raw.digest, raw.loss_tokens, raw.optional)
    assert held.routing.shape == np.asarray(raw.routing).shape
    np.testing.assert_array_equal(np.asarray(held.routing), raw.routing)
    assert raw.nbytes - held.nbytes == raw.routing.nbytes - 2 * LAYERS * (TOP_K * 9 + 1)  # type: ignore[union-attr]
    # what waits in this form already is not made again
    assert HeldForm("ragged_packed", 512).of(held) is held
    assert HeldForm("ragged", 512).of(raw) is raw
    assert HeldForm("ragged_packed", 512).of(make_trajectory(3)).routing is None


def test_routing_packed_for_more_experts_in_as_many_bits_is_checked() -> None:
    (raw,) = routed([12], 128, unset=False).values()
    held = HeldForm("ragged_packed", 128).of(raw)
    largest = int(np.asarray(held.routing).max())
    for one in (raw, held):
        with pytest.raises(TrajectoryError, match=f"below experts = {largest}, got {largest}"):
            HeldForm("ragged_packed", largest).of(one)
    assert id_bits(largest) == id_bits(128)


def test_a_trajectory_that_waits_packed_can_be_journaled_bundled_and_pickled(tmp_path: Path) -> None:
    raw = list(routed([5, 12, 1], 16, unset=True).values())
    held = [HeldForm("ragged_packed", 16).of(one) for one in raw]
    assert encode_group(Group("g", 0, tuple(held))) == encode_group(Group("g", 0, tuple(raw)))
    back = decode_group(b"".join(encode_group(Group("g", 0, tuple(held)))), tmp_path)
    assert [one.digest for one in back.trajectories] == [one.digest for one in raw]
    for one in (*raw, *held):
        again = pickle.loads(pickle.dumps(one))  # Ray carries trajectories so
        assert again.digest == one.digest and type(again.routing) is type(one.routing)
        (plan,) = planned({0: again}, 1)
        _, views = slot_views("dense", rows=1, experts=16)
        fill_microbatch(plan, {0: again}, views)
        np.testing.assert_array_equal(views["completion_ids"][0, : one.length], one.tokens)


def test_an_id_beyond_the_number_of_experts_is_refused_before_it_could_be_cut_off() -> None:
    routing = np.full((3, LAYERS, 1), 7, np.int16)
    one = make_trajectory(3, name="t", routing=routing, experts=0)
    assert np.array_equal(np.asarray(HeldForm("ragged_packed", 8).of(one).routing), routing)
    with pytest.raises(TrajectoryError, match="'t': routing wants expert ids below experts = 7, got 7"):
        HeldForm("ragged_packed", 7).of(one)


def test_a_slot_of_another_width_is_refused_unwritten() -> None:
    trajectories = {0: HeldForm("ragged_packed", 300).of(routed([4], 16)[0])}
    (plan,) = planned(trajectories, 1)
    slot, views = slot_views("ragged_packed", rows=1, experts=16)
    before = slot.copy()
    with pytest.raises(LayoutError, match="routing is held in 9 bits an id, the view routed_experts_packed has 4"):
        fill_microbatch(plan, trajectories, views)
    assert np.array_equal(slot, before)


def test_a_bundle_is_held_in_the_form_of_the_settings(tmp_path: Path) -> None:
    raw = list(routed([5, 12, 1], 16).values())
    write_bundle(tmp_path / "b", raw, provenance={}, shard_nbytes=1)
    source = BundleSource(tmp_path / "b", "ragged_packed", 300)
    held = [one for group in source.groups(0) for one in group.trajectories]
    assert [one.digest for one in held] == [one.digest for one in raw]
    assert {one.routing.bits for one in held if isinstance(one.routing, HeldRouting)} == {id_bits(300)}
    assert all(isinstance(one.routing, HeldRouting) for one in held)
    assert not any(isinstance(one.routing, HeldRouting) for one in read_bundle(tmp_path / "b").trajectories)
    with pytest.raises(SettingsError, match="experts = 4: the bundle .* chooses from 16"):
        BundleSource(tmp_path / "b", "ragged_packed", 4)

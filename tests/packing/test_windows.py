"""Every host fills its own window: put together they are, byte for byte, what one host would have filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_making import make_trajectory
from window_making import (
    GARBAGE,
    Views,
    filled_window,
    part_and_pieces,
    put_together,
    references,
    windows_between,
)

from shmstage.errors import LayoutError, ProtocolError, SlotStateError, TrajectoryError
from shmstage.packing.fields import OPTIONAL_FIELDS, ROUTING, microbatch_layout
from shmstage.packing.fill import fill_microbatch, microbatch_digest
from shmstage.packing.held_form import HeldForm
from shmstage.packing.parts import digest_of_rows, part_of, read_part, row_digests
from shmstage.packing.plan import PlannedMicrobatch, PlannedRow, Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory
from shmstage.packing.window import Window
from shmstage.packing.window_fill import fill_window
from shmstage.testing.numpy_packer import encode_routing, pack_with_numpy

EXPERTS = [1, 2, 17, 128, 256, 257, 300, 1 << 15]
OPTIONALS = [frozenset({"routing"}), frozenset({"routing", "returns", "ref_logprobs"}), OPTIONAL_FIELDS]
MANY = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def routed(
    lengths: list[int],
    seed: int,
    *,
    optional: frozenset[str],
    experts: int,
    held: str = "none",
    layers: int = 3,
    top_k: int = 2,
) -> dict[int, Trajectory]:
    """Routing of n and of n-1 rows, some choices unset; of them "all", "some" or "none" waited packed."""
    dice = np.random.default_rng(seed)
    form = HeldForm("ragged_packed", experts)
    found = {}
    for number, length in enumerate(lengths):
        changes: dict[str, Any] = {}
        if "routing" in optional:
            rows = max(length - int(dice.integers(2)), 0)
            first = dice.integers(0, experts, (rows, layers, 1))
            routing = ((first + np.arange(top_k)) % experts).astype(np.int16)  # distinct as long as top_k <= experts
            routing[dice.random(routing.shape[:2]) < 0.3] = -1
            changes = {"routing": routing, "experts": experts}
        one = make_trajectory(length, name=f"t{number}", seed=seed + number, optional=optional - {"routing"}, **changes)
        found[number] = form.of(one) if held == "all" or (held == "some" and dice.random() < 0.5) else one
    return found


def planned(trajectories: dict[int, Trajectory], rows: int, tokens: int, **limits: int) -> list[PlannedMicrobatch]:
    planner = Planner(PlanSettings(rows=rows, tokens=tokens, **limits))
    for arrival, trajectory in trajectories.items():
        planner.add(arrival, trajectory.length)
    return planner.flush()


def filled_whole(plan: PlannedMicrobatch, trajectories: dict[int, Trajectory], tokens: int, layout: Any) -> Views:
    placed = microbatch_layout(len(plan.rows), tokens, **layout)
    views = placed.views(np.full(placed.nbytes, GARBAGE, np.uint8), 0)
    fill_microbatch(plan, trajectories, views)
    return views


def assert_same(got: Views, want: Views) -> None:
    assert list(got) == list(want)
    for name in want:
        assert (got[name].dtype, got[name].shape) == (want[name].dtype, want[name].shape)
        assert got[name].tobytes() == want[name].tobytes(), name


def cuts(size: int) -> st.SearchStrategy[list[int]]:
    """Both ends and up to three places between them."""
    return st.sets(st.integers(1, size - 1), max_size=3).map(lambda inner: [0, *sorted(inner), size])


@pytest.mark.slow
@MANY
@given(data=st.data(), seed=st.integers(0, 1 << 20), rows=st.integers(2, 5), tokens=st.integers(9, 40))
def test_dense_windows_cut_anywhere_are_byte_for_byte_the_whole(data: Any, seed: int, rows: int, tokens: int) -> None:
    """Rows only, tokens only, both; segments across any number of borders; no optional field, some, all."""
    lengths = data.draw(st.lists(st.integers(1, tokens), min_size=1, max_size=14), "lengths")
    experts = data.draw(st.sampled_from(EXPERTS), "experts")
    top_k = 1 if experts == 1 else 2
    optional = data.draw(st.sampled_from([frozenset(), frozenset({"returns"}), *OPTIONALS]), "optional")
    held = data.draw(st.sampled_from(["none", "some", "all"]), "held") if "routing" in optional else "none"
    trajectories = routed(lengths, seed, optional=optional, experts=experts, held=held, top_k=top_k)
    layout = {"optional": optional, "layers": 3, "top_k": top_k}
    row_cuts, token_cuts = data.draw(cuts(rows), "rows at"), data.draw(cuts(tokens), "tokens at")
    windows = windows_between(row_cuts, token_cuts)
    align = data.draw(st.sampled_from([1, 4]), "align")
    shift = data.draw(st.sampled_from([0, 1, 4]), "shift")
    for plan in planned(trajectories, rows, tokens, segment_align=align):
        parts = [filled_window(plan, trajectories, window, layout, shift) for window in windows]
        assert_same(put_together(parts, len(token_cuts) - 1), filled_whole(plan, trajectories, tokens, layout))


@pytest.mark.slow
@MANY
@given(
    data=st.data(),
    seed=st.integers(0, 1 << 20),
    encoding=st.sampled_from(["ragged", "ragged_packed"]),
    hosts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    devices=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    tile=st.tuples(st.integers(1, 2), st.integers(3, 21)),
)
def test_encoded_windows_of_any_tiles_are_byte_for_byte_what_numpy_makes_of_the_whole(
    data: Any, seed: int, encoding: str, hosts: tuple[int, int], devices: tuple[int, int], tile: tuple[int, int]
) -> None:
    """Tiles of any size, several to a host; held in groups of 8 that no border respects; room to spare."""
    tiles = hosts[0] * devices[0], hosts[1] * devices[1]
    rows, tokens = tiles[0] * tile[0], tiles[1] * tile[1]
    lengths = data.draw(st.lists(st.integers(1, tokens), min_size=1, max_size=14), "lengths")
    experts = data.draw(st.sampled_from(EXPERTS), "experts")
    top_k = 1 if experts == 1 else 2
    optional = data.draw(st.sampled_from(OPTIONALS), "optional")
    held = data.draw(st.sampled_from(["none", "some", "all"]), "held")
    limit = data.draw(st.sampled_from([0, tokens]), "max_real_tokens")
    trajectories = routed(lengths, seed, optional=optional, experts=experts, held=held, top_k=top_k)
    form = {"encoding": encoding, "experts": experts, "max_real_tokens": limit}
    layout = {"optional": optional, "layers": 3, "top_k": top_k, **form}
    step = rows // hosts[0], tokens // hosts[1]
    windows = windows_between(range(0, rows + 1, step[0]), range(0, tokens + 1, step[1]))
    for plan in planned(trajectories, rows, tokens, max_real_tokens=limit):
        parts = [filled_window(plan, trajectories, window, {**layout, "tiles": devices}) for window in windows]
        want = encode_routing(pack_with_numpy(plan, trajectories, tokens), tiles=tiles, **form)  # type: ignore[arg-type]
        in_order = microbatch_layout(rows, tokens, **layout, tiles=tiles)  # type: ignore[arg-type]
        got = put_together(parts, hosts[1])
        assert {f.name: f.shape for f in in_order.fields} == {name: array.shape for name, array in got.items()}
        assert_same(got, {field.name: want[field.name] for field in in_order.fields})


@pytest.mark.slow
@MANY
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=14),
    rows=st.integers(1, 5),
    row_cuts=st.data(),
    token_cut=st.integers(1, 23),
)
def test_the_digest_of_the_rows_is_that_of_the_micro_batch(
    lengths: list[int], rows: int, row_cuts: Any, token_cut: int
) -> None:
    """Whatever the tokens of a window are: each host has the digest of its whole rows."""
    trajectories = {n: make_trajectory(length, name=f"t{n}", seed=n) for n, length in enumerate(lengths)}
    at = row_cuts.draw(cuts(rows)) if rows > 1 else [0, 1]
    for plan in planned(trajectories, rows, 24):
        want = microbatch_digest(plan, trajectories)
        assert microbatch_digest(plan, references(trajectories)) == want
        for tokens in ([0, token_cut], [token_cut, 24]):
            sent = [(window, part_of(plan, references(trajectories), window)) for window in windows_between(at, tokens)]
            each = [row_digests(read_part(part.plan, part.digests, window)) for window, part in sent]
            assert digest_of_rows(each) == want
            joined = b"".join(each)
            assert digest_of_rows([joined[i : i + 16] for i in range(0, len(joined), 16)]) == want


@pytest.mark.slow
def test_a_long_segment_is_packed_by_several_threads_as_by_one() -> None:
    """Parts of the work begin inside a piece, inside its groups, and are written past the cache."""
    tokens, layers, top_k, experts = 20_000, 24, 8, 300
    trajectories = routed(
        [19_997, 12_345, 7_001, 3], 1, optional=frozenset({"routing"}), experts=experts, held="some", layers=layers,
        top_k=top_k,
    )  # fmt: skip
    (plan,) = planned(trajectories, 2, tokens)
    layout = {"optional": frozenset({"routing"}), "layers": layers, "top_k": top_k, "experts": experts}
    whole = filled_whole(plan, trajectories, tokens, layout)
    windows = windows_between([0, 2], [0, 10_000, 20_000])
    assert_same(put_together([filled_window(plan, trajectories, window, layout) for window in windows], 2), whole)
    form = {"encoding": "ragged_packed", "experts": experts}
    want = encode_routing(whole, tiles=(2, 4), **form)  # type: ignore[arg-type]
    got = put_together(
        [filled_window(plan, trajectories, window, {**layout, **form, "tiles": (2, 2)}) for window in windows], 2
    )
    assert_same(got, {name: want[name] for name in got})


def one_part(window: Window, **changes: Any) -> tuple[Any, Any, Views]:
    """Two trajectories in a row of 20, of which the window may cut one; and its views."""
    trajectories = routed([12, 8], 0, optional=frozenset({"routing"}), experts=16)
    (plan,) = planned(trajectories, 1, 20)
    part, pieces = part_and_pieces(plan, trajectories, window)
    layout: Any = {"optional": frozenset({"routing"}), "layers": 3, "top_k": 2, **changes}
    placed = microbatch_layout(window.rows, window.tokens, **layout)
    return part, pieces, placed.views(np.full(placed.nbytes, GARBAGE, np.uint8), 0)


def assert_untouched(views: Views) -> None:
    assert all((view.view(np.uint8) == GARBAGE).all() for view in views.values())


def test_a_piece_that_was_not_fetched_is_named_and_nothing_is_written() -> None:
    part, pieces, views = one_part(Window(0, 1, 4, 16))
    del pieces[1]
    with pytest.raises(ProtocolError, match="trajectory 101 of store 1 was not fetched"):
        fill_window(part, pieces, views)
    assert_untouched(views)


def test_a_piece_of_too_few_tokens_is_refused_unwritten() -> None:
    """Matched pieces never are; who mixes up two windows gets no memory read beyond a piece."""
    _, pieces, views = one_part(Window(0, 1, 4, 16))
    trajectories = routed([12, 8], 0, optional=frozenset({"routing"}), experts=16)
    (plan,) = planned(trajectories, 1, 20)
    for window in (Window(0, 1, 3, 15), Window(0, 1, 5, 17)):
        other, _ = part_and_pieces(plan, trajectories, window)
        with pytest.raises(LayoutError, match="records lack tokens of the window"):
            fill_window(other, pieces, views)
        assert_untouched(views)


def test_pieces_of_other_fields_are_refused_by_name() -> None:
    part, pieces, views = one_part(Window(0, 1, 0, 20))
    plain = {n: make_trajectory(length, name=f"plain{n}", seed=n) for n, length in enumerate([12, 8])}
    (plan,) = planned(plain, 1, 20)
    _, others = part_and_pieces(plan, plain, Window(0, 1, 0, 20))
    with pytest.raises(TrajectoryError, match="'t0' has routing and trajectory 'plain1' has not"):
        fill_window(part, {0: pieces[0], 1: others[1]}, views)
    assert_untouched(views)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("segment_ids", lambda view: view[:, :-1]),
        ("completion_ids", lambda view: view.view(np.uint32)),
        ("routed_experts_packed", lambda view: view[0, 0]),
        ("routed_experts_packed", lambda view: view.reshape(2, 1, *view.shape[2:])),
        ("routed_experts_packed", lambda view: view[:, :, :, :, :1]),
        ("routed_experts_packed", lambda view: view[..., :2]),
        ("routed_experts_validity", lambda view: view[..., :1]),
        ("routed_experts_offsets", lambda view: view[..., :-1]),
        ("routed_experts_offsets", lambda view: view[0, 0]),
    ],
)
def test_views_that_are_not_the_window_s_are_refused_unwritten(name: str, change: Any) -> None:
    form = {"encoding": "ragged_packed", "experts": 16, "tiles": (1, 2)}
    part, pieces, views = one_part(Window(0, 1, 4, 16), **form)
    with pytest.raises(LayoutError):
        fill_window(part, pieces, {**views, name: change(views[name])})
    assert_untouched(views)
    views[name].flags.writeable = False
    with pytest.raises(SlotStateError, match=f"view {name} is read-only"):
        fill_window(part, pieces, views)


def test_tiles_that_do_not_divide_the_window_are_refused() -> None:
    part, pieces, views = one_part(Window(0, 1, 4, 16), encoding="ragged", tiles=(1, 2))
    (ragged, offsets) = (views.pop(name) for name in ("routed_experts_ragged", "routed_experts_offsets"))
    five = {
        "routed_experts_ragged": np.full((1, 5, *ragged.shape[2:]), 0, np.int16),
        "routed_experts_offsets": np.zeros((1, 5, offsets.shape[2]), np.int32),
    }
    with pytest.raises(LayoutError, match=r"its first two axes are tiles that divide 1 rows x 12 tokens"):
        fill_window(part, pieces, {**views, **five})


def test_a_tile_with_more_real_tokens_than_there_is_room_for_is_refused_unwritten() -> None:
    form = {"encoding": "ragged_packed", "experts": 16, "tiles": (1, 1), "max_real_tokens": 8}
    part, pieces, views = one_part(Window(0, 1, 4, 16), **form)
    with pytest.raises(LayoutError, match="12 real tokens, capacity 8"):
        fill_window(part, pieces, views)
    assert_untouched(views)


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_a_window_of_padding_is_filled_from_its_views_alone(encoding: str) -> None:
    layout: Any = {"optional": frozenset({"routing"}), "layers": 3, "top_k": 2, "encoding": encoding, "experts": 16}
    if encoding != "dense":
        layout["tiles"] = (2, 1)
    plan = PlannedMicrobatch((PlannedRow(()),) * 4)
    views = filled_window(plan, {}, Window(2, 4, 4, 16), layout)
    for name, view in views.items():
        assert (view == (-1 if name in (ROUTING.packed, "routed_experts_ragged") else 0)).all(), name


def test_tiles_that_do_not_divide_a_micro_batch_are_no_layout() -> None:
    routed_layout: Any = {"optional": frozenset({"routing"}), "layers": 3, "top_k": 2, "experts": 16}
    for encoding in ("dense", "ragged", "ragged_packed"):
        with pytest.raises(LayoutError, match="rows = 4 in 3 parts; give a multiple of 3"):
            microbatch_layout(4, 8, **routed_layout, encoding=encoding, tiles=(3, 1))
        with pytest.raises(LayoutError, match="tokens = 8 in 5 parts; give a multiple of 5"):
            microbatch_layout(4, 8, **routed_layout, encoding=encoding, tiles=(1, 5))
        with pytest.raises(LayoutError, match="tokens = 8 in 0 parts"):
            microbatch_layout(4, 8, **routed_layout, encoding=encoding, tiles=(1, 0))
    dense = microbatch_layout(4, 8, **routed_layout)
    assert microbatch_layout(4, 8, **routed_layout, tiles=(2, 2)) == dense


def test_a_tile_has_room_for_its_own_tokens_or_for_the_most_that_there_may_be() -> None:
    routed_layout: Any = {"optional": frozenset({"routing"}), "layers": 3, "top_k": 2, "experts": 16, "tiles": (2, 4)}
    for limit, groups in [(0, 3), (17, 3), (16, 2), (9, 2), (8, 1)]:
        packed = microbatch_layout(4, 40, **routed_layout, encoding="ragged_packed", max_real_tokens=limit)
        shapes = {field.name: field.shape for field in packed.fields}
        assert shapes["routed_experts_packed"] == (2, 4, groups, 3, 2, 4)
        assert shapes["routed_experts_validity"] == (2, 4, groups, 3)
        assert shapes["routed_experts_offsets"] == (2, 4, 3)
        ragged = microbatch_layout(4, 40, **routed_layout, encoding="ragged", max_real_tokens=limit)
        assert {f.name: f.shape for f in ragged.fields}["routed_experts_ragged"] == (2, 4, 8 * groups, 3, 2)


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_four_hosts_fill_what_one_would(encoding: str) -> None:
    """One case of what the tests above try many of: cut at tokens that are no multiples of 8."""
    trajectories = routed([23, 20, 17, 9, 1, 1], 5, optional=OPTIONALS[1], experts=300, held="some")
    layout: Any = {"optional": OPTIONALS[1], "layers": 3, "top_k": 2, "encoding": encoding, "experts": 300}
    divided = {} if encoding == "dense" else {"tiles": (1, 1)}
    (plan,) = planned(trajectories, 4, 26)
    want = pack_with_numpy(plan, trajectories, 26)
    if encoding != "dense":
        want = encode_routing(want, encoding, experts=300, tiles=(2, 2))
    windows = windows_between([0, 2, 4], [0, 13, 26])
    got = put_together([filled_window(plan, trajectories, window, {**layout, **divided}) for window in windows], 2)
    assert_same(got, {name: want[name] for name in got})
    assert got.keys() == want.keys()

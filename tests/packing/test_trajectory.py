from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from trajectory_making import make_trajectory

from shmstage.errors import TrajectoryError
from shmstage.packing.trajectory import Trajectory, check_same_fields


def arguments(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "trajectory_id": "a",
        "tokens": np.array([5, 6, 7], np.int32),
        "loss_mask": np.array([0, 1, 1], np.float32),
        "advantages": np.array([1, 2, 3], np.float32),
        "old_logprobs": np.array([0, -1, -2], np.float32),
    }
    return {**fields, **changes}


def test_arrays_that_are_right_are_not_copied_and_cannot_be_written() -> None:
    tokens = np.array([5, 6, 7], np.int32)
    trajectory = Trajectory(**arguments(tokens=tokens))
    assert np.shares_memory(trajectory.tokens, tokens)
    with pytest.raises(ValueError, match="read-only"):
        trajectory.tokens[0] = 1


def test_the_group_is_the_trajectory_itself_unless_told() -> None:
    assert Trajectory(**arguments()).group_id == "a"


@pytest.mark.parametrize("field", ["loss_mask", "advantages", "old_logprobs", "ref_logprobs", "returns", "old_values"])
def test_a_wrong_length_names_trajectory_field_want_and_got(field: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"trajectory 'a': {field} wants shape \[3\].* got shape \[2\]"):
        Trajectory(**arguments(**{field: np.zeros(2, np.float32)}))


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2**40 + 7, 3]),
        np.array([1.0, 2.0, 3.0]),
        np.array([1, None, 3], object),
        np.array(["1", "2", "3"]),
        np.array([(1, 2)] * 3, "i4,i4"),
        [1, 2, [3]],
        [1, 2, "3"],
        [[1, 2, 3]],
        7,
        None,
    ],
    ids=lambda value: str(value).replace("\n", " "),
)
def test_tokens_that_would_change_or_are_no_numbers_are_refused(value: object) -> None:
    """S71 (object), S73 (2**40 + 7 would become 7)."""
    with pytest.raises(TrajectoryError, match="trajectory 'a': tokens wants"):
        Trajectory(**arguments(tokens=value))


@pytest.mark.parametrize(
    "value",
    [[5, 6, 7], np.array([5, 6, 7]), np.array([5, 6, 7], ">i2"), np.array([5, 0, 6, 0, 7, 0], np.int32)[::2]],
    ids=["list", "int64", "big-endian", "strided"],
)
def test_tokens_of_other_form_arrive_with_the_same_values(value: Any) -> None:
    """S67: non-contiguous is copied in order, never misread."""
    trajectory = Trajectory(**arguments(tokens=value))
    assert trajectory.tokens.tolist() == [5, 6, 7]
    assert trajectory.tokens.dtype.str == "<i4"
    assert trajectory.tokens.flags.c_contiguous
    assert trajectory.digest == Trajectory(**arguments()).digest


def test_floats_are_widened_but_never_narrowed_unasked() -> None:
    half = Trajectory(**arguments(advantages=np.array([1, 2, 3], ml_dtypes.bfloat16)))
    assert half.advantages.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TrajectoryError, match=r"advantages wants dtype float32, got dtype float64; .*astype"):
        Trajectory(**arguments(advantages=np.array([1.0, 2.0, 3.0])))
    assert Trajectory(**arguments(advantages=[0.1, 2, 3])).advantages[0] == np.float32(0.1)
    with pytest.raises(TrajectoryError, match="advantages wants finite float32 values, got 1e"):
        Trajectory(**arguments(advantages=[1e300, 2.0, 3.0]))


def test_payloads_of_nan_keep_their_bits() -> None:
    """S66"""
    bits = np.array([0x7FC12345, 0xFFC00001, 0x80000000], np.uint32)
    trajectory = Trajectory(**arguments(old_logprobs=bits.view(np.float32)))
    assert trajectory.old_logprobs.view(np.uint32).tolist() == bits.tolist()


def test_the_mask_is_zero_or_one() -> None:
    """P8: the mask is its own 0/1 array; weights are advantages."""
    assert Trajectory(**arguments(loss_mask=np.array([False, True, True]))).loss_mask.tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(TrajectoryError, match=r"loss_mask wants 0 or 1 for each token, got 0\.5"):
        Trajectory(**arguments(loss_mask=np.array([0, 0.5, 1], np.float32)))


def test_the_first_token_is_never_a_loss_token() -> None:
    """P8: nothing predicts it."""
    assert Trajectory(**arguments(loss_mask=[1, 1, 0])).loss_tokens == 1
    assert Trajectory(**arguments(loss_mask=[1, 0, 0])).loss_tokens == 0


def test_a_pad_token_inside_and_holes_in_the_mask_do_not_change_the_length() -> None:
    """P6"""
    trajectory = Trajectory(**arguments(tokens=[0, 0, 0], loss_mask=[1, 0, 1]))
    assert trajectory.length == 3
    assert trajectory.loss_tokens == 1


def test_an_empty_trajectory_is_one() -> None:
    """P5, S69"""
    empty = make_trajectory(0, optional=frozenset({"routing", "returns"}))
    assert (empty.length, empty.loss_tokens, empty.nbytes) == (0, 0, 0)
    assert len(empty.digest) == 16


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 201, "\ud800", 7])
def test_ids_are_short_printable_text(name: object) -> None:
    with pytest.raises(TrajectoryError, match="trajectory_id wants 1 to 200 printable characters"):
        Trajectory(**arguments(trajectory_id=name))


@pytest.mark.parametrize("wrong", [-1, 2**53 + 1, 1.0, True])
def test_counts_are_integers_in_range(wrong: object) -> None:
    with pytest.raises(TrajectoryError, match="batch_index wants an integer from 0"):
        Trajectory(**arguments(batch_index=wrong))


def test_a_number_of_experts_belongs_to_a_routing() -> None:
    with pytest.raises(TrajectoryError, match="experts wants 0 without routing, got 8"):
        Trajectory(**arguments(experts=8))


def test_the_digest_covers_every_array_and_no_id() -> None:
    plain = make_trajectory(5)
    assert make_trajectory(5, name="other", group_id="g", policy_version=3).digest == plain.digest
    seen = {plain.digest}
    for field in ("tokens", "loss_mask", "advantages", "old_logprobs"):
        changed = getattr(plain, field).copy()
        changed[2] = abs(1 - changed[2])
        seen.add(make_trajectory(5, **{field: changed}).digest)
    # the same values under another name are other data
    seen.add(make_trajectory(5, returns=plain.advantages).digest)
    seen.add(make_trajectory(5, old_values=plain.advantages).digest)
    assert len(seen) == 7


def test_a_negative_token_is_refused_before_it_indexes_an_embedding_from_its_end() -> None:
    with pytest.raises(TrajectoryError, match="tokens wants ids from 0, got -1"):
        make_trajectory(3, tokens=np.array([4, -1, 2], np.int32))


@pytest.mark.parametrize("experts", [128, 256, 384, 512])
@pytest.mark.parametrize("rows", [4, 5])
def test_routing_keeps_the_order_of_preference(experts: int, rows: int) -> None:
    """P13: n or n - 1 rows; ids up to experts - 1 stay as they are."""
    routing = np.random.default_rng(experts).permuted(np.tile(np.arange(experts), (rows, 2, 1)), axis=-1)[..., :4]
    routing[0, 0, 0] = experts - 1
    routing[0, 0, 1:] = [2, 1, 0]
    trajectory = make_trajectory(5, routing=routing, experts=experts)
    assert trajectory.routing is not None
    assert trajectory.routing.dtype == np.int16
    assert np.array_equal(trajectory.routing, routing)


@pytest.mark.parametrize(
    ("choice", "experts"),
    [([0, 128, 1], 128), ([0, 1, 0], 128), ([0, -1, 1], 128), ([0, -2, 1], 128), ([40_000, 1, 2], 0), ([7, 7, 7], 0)],
)
def test_expert_ids_out_of_range_or_twice_are_refused_with_their_place(choice: list[int], experts: int) -> None:
    """P13"""
    routing = np.tile(np.array([2, 3, 4]), (4, 2, 1))
    routing[3, 1] = choice
    with pytest.raises(TrajectoryError, match=r"trajectory 't': routing wants"):
        make_trajectory(5, routing=routing, experts=experts)
    if max(choice) < 2**15:
        with pytest.raises(TrajectoryError, match=r"at \[3, 1\]"):
            make_trajectory(5, routing=routing, experts=experts)


def test_a_choice_may_be_unset_as_a_whole() -> None:
    """P13"""
    routing = np.tile(np.array([2, 3, 4]), (4, 2, 1))
    routing[1, 0] = -1
    assert make_trajectory(5, routing=routing, experts=8).routing is not None


@pytest.mark.parametrize("shape", [(3, 2, 3), (6, 2, 3), (5, 6), (5, 0, 3), (5, 2, 0)])
def test_routing_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """P13: n or n - 1 rows of [layers, top_k] for n tokens."""
    routing = np.broadcast_to(np.arange(shape[-1]), shape)
    with pytest.raises(TrajectoryError, match=r"routing wants shape \[5 or 4, layers, top_k\], got shape"):
        make_trajectory(5, routing=routing)


def test_a_field_that_only_some_carry_is_an_error_naming_both() -> None:
    """P12"""
    with_it = make_trajectory(4, name="with", returns=[0.0] * 4)
    without = make_trajectory(4, name="without")
    for pair in ([with_it, without], [without, with_it]):
        with pytest.raises(TrajectoryError, match="'with' has returns and trajectory 'without' has not"):
            check_same_fields(pair)
    assert check_same_fields([with_it, with_it]) is with_it
    assert check_same_fields([]) is None


def test_routing_of_different_models_is_an_error_naming_both() -> None:
    """P12"""
    one = make_trajectory(4, name="one", optional=frozenset({"routing"}))
    for other in ({"layers": 3}, {"top_k": 2}, {"experts": 8}):
        two = make_trajectory(4, name="two", optional=frozenset({"routing"}), **other)
        with pytest.raises(TrajectoryError, match=r"'two': routing wants .* as in trajectory 'one'"):
            check_same_fields([one, two])

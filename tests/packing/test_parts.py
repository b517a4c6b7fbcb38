"""A host's part of a plan: what it says, what is fetched for it, and what is no part."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from trajectory_making import make_trajectory
from window_making import fetched, references

from shmstage.errors import ProtocolError, TrajectoryError
from shmstage.packing.fields import OPTIONAL_FIELDS
from shmstage.packing.parts import Part, WindowPart, digest_of_rows, part_of, read_part, row_digests
from shmstage.packing.pieces import decode_pieces, encode_pieces
from shmstage.packing.plan import PlannedMicrobatch, PlannedRow, PlannedSegment
from shmstage.packing.reference import Key, TrajectoryReference
from shmstage.packing.trajectory import Trajectory
from shmstage.packing.window import Window

#: row 1: 5 at 0, 7 at 6; row 2: 9 at 2
PLAN = PlannedMicrobatch(
    (
        PlannedRow((PlannedSegment(0, 0, 4),)),
        PlannedRow((PlannedSegment(1, 0, 5), PlannedSegment(2, 6, 7))),
        PlannedRow((PlannedSegment(3, 2, 9),)),
        PlannedRow(()),
    )
)
WINDOW = Window(1, 4, 4, 8)


def trajectories() -> dict[int, Trajectory]:
    return {n: make_trajectory(length, name=f"t{n}", seed=n) for n, length in enumerate([4, 5, 7, 9])}


def sent(window: Window = WINDOW) -> Part:
    return part_of(PLAN, references(trajectories()), window)


def read(part: Part, window: Window = WINDOW) -> WindowPart:
    return read_part(part.plan, part.digests, window)


def test_a_part_has_every_segment_of_its_rows_and_what_it_wants_only_those_with_a_token_in_it() -> None:
    part = read(sent())
    assert part.plan.tolist() == [[1, 0, 5, 1, 101], [1, 6, 7, 2, 102], [2, 2, 9, 0, 103]]
    assert len(part) == 3 and not part.plan.flags.writeable
    assert part.digests == b"".join(trajectories()[n].digest for n in (1, 2, 3))
    asked = {
        wanted.store: [a.tolist() for a in (wanted.segments, wanted.numbers, wanted.begins, wanted.ends)]
        for wanted in part.wanted()
    }
    assert asked == {0: [[2], [103], [2], [6]], 1: [[0], [101], [4], [5]], 2: [[1], [102], [0], [2]]}
    assert list(asked) == [0, 1, 2]
    for wanted in part.wanted():
        for array in (wanted.segments, wanted.numbers, wanted.begins, wanted.ends):
            assert array.dtype == np.int64 and array.flags.c_contiguous
    # tokens that no segment of these rows reaches
    assert read(sent(Window(1, 2, 13, 20)), Window(1, 2, 13, 20)).wanted() == ()
    assert len(read(Part(b"", b""), Window(3, 4, 0, 8))) == 0


def test_a_part_needs_of_a_trajectory_only_its_reference() -> None:
    one = make_trajectory(9, name="r", optional=OPTIONAL_FIELDS, group_id="g", batch_index=3, policy_version=4)
    reference = TrajectoryReference.of(one, Key(2, 7))
    assert reference.key == (2, 7) and reference.routing is not None and one.routing is not None
    assert reference.routing.shape == one.routing.shape
    plain = {field.name for field in fields(TrajectoryReference)} - {"key", "routing"}
    assert len(plain) == 10
    for name in plain:
        assert getattr(reference, name) == getattr(one, name), name
    assert TrajectoryReference.of(make_trajectory(2), Key(0, 0)).routing is None
    assert TrajectoryReference.of(reference, Key(2, 7)) == reference


def test_a_reference_that_is_missing_or_has_another_length_is_named() -> None:
    refs = references(trajectories())
    del refs[2]
    with pytest.raises(TrajectoryError, match="the plan names trajectory number 2, which was not given"):
        part_of(PLAN, refs, WINDOW)
    refs[2] = TrajectoryReference.of(make_trajectory(6, name="short"), Key(0, 1))
    with pytest.raises(TrajectoryError, match="'short' was planned with 7 tokens, got 6"):
        part_of(PLAN, refs, WINDOW)
    part_of(PLAN, refs, Window(0, 1, 0, 20))  # is not in these rows


def test_what_is_not_the_answer_is_refused_by_store_and_number() -> None:
    given = trajectories()
    part = read(sent())
    wanted = part.wanted()[0]

    def answer(trajectory: Trajectory, begin: int, end: int) -> Any:
        return wanted.matched(decode_pieces(encode_pieces([trajectory], [(begin, end)])))

    assert list(answer(given[3], 2, 6)) == [2]
    other = make_trajectory(9, name="other", seed=77)
    longer = make_trajectory(10, name="longer", seed=3)
    object.__setattr__(longer, "digest", given[3].digest)
    for trajectory, begin, end in [(other, 2, 6), (longer, 2, 6), (given[3], 1, 6), (given[3], 2, 5)]:
        with pytest.raises(ProtocolError, match=r"store 0, trajectory 103: \[digest, length, begin, end\] wants"):
            answer(trajectory, begin, end)
    with pytest.raises(ProtocolError, match="store 0 was asked for 1 pieces and gave 0"):
        wanted.matched([])
    assert sorted(fetched(part, given)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ((0, 0), 0, "row 0 or 2 is not one of them"),
        ((2, 0), 4, "row 1 or 4 is not one of them"),
        ((1, 0), 3, "out of order"),
        ((0, 0), -1, "-1 among its numbers"),
        ((0, 1), -(1 << 63), "-9223372036854775808 among"),
        ((0, 1), 2, "overlap"),
        ((0, 2), 7, "overlap"),
        ((0, 1), 1 << 31, "tokens beyond 2147483647"),
        ((2, 1), (1 << 63) - 1, "tokens beyond"),
        ((2, 2), (1 << 63) - 1, "tokens beyond"),
        ((2, 2), (1 << 31) - 2, "tokens beyond"),
        ((0, 3), -1, "-1 among"),
        ((0, 4), -1, "-1 among"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(place: tuple[int, int], value: int, why: str) -> None:
    part = sent()
    plan = np.frombuffer(part.plan, np.int64).reshape(-1, 5).copy()
    plan[place] = value
    with pytest.raises(ProtocolError, match=f"the plan of rows 1 to 4: .*{why}"):
        read(Part(plan.tobytes(), part.digests))


def test_a_trajectory_that_stands_twice_in_a_plan_is_refused() -> None:
    part = sent()
    plan = np.frombuffer(part.plan, np.int64).reshape(-1, 5).copy()
    plan[1, 4] = plan[0, 4]
    read(Part(plan.tobytes(), part.digests))  # of another store
    plan[1, 3] = plan[0, 3]
    with pytest.raises(ProtocolError, match="a trajectory stands in it twice"):
        read(Part(plan.tobytes(), part.digests))


def test_bytes_that_are_no_plan_and_windows_that_are_none_are_refused() -> None:
    part = sent()
    for plan, digests in [
        (part.plan[:-1], part.digests),
        (part.plan[:-8], part.digests),
        (part.plan[:-40], part.digests),
        (part.plan, part.digests[:-1]),
        (part.plan, part.digests + b"\0" * 16),
        (b"", part.digests),
    ]:
        with pytest.raises(ProtocolError, match=r"a plan is int64 \[n, 5\] with 16 bytes of digest for each"):
            read_part(plan, digests, WINDOW)
    for window in [Window(1, 1, 0, 8), Window(4, 1, 0, 8), Window(-1, 4, 0, 8), Window(1, 4, 8, 8),
                   Window(1, 4, -1, 8), Window(1, 4, 0, 1 << 31)]:  # fmt: skip
        with pytest.raises(ProtocolError, match="a window has rows and tokens"):
            read_part(part.plan, part.digests, window)


def test_digests_of_rows_are_whole() -> None:
    part = read(sent())
    digests = row_digests(part)
    assert len(digests) == 3 * 16
    assert digests[32:] == row_digests(read(Part(b"", b""), Window(3, 4, 0, 8))), "a padding row has a digest"
    with pytest.raises(ProtocolError, match="row digests of 47 bytes; each has 16"):
        digest_of_rows([digests[:-1]])

"""The queue's order depends on what is put in alone; it loses nothing, doubles nothing, and bounds the lead."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, str(Path(__file__).parent))
from input_making import make_group

from shmstage.errors import TrajectoryError, WaitTimeoutError
from shmstage.orchestrator.batch_order import Admitted, BatchEnd, BatchOrder, Item
from shmstage.orchestrator.held import HeldBytes
from shmstage.orchestrator.queue import BatchOrderedQueue, group_nbytes
from shmstage.packing.trajectory import Group

BATCHES = st.integers(0, 6)


def named(items: list[Item]) -> list[str]:
    def name(item: Item) -> str:
        if isinstance(item, Admitted):
            return item.group.group_id
        return f"end {item.batch_index}" if isinstance(item, BatchEnd) else "|"

    return [name(item) for item in items]


def groups_of(items: list[Item]) -> list[Group]:
    return [item.group for item in items if isinstance(item, Admitted)]


def drained(queue: BatchOrderedQueue) -> list[Item]:
    items: list[Item] = []
    while True:
        try:
            item = queue.take(timeout_s=0)
        except WaitTimeoutError:
            return items
        if item is None:
            return items
        items.append(item)


def order_of(batches: list[int], **expected: int) -> list[str]:
    turns = BatchOrder("prompt_batch", expected={int(k[1:]): v for k, v in expected.items()}.get)
    items: list[Item] = []
    for number, batch in enumerate(batches):
        items += turns.put(make_group(number, batch, [1]))
    return named(items + turns.end())


# --- the order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "expected", "want"),
    [
        ([0, 0, 1, 1], {}, ["g0", "g1", "end 0", "g2", "g3", "|"]),
        ([0, 1, 0, 1, 0], {}, ["g0", "g2", "g4", "end 0", "g1", "g3", "|"]),
        # the source is two batches ahead: what batch 0 lacks are holes
        ([0, 1, 2, 1], {}, ["g0", "end 0", "g1", "g3", "end 1", "g2", "|"]),
        # a latecomer has its turn at once
        ([0, 1, 2, 0, 2], {}, ["g0", "end 0", "g1", "g3", "end 1", "g2", "g4", "|"]),
        # a batch is over when all expected groups have come
        ([0, 1, 0, 1], {"b0": 2}, ["g0", "g2", "end 0", "g1", "g3", "|"]),
        ([1, 0, 0, 1], {"b0": 2, "b1": 2}, ["g1", "g2", "end 0", "g0", "g3", "end 1", "|"]),
        # nobody waits for a batch of which nothing is expected
        ([0, 2, 2], {"b0": 1, "b1": 0}, ["g0", "end 0", "end 1", "g1", "g2", "|"]),
        ([5, 9], {}, ["end 0", "g0", "end 4", "end 5", "g1", "|"]),
        ([], {}, ["|"]),
    ],
)
def test_prompt_batch_order(batches: list[int], expected: dict[str, int], want: list[str]) -> None:
    got = order_of(batches, **expected)
    assert [name for name in got if not name.startswith("end")] == [n for n in want if not n.startswith("end")]
    # an end stands behind the last group of its batch and before the first of a later one
    for position, name in enumerate(got):
        if name.startswith("end"):
            rest = [batches[int(later[1:])] for later in got[position:] if later.startswith("g")]
            first = [batches[int(sooner[1:])] for sooner in got[:position] if sooner.startswith("g")]
            assert all(batch <= int(name[4:]) for batch in first)
            assert "g3" in got[position:] or all(batch > int(name[4:]) for batch in rest)


def test_an_expectation_of_every_batch_there_could_be_ends() -> None:
    turns = BatchOrder("prompt_batch", expected=lambda batch: 0)
    assert named(turns.put(make_group(0, 3, [1])))[-2:] == ["g0", "end 3"]


def test_a_late_expectation_and_holes_pass_a_batch() -> None:
    turns = BatchOrder("prompt_batch")
    items = turns.put(make_group(0, 0, [1])) + turns.put(make_group(1, 1, [1]))
    assert named(items) == ["g0"]
    assert named(turns.expect(0, 2)) == []
    assert named(turns.hole(0)) == ["end 0", "g1"]
    assert named(turns.expect(0, 9)) == []  # it was passed: there is nothing to wait for any more
    assert named(turns.hole(0)) == []
    assert named(turns.expect(1, 3)) == []
    assert named(turns.hole(1, 2)) == ["end 1"]
    with pytest.raises(TrajectoryError, match="0 holes"):
        turns.hole(1, 0)
    with pytest.raises(TrajectoryError, match="-1 groups"):
        turns.expect(1, -1)


def test_a_hole_is_passed_also_when_the_serving_cursor_is_past_it() -> None:
    queue = BatchOrderedQueue("prompt_batch")
    queue.expect(1, 1)
    queue.put(make_group(0, 0, [1]))
    drained(queue)
    queue.put(make_group(1, 2, [1]))  # batch 0 is over, batch 1 is still expected
    queue.hole(1)
    assert groups_of(drained(queue))[0].group_id == "g1"
    assert (queue.serving, queue.next) == ((1, 2), (1, 0))
    queue.commit((1, 1))
    assert queue.next == (1, 2)


# --- the whole queue against a model ------------------------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """What is put in and what is done with it is drawn; nothing waits: a put without room is given up."""

    @initialize(order=st.sampled_from(["arrival", "prompt_batch"]), limit=st.sampled_from([0, 96, 200]),
                sized=st.booleans())  # fmt: skip
    def begin(self, order: str, limit: int, sized: bool) -> None:
        self.order = order
        expected = (lambda batch: 2) if sized else None
        self.queue = BatchOrderedQueue(order, expected=expected, held=HeldBytes(limit))  # type: ignore[arg-type]
        self.limit = limit
        self.replay = BatchOrder(order, expected=expected)  # type: ignore[arg-type]
        self.want: list[str] = []
        self.taken: list[Item] = []
        self.put_in: list[Group] = []
        self.number = 0
        self.released = self.held = self.step = 0
        self.cursors = [((1, 0), (1, 0))]
        self.ended = self.closed = False

    @precondition(lambda self: not self.closed)
    @rule(batch=BATCHES, near=st.booleans(), lengths=st.lists(st.integers(0, 3), max_size=2))
    def put(self, batch: int, near: bool, lengths: list[int]) -> None:
        if near and self.put_in:  # mostly in order, as sources are
            batch = self.put_in[-1].batch_index + batch // 3 - (batch == 0)
        group = make_group(self.number, max(batch, 0), lengths)
        self.want += named(self.replay.approach(group.batch_index))
        begun = groups_of(self.taken)[-1].batch_index if groups_of(self.taken) else None
        waiting = self.put_in[:]
        for taken in groups_of(self.taken):
            waiting.remove(taken)
        try:
            self.queue.put(group, timeout_s=0)
        except WaitTimeoutError as error:
            assert f"room for group '{group.group_id}'" in str(error)
            return
        # at most one batch ahead: one that is new is let in only when those before it are at least begun
        if self.order == "arrival" and self.put_in and group.batch_index != self.put_in[-1].batch_index:
            assert all(other.batch_index == begun for other in waiting)
        if self.order == "prompt_batch" and all(group.batch_index > other.batch_index for other in self.put_in):
            assert all(other.batch_index <= self.queue.serving[1] for other in waiting)
        self.number += 1
        self.put_in.append(group)
        self.held += group_nbytes(group)
        self.want += named(self.replay.put(group))

    @precondition(lambda self: not self.closed)
    @rule(batch=BATCHES, groups=st.integers(0, 3))
    def expect(self, batch: int, groups: int) -> None:
        self.queue.expect(batch, groups)
        self.want += named(self.replay.expect(batch, groups))

    @precondition(lambda self: not self.closed)
    @rule(batch=BATCHES, groups=st.integers(1, 2))
    def hole(self, batch: int, groups: int) -> None:
        self.queue.hole(batch, groups)
        self.want += named(self.replay.hole(batch, groups))

    @rule()
    def take(self) -> None:
        try:
            item = self.queue.take(timeout_s=0)
        except WaitTimeoutError:
            assert len(self.taken) == len(self.want)
            return
        assert (item is None) == (len(self.taken) == len(self.want))
        assert item is not None or self.closed
        if item is not None:
            self.taken.append(item)

    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        serving = self.queue.serving
        self.queue.commit((serving[0], max(0, serving[1] - back)))

    @rule()
    def train(self) -> None:
        """What was taken is packed as a step and lands."""
        nbytes = sum(group_nbytes(group) for group in groups_of(self.taken)) - self.released
        self.step += 1
        self.queue.packed(self.step, nbytes, is_final=True)
        self.queue.landed(self.step)
        self.released += nbytes
        self.held -= nbytes

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        try:
            self.queue.end_pass(timeout_s=0)
        except WaitTimeoutError:
            pass  # said all the same
        self.queue.end()
        self.want += named(self.replay.end())
        self.closed = True

    @invariant()
    def what_came_out_is_what_the_order_says(self) -> None:
        assert named(self.taken) == self.want[: len(self.taken)]

    @invariant()
    def cursors_only_go_forward_and_next_never_overtakes(self) -> None:
        now = (self.queue.serving, self.queue.next)
        before = self.cursors[-1]
        assert now[0] >= before[0]
        assert now[1] >= before[1]
        assert now[1] <= now[0]
        self.cursors.append(now)

    @invariant()
    def no_more_bytes_are_held_than_allowed(self) -> None:
        assert not self.limit or self.held <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        if not self.closed:
            self.close()
        self.taken += drained(self.queue)
        assert named(self.taken) == self.want
        assert Counter(g.group_id for g in groups_of(self.taken)) == Counter(g.group_id for g in self.put_in)
        if self.order == "arrival":
            assert groups_of(self.taken) == self.put_in


@pytest.mark.slow
def test_order_no_loss_no_duplicates_and_a_bounded_lead() -> None:
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(max_examples=150, stateful_step_count=40, derandomize=True, database=None, deadline=None),
    )

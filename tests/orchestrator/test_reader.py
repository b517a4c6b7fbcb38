"""The reading thread: the same items as without it, waits that end, errors in their turn, back-pressure."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from input_making import Given, Sized, group_lists, make_group, plan_settings
from test_resume import facts, orders

from shmstage.errors import BudgetError, StoppedError, WaitTimeoutError
from shmstage.orchestrator.batch_order import Admitted, Order
from shmstage.orchestrator.held import HeldBytes
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.queue import BatchOrderedQueue, group_nbytes
from shmstage.orchestrator.reader import SourceReader
from shmstage.orchestrator.resume import ResumeState
from shmstage.packing.held_form import HeldForm
from shmstage.packing.plan import PlanSettings
from shmstage.packing.source import Source
from shmstage.packing.trajectory import Group

WAIT_S = 20.0


class Stepwise:
    """Notes which groups were asked for, and lets tests wait for that."""

    replayable = True

    def __init__(self, groups: list[Group], error: Exception | None = None) -> None:
        self.given = groups
        self.asked = 0
        self.closed = threading.Event()
        self._error = error
        self._changed = threading.Condition()

    def groups(self, cursor: int) -> Iterator[Group]:
        try:
            for group in self.given[cursor:]:
                with self._changed:
                    self.asked += 1
                    self._changed.notify_all()
                yield group
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()

    def wait_until_asked(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked >= count, WAIT_S), self.asked


def reader_of(
    source: Source, *, order: Order = "arrival", held: HeldBytes | None = None, passes: int | None = 1
) -> SourceReader:
    held = held or HeldBytes()
    reader = SourceReader(source, ResumeState.start(), passes=passes, order=order, held=held, form=HeldForm())
    reader.start()
    return reader


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException | object]]:
    result: list[BaseException | object] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


# --- the same, whoever is faster ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Given, Sized])
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(group_lists(), plan_settings, st.integers(1, 3), orders, st.data())
def test_microbatches_do_not_depend_on_the_thread_nor_on_a_resume(
    kind: type[Given], groups: list[Group], chosen: PlanSettings, passes: int, order: Order, data: st.DataObject
) -> None:
    """P10"""
    inline = [facts(planned) for planned in Intake(kind(groups), chosen, passes=passes, order=order)]
    done = data.draw(st.integers(0, len(inline)))
    resume = inline[done - 1][-1] if done else None
    intake = Intake(kind(groups), chosen, passes=passes, order=order, resume=resume)
    reader = intake.read_ahead()
    try:
        assert [facts(planned) for planned in intake] == inline[done:]
    finally:
        reader.close()


def test_an_endless_input_is_read_no_further_than_one_batch_ahead() -> None:
    source = Stepwise([make_group(i, i // 2, [1]) for i in range(8)])
    reader = reader_of(source, passes=None)
    items = reader.items()
    source.wait_until_asked(3)  # two groups of the first batch, and one that has to wait
    for taken, asked in [(1, 5), (2, 5), (3, 7)]:
        next(items)
        source.wait_until_asked(asked)
        assert source.asked == asked, taken
    reader.close()


def test_passes_without_a_group_do_not_run_ahead() -> None:
    source = Given([])
    reader = reader_of(source, passes=None)
    for _ in range(5):
        reader.queue.take(timeout_s=WAIT_S)
    reader.close()
    assert len(source.cursors) <= 8


# --- waits and errors -----------------------------------------------------------------------------------------------


def test_abort_ends_every_wait_with_its_error() -> None:
    full, empty = BatchOrderedQueue(held=HeldBytes(20)), BatchOrderedQueue()
    full.put(make_group(0, 0, [1]), timeout_s=0)
    waits = [
        in_thread(lambda: full.put(make_group(1, 0, [1]))),
        in_thread(lambda: empty.take()),
        in_thread(lambda: empty.take()),
    ]
    error = StoppedError("told to")
    for queue in (full, empty):
        queue.abort(error)
        queue.abort(ValueError("too late"))
    for thread, result in waits:
        thread.join(WAIT_S)
        assert result == [error]
    with pytest.raises(StoppedError, match="told to"):
        full.take()
    with pytest.raises(StoppedError, match="told to"):
        empty.put(make_group(0, 0, [1]))
    with pytest.raises(StoppedError, match="told to"):
        empty.end_pass()


def test_every_wait_has_a_deadline_that_names_what_was_waited_for() -> None:
    queue = BatchOrderedQueue(held=HeldBytes(20))
    with pytest.raises(WaitTimeoutError, match=r"waited 0.01 s for the source to give a group; batch \(1, 0\)"):
        queue.take(timeout_s=0.01)
    queue.put(make_group(0, 0, [1]))
    with pytest.raises(WaitTimeoutError, match=r"room for group 'g1'.*16 bytes are held, max_held_bytes = 20"):
        queue.put(make_group(1, 0, [1]), timeout_s=0.01)
    other = BatchOrderedQueue()
    other.put(make_group(0, 0, [1]))
    with pytest.raises(WaitTimeoutError, match="the end of a pass to be taken"):
        other.end_pass(timeout_s=0.01)


def test_the_error_of_a_source_comes_after_all_it_gave() -> None:
    reader = reader_of(Stepwise([make_group(i, i, [1]) for i in range(5)], RuntimeError("boom")))
    items, got = reader.items(), []
    with pytest.raises(RuntimeError, match="boom"):
        while True:
            got.append(next(items))
    assert [item.group.group_id for item in got if isinstance(item, Admitted)] == [f"g{i}" for i in range(5)]
    reader.close()


def test_closing_ends_the_thread_and_the_source_in_it() -> None:
    source = Stepwise([make_group(i, i, [1]) for i in range(5)])
    reader = reader_of(source)
    source.wait_until_asked(2)
    reader.close(timeout_s=WAIT_S)
    assert source.closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "source reader"]


def test_closing_does_not_wait_for_a_source_that_sits_in_its_own_code() -> None:
    go_on = threading.Event()

    class Sitting:
        replayable = True

        def groups(self, cursor: int) -> Iterator[Group]:
            go_on.wait(WAIT_S)
            yield make_group(0, 0, [1])

    reader = reader_of(Sitting())
    reader.close(timeout_s=0.01)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "source reader"]
    assert left.daemon
    go_on.set()
    left.join(WAIT_S)
    assert not left.is_alive()


# --- back-pressure --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True])
def test_a_source_over_budget_waits_until_a_step_has_landed_or_is_durable(live: bool) -> None:
    nbytes = group_nbytes(make_group(0, 0, [4]))
    groups = [make_group(i, 0, [4]) for i in range(12)]
    source = Stepwise(groups)
    reader = reader_of(source, held=HeldBytes(4 * nbytes, until_durable=live))
    source.wait_until_asked(5)
    queue = reader.queue
    for step in range(1, 3):
        for _ in range(4):
            assert isinstance(queue.take(timeout_s=WAIT_S), Admitted)
        assert source.asked == 4 * step + 1
        queue.packed(step, 4 * nbytes, is_final=True)
        queue.landed(step)
        if live:
            assert queue.wants_checkpoint
            with pytest.raises(WaitTimeoutError):  # landed, and still no room: it is in no checkpoint
                queue.put(make_group(99, 0, [4]), timeout_s=0)
            queue.durable(step)
        source.wait_until_asked(min(12, 4 * (step + 1) + 1))
    reader.close()


def test_one_step_over_budget_ends_in_an_error_instead_of_two_threads_waiting_for_each_other() -> None:
    nbytes = group_nbytes(make_group(0, 0, [4]))
    reader = reader_of(Stepwise([make_group(i, 0, [4]) for i in range(4)]), held=HeldBytes(2 * nbytes))
    with pytest.raises(BudgetError, match="one step does not fit"):
        list(reader.items())
    reader.close()


def test_a_source_that_waits_already_hears_that_the_taker_starves() -> None:
    nbytes = group_nbytes(make_group(0, 0, [4]))
    queue = BatchOrderedQueue(held=HeldBytes(nbytes))
    queue.put(make_group(0, 0, [4]))
    queue.take(timeout_s=WAIT_S)
    putting, put = in_thread(lambda: queue.put(make_group(1, 0, [4])))
    while not queue._condition._waiters:  # type: ignore[attr-defined]
        threading.Event().wait(0.001)
    taking, _ = in_thread(queue.take)
    putting.join(WAIT_S)
    assert isinstance(put[0], BudgetError)
    queue.abort(StoppedError("over"))
    taking.join(WAIT_S)


def test_a_batch_ahead_that_fills_the_budget_is_an_error_too() -> None:
    nbytes = group_nbytes(make_group(0, 0, [4]))
    groups = [make_group(0, 0, [4]), make_group(1, 1, [4]), make_group(2, 0, [4]), make_group(3, 1, [4])]
    reader = reader_of(Stepwise(groups), order="prompt_batch", held=HeldBytes(2 * nbytes))
    with pytest.raises(BudgetError, match="one step does not fit"):
        list(reader.items())
    reader.close()


def test_a_group_larger_than_the_budget_comes_as_an_error_in_its_turn() -> None:
    nbytes = group_nbytes(make_group(0, 0, [4]))
    reader = reader_of(Stepwise([make_group(0, 0, [4]), make_group(1, 0, [9])]), held=HeldBytes(2 * nbytes))
    items = reader.items()
    assert isinstance(next(items), Admitted)
    with pytest.raises(BudgetError, match="one group has"):
        next(items)
    reader.close()

"""Between the thread that reads the source and the one that plans: groups in training order, never too many."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from shmstage.errors import WaitTimeoutError
from shmstage.orchestrator.arrivals import DescribedGroup
from shmstage.orchestrator.batch_order import Admitted, BatchEnd, BatchOrder, Expected, Item, Order, PassEnd
from shmstage.orchestrator.held import HeldBytes
from shmstage.orchestrator.resume import Place
from shmstage.settings import MAX_WAIT_S

#: (pass number, batch index): batches in the order in which they are trained
Cursor = tuple[int, int]


def group_nbytes(group: DescribedGroup) -> int:
    return sum(trajectory.nbytes for trajectory in group.trajectories)


@final
class BatchOrderedQueue:
    """One thread puts, another takes; whoever knows of landings and checkpoints commits. All methods take any thread.

    The order is ``BatchOrder``'s, so it does not depend on who is faster. ``put`` waits while the source is more than
    one batch ahead of what was taken, or ``held`` has no room. ``abort`` ends every wait with its error.
    """

    def __init__(
        self,
        order: Order = "arrival",
        *,
        pass_number: int = 1,
        place: Place | None = None,
        expected: Expected | None = None,
        held: HeldBytes | None = None,
    ) -> None:
        """``pass_number`` and ``place`` are those of a ``ResumeState``: what they cover is skipped."""
        self._condition = threading.Condition()
        self._order: Order = order
        self._expected = expected
        self._turns = BatchOrder(order, place, expected)
        self._held = held or HeldBytes()
        self._pass_number = pass_number
        self._items: deque[tuple[int, int, Item]] = deque()  # window, pass number, item
        self._window_in = self._window_out = 0
        self._batch_in: int | None = None
        self._late_before = 0
        self._taker_waits = False
        self._ended = False
        self._end_error: BaseException | None = None
        self._error: BaseException | None = None
        self._serving: Cursor = (pass_number, place.serving if place else 0)
        self._next: Cursor = self._serving
        self._untrained: set[Cursor] = set()

    # --- cursors --------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Cursor:
        """The batch that ``take`` gives groups of; those before it are over, apart from latecomers."""
        with self._condition:
            return self._serving

    @property
    def next(self) -> Cursor:
        """The first batch that is not committed; a hole is passed, also one that ``serving`` is past already."""
        with self._condition:
            return self._next

    @property
    def late(self) -> int:
        """Groups that came after their batch was passed."""
        with self._condition:
            return self._late_before + self._turns.late

    # --- the source's side ------------------------------------------------------------------------------------

    def put(self, group: DescribedGroup, *, timeout_s: float = MAX_WAIT_S) -> None:
        """Hand in the next group of the pass; waits for room, drops nothing.

        Raises ``BudgetError`` when there can never be room, ``WaitTimeoutError`` at the deadline, and what ``abort``
        was given.
        """
        nbytes = group_nbytes(group)
        with self._condition:
            # said before the wait: what the taker needs may be just that a batch is over
            self._append(self._turns.approach(group.batch_index))
            self._wait(lambda: self._has_room(group, nbytes), timeout_s, f"room for group {group.group_id!r}")
            self._held.admit(nbytes)
            self._append(self._turns.put(group))

    def expect(self, batch: int, groups: int) -> None:
        """Batch ``batch`` of the pass being put will have ``groups`` groups."""
        with self._condition:
            self._append(self._turns.expect(batch, groups))

    def hole(self, batch: int, groups: int = 1) -> None:
        """So many expected groups of ``batch`` will never come."""
        with self._condition:
            self._append(self._turns.hole(batch, groups))

    def end_pass(self, *, timeout_s: float = MAX_WAIT_S) -> None:
        """The pass is over, another may begin."""
        with self._condition:
            self._append(self._turns.end())
            self._wait(lambda: self._window_in <= self._window_out + 1, timeout_s, "the end of a pass to be taken")
            self._late_before += self._turns.late
            self._turns = BatchOrder(self._order, None, self._expected)
            self._pass_number += 1
            self._batch_in = None

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more; ``take`` raises ``error`` when it has given what came before."""
        with self._condition:
            self._ended, self._end_error = True, error
            self._condition.notify_all()

    def abort(self, error: BaseException) -> None:
        """Every wait, now and later, ends with ``error``; the first one given counts."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    # --- the planner's side -----------------------------------------------------------------------------------

    def take(self, *, timeout_s: float = MAX_WAIT_S) -> Item | None:
        """The next item in training order; None when nothing comes any more. Raises as ``put`` does."""
        with self._condition:
            try:
                self._wait(self._has_item, timeout_s, "the source to give a group")
            finally:
                self._taker_waits = False
            if not self._items:
                if self._end_error is not None:
                    raise self._end_error
                return None
            self._window_out, pass_number, item = self._items.popleft()
            self._advance(pass_number, item)
            self._condition.notify_all()
            return item

    def commit(self, upto: Cursor) -> None:
        """Every batch before ``upto`` is trained."""
        with self._condition:
            self._untrained = {cursor for cursor in self._untrained if cursor >= upto}
            self._move_next()

    def let_go(self, nbytes: int) -> None:
        self._account(lambda: self._held.let_go(nbytes))

    def packed(self, step: int, nbytes: int, *, is_final: bool) -> None:
        self._account(lambda: self._held.pack(step, nbytes, is_final=is_final))

    def landed(self, step: int) -> None:
        self._account(lambda: self._held.land(step))

    def durable(self, step: int) -> None:
        self._account(lambda: self._held.make_durable(step))

    def gauge(self) -> tuple[int, int]:
        """(bytes of trajectories held, groups and other items that wait to be taken)."""
        with self._condition:
            return self._held.total, len(self._items)

    @property
    def wants_checkpoint(self) -> bool:
        with self._condition:
            return self._held.wants_checkpoint

    # --- under the lock -----------------------------------------------------------------------------------------

    def _account(self, change: Callable[[], None]) -> None:
        with self._condition:
            change()
            self._condition.notify_all()

    def _wait(self, is_over: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if self._error is not None:
                raise self._error
            if is_over():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitTimeoutError(
                    f"waited {timeout_s:g} s for {what}; batch {self._serving} is being served, {len(self._items)} "
                    f"items wait to be taken, {self._held.total} bytes are held, max_held_bytes = {self._held.limit}"
                )
            self._condition.wait(left)

    def _has_room(self, group: DescribedGroup, nbytes: int) -> bool:
        is_ahead = self._order == "prompt_batch" and group.batch_index > self._turns.serving
        window = self._window_in + (is_ahead or group.batch_index != self._batch_in)
        if window > self._window_out + 1:
            return False
        return self._held.has_room(nbytes, starving=self._taker_waits and not self._items)

    def _has_item(self) -> bool:
        if self._items or self._ended:
            return True
        if not self._taker_waits:
            self._taker_waits = True
            self._condition.notify_all()
        return False

    def _append(self, items: list[Item]) -> None:
        for item in items:
            if isinstance(item, Admitted):
                batch = item.group.batch_index
                self._window_in += batch != self._batch_in
                self._batch_in = batch
                self._untrained.add((self._pass_number, batch))
            elif isinstance(item, PassEnd):
                # a window of its own: passes without any group are kept from running ahead, too
                self._window_in += 1
            self._items.append((self._window_in, self._pass_number, item))
        if items:
            self._condition.notify_all()

    def _advance(self, pass_number: int, item: Item) -> None:
        if isinstance(item, Admitted):
            cursor = (pass_number, item.group.batch_index)
        elif isinstance(item, BatchEnd):
            cursor = (pass_number, item.batch_index + 1)
        else:
            cursor = (pass_number + 1, 0)
        self._serving = max(self._serving, cursor)
        self._move_next()

    def _move_next(self) -> None:
        # a latecomer does not take it back
        self._next = max(self._next, min((self._serving, *self._untrained)))

"""Reads a source pass by pass, in the order in which its groups are trained: at once, or ahead on a thread."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Generator, Iterator
from typing import Any, final

from shmstage.errors import StoppedError
from shmstage.events import NO_EVENTS, Events
from shmstage.orchestrator.arrivals import DescribedGroup, Groups
from shmstage.orchestrator.batch_order import BatchOrder, Expected, Item, Order
from shmstage.orchestrator.held import HeldBytes
from shmstage.orchestrator.queue import BatchOrderedQueue, group_nbytes
from shmstage.orchestrator.resume import Place, ResumeState
from shmstage.packing.held_form import HeldForm

#: how long a source that sits in its own code is waited for when reading ends; after that its thread is left to it
CLOSE_S = 2.0


def expected_groups(source: Groups) -> Expected | None:
    """How many groups each batch will have, if the source says so."""
    expected: Expected | None = getattr(source, "expected_groups", None)
    return expected


def read_passes(
    source: Groups, state: ResumeState, *, passes: int | None, order: Order, form: HeldForm | None
) -> Iterator[Item]:
    """Everything from ``state`` on, each pass closed by its ``PassEnd``; ``passes`` of None goes on for ever."""
    for place, groups in _passes(source, state, passes, form):
        turns = BatchOrder(order, place, expected_groups(source))
        for group in groups:
            yield from turns.put(group)
        yield from turns.end()


def _passes(
    source: Groups, state: ResumeState, passes: int | None, form: HeldForm | None
) -> Iterator[tuple[Place, Generator[DescribedGroup, None, None]]]:
    number, place = state.pass_number, state.place
    while passes is None or number <= passes:
        yield place, _in_form(_groups(source, number, place.cursor), form)
        number, place = number + 1, Place()


def _groups(source: Groups, pass_number: int, cursor: int) -> Iterator[Any]:
    """A source that keeps what it gave apart by pass is told which one it is."""
    of_pass = getattr(source, "groups_of_pass", None)
    return of_pass(pass_number, cursor) if of_pass is not None else source.groups(cursor)


def _in_form(groups: Iterator[Any], form: HeldForm | None) -> Generator[DescribedGroup, None, None]:
    """Closing it closes ``groups``; without a form they stay as they come."""
    try:
        yield from map(form.of_group, groups) if form is not None else groups  # a loop would hold the group as it came
    finally:
        close = getattr(groups, "close", None)
        if close is not None:
            close()


@final
class SourceReader:
    """Reads ahead on a thread of its own, as far as ``queue`` has room. ``items`` gives what ``read_passes`` would."""

    def __init__(
        self,
        source: Groups,
        state: ResumeState,
        *,
        passes: int | None,
        order: Order,
        held: HeldBytes,
        form: HeldForm | None,
        events: Events = NO_EVENTS,
    ) -> None:
        self.queue = BatchOrderedQueue(
            order, pass_number=state.pass_number, place=state.place, expected=expected_groups(source), held=held
        )
        self._source = source
        self._state = state
        self._passes = passes
        self._form = form
        self._events = events
        self._thread = threading.Thread(target=self._run, name="source reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def items(self) -> Iterator[Item]:
        """Raises what the source raised, after everything it gave before."""
        while (item := self.queue.take()) is not None:
            yield item

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Every wait ends at once; a source that is busy in its own code is waited for, but not for ever."""
        self.queue.abort(StoppedError("reading the source was ended"))
        stop_reading = getattr(self._source, "stop_reading", None)
        if stop_reading is not None:  # it waits for somebody else, and can be told not to
            stop_reading()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for _, groups in _passes(self._source, self._state, self._passes, self._form):
                with contextlib.closing(groups):
                    for group in groups:
                        self._events.note(
                            "group_arrived", trajectories=len(group.trajectories), nbytes=group_nbytes(group)
                        )
                        self.queue.put(group)
                self.queue.end_pass()
        except BaseException as error:
            # its frames hold what was read last
            traceback.clear_frames(error.__traceback__)
            self.queue.end(error)
        else:
            self.queue.end()

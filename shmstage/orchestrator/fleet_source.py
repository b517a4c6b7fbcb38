"""What comes in, in a fleet: references to trajectories that lie in one store per host, in one order.

Group number n of a pass lies in store n % stores. Whoever reads goes round the stores by number, so the order does not
depend on which of them is faster, and a run that begins again anywhere gets the same groups.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from shmstage.errors import ProtocolError, SettingsError, StoppedError, TrajectoryError
from shmstage.orchestrator.batch_order import Expected
from shmstage.orchestrator.doors import Answer, Doors
from shmstage.orchestrator.reference_wire import ReferenceGroup, group_from_wire, groups_from_wire
from shmstage.packing.reference import TrajectoryReference

#: groups asked for at once; what was told and is not planned yet is in no account but the store's own
GROUPS_PER_READ = 16
#: how long a store waits for its source before it answers with nothing
WAIT_S = 1.0


@dataclass
class _Share:
    """What is known of one store. ``reached``: the number that a group of it comes from; ``kept``: (pass, group
    number, number behind its last trajectory), of those that are not released; ``covered``: what its journal has heard.
    """

    store: int
    reached: int = 0
    ended: bool = False
    ready: deque[ReferenceGroup] = field(default_factory=deque)
    kept: deque[tuple[int, int, int]] = field(default_factory=deque)
    covered: tuple[int, int] = (0, 0)


@final
class FleetSource:
    """An input as ``Intake`` reads it. One thread reads, any other may call ``landed``, ``release``, ``stop_reading``.

    A store holds what it gave in memory until its step has landed. A restart reads a replayable source anew, and what
    a source cannot give again from the store's journal, which keeps it until a durable checkpoint covers it.
    """

    def __init__(self, stores: Doors, told: Sequence[Answer], *, passes: int | None, timeout_s: float) -> None:
        """``told``: what the stores answered to hello. ``passes`` as in the settings.

        Raises ``SettingsError`` for what a live source cannot do, ``TrajectoryError`` for an empty input.
        """
        self._stores = stores
        self._timeout_s = timeout_s
        replayable = [each.take("replayable", bool) for each in told]
        counts = [each.count("stores") for each in told]
        if len(set(replayable)) != 1 or len(set(counts)) != 1 or not 1 <= counts[0] <= len(stores):
            raise ProtocolError(f"the stores do not hold one input: replayable = {replayable}, stores = {counts}")
        if not replayable[0] and (passes or 1) > 1:
            raise SettingsError(f"passes = {passes}: the source cannot be replayed; use passes = 1")
        self.source_is_replayable = replayable[0]
        self.passes = passes if replayable[0] else 1
        self._giving = counts[0]
        self._sums_batches = not replayable[0]
        self._expected: dict[int, int | None] = {}
        self.expected_groups: Expected | None = self._expected_of if told[0].take("knows_batches", bool) else None
        self._lock = threading.Lock()
        #: (pass, cursor): what is before is trained, and is covered by a durable checkpoint
        self._landed = self._covered = (0, 0)
        self._stopped = False
        stop = stores.stop
        stores.stop = lambda: self._stopped or stop()
        self._shares = [_Share(store) for store in range(self._giving)]
        self.first = self._first("train")

    def groups(self, cursor: int) -> Iterator[ReferenceGroup]:
        """Groups number ``cursor``, ``cursor + 1``, ... of the first pass."""
        return self.groups_of_pass(1, cursor)

    def groups_of_pass(self, pass_number: int, cursor: int) -> Iterator[ReferenceGroup]:
        """Groups number ``cursor``, ``cursor + 1``, ... of that pass."""
        # whoever trains stops in good order, and says so by ``stop_reading``
        self._stores.stop = lambda: self._stopped
        for share in self._shares:
            share.ready.clear()
            share.reached, share.ended = cursor, False
        number = cursor
        while not all(share.ended and not share.ready for share in self._shares):
            share = self._shares[number % self._giving]
            self._fill(share, pass_number)
            if share.ready and share.ready[0].number == number:
                group = share.ready.popleft()
                if group.trajectories:
                    share.kept.append((pass_number, number, group.trajectories[-1].key.number + 1))
                self._know_batch(group.batch_index)
                yield group
            number += 1

    def evaluation(self) -> EvaluationReferences:
        """All of the evaluation bundle; for the thread that reads, before it reads anything else."""
        found: list[ReferenceGroup] = []
        for store in range(len(self._stores)):
            cursor, ended = 0, False
            while not ended:
                groups, ended = self._read(store, "eval", 1, cursor)
                found += groups
                cursor = groups[-1].number + 1 if groups else cursor
        return EvaluationReferences(sorted(found, key=lambda group: group.number), self._first("eval"))

    def release(self, cursor: int, pass_number: int = 1) -> None:
        """Groups before number ``cursor`` of that pass are needed no more. Any thread.

        The stores hear of it from the thread that reads, at its next turn.
        """
        with self._lock:
            self._covered = max(self._covered, (pass_number, cursor))
            self._landed = max(self._landed, self._covered)

    def landed(self, cursor: int, pass_number: int) -> None:
        """Groups before number ``cursor`` of that pass are trained. Any thread, heard of as ``release`` is."""
        with self._lock:
            self._landed = max(self._landed, (pass_number, cursor))

    def stop_reading(self) -> None:
        """A wait for the stores ends at once. Any thread."""
        self._stopped = True

    # --- the thread that reads ------------------------------------------------------------------------------

    def _fill(self, share: _Share, pass_number: int) -> None:
        """Until a group of the share is there, or its end is known."""
        while not share.ready and not share.ended:
            self._let_go()
            groups, share.ended = self._read(share.store, "train", pass_number, share.reached)
            for group in groups:
                if group.number < share.reached or group.number % self._giving != share.store:
                    raise ProtocolError(
                        f"{self._stores.who(share.store)} gave group number {group.number}; want numbers from "
                        f"{share.reached} on, {share.store} modulo {self._giving}"
                    )
                share.reached = group.number + 1
            share.ready.extend(groups)

    def _read(self, store: int, what: str, pass_number: int, cursor: int) -> tuple[list[ReferenceGroup], bool]:
        if self._stopped:
            raise StoppedError("reading the stores was ended")
        asked: dict[str, Any] = {"what": what} if what != "train" else {}
        asked |= {"pass_number": pass_number, "cursor": cursor, "count": GROUPS_PER_READ, "wait_s": WAIT_S}
        answer = self._stores.call(store, "read", asked, timeout_s=self._timeout_s)
        return groups_from_wire(answer.any("groups"), store, answer.where), answer.take("end", bool)

    def _let_go(self) -> None:
        """Tell the stores what is trained, each its own, and their journals what is covered."""
        with self._lock:
            landed, covered = self._landed, self._covered
        for share in self._shares:
            below = -1
            while share.kept and share.kept[0][:2] < landed:
                below = share.kept.popleft()[2]
            if below >= 0:
                self._stores.call(share.store, "release", {"below": below}, timeout_s=self._timeout_s)
            if not self.source_is_replayable and covered > share.covered:
                share.covered = covered
                self._stores.call(share.store, "covered", {"cursor": covered[1]}, timeout_s=self._timeout_s)

    def _first(self, what: str) -> TrajectoryReference:
        """The first trajectory of all, which may have to be waited for."""
        found = []
        for store in range(self._giving if what == "train" else len(self._stores)):
            while True:
                if self._stopped:
                    raise StoppedError("stopped while waiting for the first trajectory")
                asked = {"what": what, "wait_s": WAIT_S}
                answer = self._stores.call(store, "first", asked, timeout_s=self._timeout_s)
                told = answer.any("group")
                if told is not None:
                    found.append(group_from_wire(told, store, answer.where))
                if told is not None or answer.take("end", bool):
                    break
        groups = sorted((group for group in found if group.trajectories), key=lambda group: group.number)
        if not groups:
            raise TrajectoryError("the input holds no trajectory; check the bundle or the source")
        return groups[0].trajectories[0]

    # --- how many groups a batch has ------------------------------------------------------------------------

    def _know_batch(self, batch_index: int) -> None:
        """Asked here, where nobody waits for the answer under a lock."""
        if self.expected_groups is not None:
            self._expected_of(batch_index)

    def _expected_of(self, batch_index: int) -> int | None:
        """Always the same for the same batch, so it is asked for once."""
        if batch_index not in self._expected:
            stores = range(self._giving) if self._sums_batches else range(1)
            told = [
                self._stores.call(store, "expected", {"batch_index": batch_index}, timeout_s=self._timeout_s)
                for store in stores
            ]
            counts = [answer.count("groups") if answer.any("groups") is not None else None for answer in told]
            known = [count for count in counts if count is not None]
            self._expected[batch_index] = sum(known) if len(known) == len(counts) else None
        return self._expected[batch_index]


@final
class EvaluationReferences:
    """What is evaluated on: the same references each time."""

    def __init__(self, groups: Sequence[ReferenceGroup], first: TrajectoryReference) -> None:
        self.first = first
        self._groups = tuple(groups)

    def groups(self, cursor: int) -> Iterator[ReferenceGroup]:
        return iter(self._groups[cursor:])

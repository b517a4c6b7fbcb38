"""Holds a host's share of the trajectories until their step has landed; gives descriptions and pieces.

It lives longer than the gang that trains from it. What it gives away is never the trajectory itself: an orchestrator
gets references (``read``), a host's agent the tokens that its window needs (``pieces``).
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

from shmstage.errors import ProtocolError, StoppedError, shown
from shmstage.launch.source_share import SourceShare
from shmstage.orchestrator.layouts import experts_of
from shmstage.packing.held_form import HeldForm
from shmstage.packing.pieces import encode_pieces, hash_of_whole
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.settings import Settings

#: read ahead of whoever asks: so many groups and bytes, whichever is reached first
AHEAD_GROUPS = 64
AHEAD_NBYTES = 64 << 20
#: an answer to ``read`` stays well below the frame limit, unless one group alone is more
ANSWER_NBYTES = 256 << 10
#: a description on the wire, less its id
_DESCRIBED_NBYTES = 160

Number = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class _Held:
    """A trajectory and what makes it quick to send: hashed when it comes, not when it is wanted."""

    trajectory: Trajectory
    hash_of_whole: bytes

    @classmethod
    def of(cls, trajectory: Trajectory) -> _Held:
        return cls(trajectory, hash_of_whole(trajectory))


@final
class _First:
    """Looks for a share's first trajectory on a thread of its own: it may not have come yet."""

    def __init__(self, share: SourceShare) -> None:
        self._share = share
        self._found: tuple[int, Group] | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def get(self, wait_s: float) -> tuple[tuple[int, Group] | None, bool]:
        """(number and group, whether that is the last word). Raises what the source raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="store first", daemon=True)
            self._thread.start()
        known = self._done.wait(wait_s)
        if self._error is not None:
            raise self._error
        return self._found, known

    def _run(self) -> None:
        try:
            found = self._share.first() if self._share.gives else None
            if found is not None:
                number, group = found
                self._found = number, Group(group.group_id, group.batch_index, group.trajectories[:1])
        except BaseException as error:
            self._error = error
        self._done.set()


@final
class _Evaluation:
    """The share of the evaluation bundle: read once, never let go."""

    def __init__(self, share: SourceShare, settings: Settings) -> None:
        self.share = share
        self.first = _First(share)
        self._settings = settings
        self.groups: list[tuple[int, Group, list[int]]] | None = None
        self.held: dict[int, _Held] = {}

    def read(self, next_number: int) -> int:
        """Number all trajectories, from ``next_number`` on, once; returns the number after the last."""
        if self.groups is None:
            groups = [(number, group) for number, group in self.share.groups(0) if group is not None]
            first = next((group.trajectories[0] for _, group in groups if group.trajectories), None)
            form = HeldForm(self._settings.routing_encoding, experts_of(first, self._settings) if first else 0)
            self.groups = []
            for number, group in groups:
                held = form.of_group(group)
                numbers = list(range(next_number, next_number + len(held.trajectories)))
                next_number += len(numbers)
                self.held.update(zip(numbers, map(_Held.of, held.trajectories), strict=True))
                self.groups.append((number, held, numbers))
        return next_number


@dataclass
class _Run:
    """One run over the share from some group on, on a thread of its own."""

    pass_number: int
    #: groups below have been handed out or passed over
    handed: int
    #: groups below have been read
    read: int
    ready: deque[tuple[int, Group, list[int]]] = field(default_factory=deque)
    ready_nbytes: int = 0
    error: BaseException | None = None
    ended: bool = False
    #: nobody wants it any more
    over: bool = False


@final
class TrajectoryStore:
    """Any thread may call. ``open_session`` begins anew: what an earlier orchestrator was given it does not know."""

    def __init__(
        self, settings: Settings, share: SourceShare, evaluation: SourceShare | None, index: int, count: int
    ) -> None:
        self.index = index
        self._settings = settings
        self._share = share
        self._first = _First(share)
        self._evaluation = _Evaluation(evaluation, settings) if evaluation is not None else None
        self._epoch = -1
        self._condition = threading.Condition()
        self._next_number = 0
        #: in rising order of their numbers
        self._held: dict[int, _Held] = {}
        self._held_nbytes = 0
        self._form: HeldForm | None = None
        self._run: _Run | None = None
        limit = settings.max_held_bytes // (4 * count)
        self._ahead_nbytes = min(AHEAD_NBYTES, limit) if limit else AHEAD_NBYTES

    # --- what the orchestrator asks --------------------------------------------------------------------------

    def open_session(self, epoch: int) -> dict[str, Any]:
        """What of a new orchestrator is the first thing: nobody names any more what the one before was given."""
        with self._condition:
            if epoch != self._epoch:
                self._epoch = epoch
                self._end_run()
                self._held.clear()
                self._held_nbytes = 0
            held_nbytes = self._held_nbytes
        return {
            "store": self.index, "stores": self._share.stores, "replayable": self._share.replayable,
            "sharded": self._share.sharded, "knows_batches": self._share.expected_groups is not None,
            "held_nbytes": held_nbytes,
        }  # fmt: skip

    def first(self, what: str, wait_s: float) -> dict[str, Any]:
        """A group with the share's first trajectory alone, the same for as long as the run lives; reading goes on.

        No group and no end: it has not come within ``wait_s``. ``what``: "train" or "eval".
        """
        first = self._first if what == "train" else self._evaluated(what).first
        found, known = first.get(wait_s)
        if found is None:
            return {"group": None, "end": known}
        number, group = found
        trajectory = group.trajectories[0]
        form = HeldForm(self._settings.routing_encoding, experts_of(trajectory, self._settings))
        described = [_described(0, form.of(trajectory))]
        return {"group": [number, group.group_id, group.batch_index, described], "end": False}

    def read_evaluation(self, what: str, cursor: int, count: int) -> dict[str, Any]:
        """Of the evaluation bundle what ``read`` gives of the input."""
        evaluation = self._evaluated(what)
        with self._condition:
            self._next_number = evaluation.read(self._next_number)
        answer = _Answer(count)
        for group in evaluation.groups or ():
            if group[0] >= cursor and not answer.add(*group):
                return {"groups": answer.groups, "end": False}
        return {"groups": answer.groups, "end": True}

    def read(self, pass_number: int, cursor: int, count: int, wait_s: float) -> dict[str, Any]:
        """At most ``count`` groups of this share with number >= ``cursor``, described, in order.

        Nothing and no end after ``wait_s``: ask again. Raises what the source raised, after everything it gave before.
        """
        if not self._share.gives or (pass_number > 1 and not self._share.replayable):
            return {"groups": [], "end": True}
        with self._condition:
            run = self._run_at(pass_number, cursor)
            self._pass_over(run, cursor)
            self._condition.wait_for(lambda: run.ready or run.ended or run.over, wait_s)
            self._pass_over(run, cursor)
            answer = _Answer(count)
            while run.ready and answer.add(*run.ready[0]):
                self._take(run)
            if not answer.groups and run.over:
                raise StoppedError(f"store {self.index}: reading was begun anew elsewhere")
            if not answer.groups and run.error is not None:
                raise run.error
            return {"groups": answer.groups, "end": run.ended and not run.ready and run.error is None}

    def expected(self, batch_index: int) -> int | None:
        """How many groups the source says the batch has; of a sharded one: of this shard's."""
        if self._share.expected_groups is None:
            return None
        expected: int | None = self._share.expected_groups(batch_index)
        return expected

    def release(self, below: int) -> None:
        """Trajectories with a number below ``below`` are let go; of a live source the journal still has them."""
        with self._condition:
            for number in list(self._held):  # they rise
                if number >= below:
                    break
                self._held_nbytes -= self._held.pop(number).trajectory.nbytes

    def covered(self, cursor: int) -> None:
        """Nobody will resume from before group number ``cursor``: the journal lets go. Raises ``BundleError``."""
        self._share.release(cursor)

    # --- what agents ask ---------------------------------------------------------------------------------------

    def pieces(self, numbers: Number, begins: Number, ends: Number) -> list[npt.NDArray[np.uint8]]:
        """Tokens ``begins`` to ``ends`` of the numbered trajectories, as views of what is held (`packing.pieces`).

        Raises ``ProtocolError`` for a number that is not held.
        """
        with self._condition:
            try:
                kept = self._evaluation.held if self._evaluation is not None else {}
                held = [kept.get(number) or self._held[number] for number in numbers.tolist()]
            except KeyError as error:
                known = f"{next(iter(self._held))} to {next(reversed(self._held))}" if self._held else "none"
                raise ProtocolError(
                    f"store {self.index} holds no trajectory number {error.args[0]} (it holds {known}): it was let go, "
                    "or belongs to an orchestrator that is dead"
                ) from None
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        return encode_pieces([each.trajectory for each in held], spans, [each.hash_of_whole for each in held])

    @property
    def held_nbytes(self) -> int:
        with self._condition:
            return self._held_nbytes

    def close(self) -> None:
        """A source that sits in its own code is left to its thread; what is journaled stays."""
        with self._condition:
            self._end_run()
            self._held.clear()
            self._held_nbytes = 0
        self._share.close()

    def _evaluated(self, what: str) -> _Evaluation:
        if what != "eval" or self._evaluation is None:
            raise ProtocolError(f"store {self.index} has nothing called {shown(what)} to read")
        return self._evaluation

    # --- under the condition -----------------------------------------------------------------------------------

    def _run_at(self, pass_number: int, cursor: int) -> _Run:
        run = self._run
        if run is None or run.pass_number != pass_number or cursor < run.handed:
            self._end_run()
            run = self._run = _Run(pass_number, cursor, cursor)
            name = f"store {self.index} reader"
            threading.Thread(target=self._read, args=(run, cursor), name=name, daemon=True).start()
        return run

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.over = True
            self._run.ready.clear()
            self._run = None
            self._condition.notify_all()

    def _take(self, run: _Run) -> list[int]:
        number, group, numbers = run.ready.popleft()
        run.ready_nbytes -= sum(each.nbytes for each in group.trajectories)
        run.handed = number + 1
        self._condition.notify_all()
        return numbers

    def _pass_over(self, run: _Run, cursor: int) -> None:
        """What the orchestrator does not want any more: trained before a resume."""
        while run.ready and run.ready[0][0] < cursor:
            for number in self._take(run):
                held = self._held.pop(number, None)
                self._held_nbytes -= held.trajectory.nbytes if held is not None else 0

    # --- on the run's thread -----------------------------------------------------------------------------------

    def _read(self, run: _Run, cursor: int) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._share.groups(cursor)) as groups:
                for number, group in groups:
                    if not self._admit(run, number, group):
                        return
        except BaseException as raised:
            traceback.clear_frames(raised.__traceback__)  # they hold what was read last
            error = raised
        with self._condition:
            run.error, run.ended = error, True
            self._condition.notify_all()

    def _admit(self, run: _Run, number: int, group: Group | None) -> bool:
        """False: the run is over."""
        if group is None:
            with self._condition:
                run.read = number + 1
                return not run.over
        group = self._in_form(group)
        nbytes = sum(each.nbytes for each in group.trajectories)
        held = [_Held.of(each) for each in group.trajectories]
        with self._condition:
            self._condition.wait_for(lambda: run.over or self._has_room(run, nbytes))
            if run.over:
                return False
            numbers = list(range(self._next_number, self._next_number + len(group.trajectories)))
            self._next_number += len(numbers)
            self._held.update(zip(numbers, held, strict=True))
            self._held_nbytes += nbytes
            run.ready.append((number, group, numbers))
            run.ready_nbytes += nbytes
            run.read = number + 1
            self._condition.notify_all()
            return True

    def _has_room(self, run: _Run, nbytes: int) -> bool:
        if not run.ready:
            return True
        return len(run.ready) < AHEAD_GROUPS and run.ready_nbytes + nbytes <= self._ahead_nbytes

    def _in_form(self, group: Group) -> Group:
        if self._form is None:
            if not group.trajectories:
                return group
            first = group.trajectories[0]
            self._form = HeldForm(self._settings.routing_encoding, experts_of(first, self._settings))
        return self._form.of_group(group)


@final
class _Answer:
    """Groups described for one answer: as many as were asked for and fit into it, but one in any case."""

    def __init__(self, count: int) -> None:
        self.groups: list[list[Any]] = []
        self._count = count
        self._nbytes = 0

    def add(self, number: int, group: Group, numbers: list[int]) -> bool:
        """False: it is for the next answer."""
        self._nbytes += sum(_DESCRIBED_NBYTES + len(each.trajectory_id) for each in group.trajectories)
        if self.groups and (self._nbytes > ANSWER_NBYTES or len(self.groups) >= self._count):
            return False
        described = [_described(*each) for each in zip(numbers, group.trajectories, strict=True)]
        self.groups.append([number, group.group_id, group.batch_index, described])
        return True


def _described(number: int, trajectory: Trajectory) -> list[Any]:
    routing: Sequence[int] = trajectory.routing.shape if trajectory.routing is not None else ()
    return [
        number, trajectory.trajectory_id, trajectory.policy_version, trajectory.length, trajectory.nbytes,
        trajectory.loss_tokens, trajectory.digest, sorted(trajectory.optional), trajectory.experts,
        [int(size) for size in routing],
    ]  # fmt: skip

"""The feeder, with a real pool: numbered from the first step to train, held back by the budget, never stuck."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from input_making import Given, make_group
from test_input import Live

from shmstage.errors import BudgetError, LayoutError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.pool import Pool
from shmstage.orchestrator.feeder import EndOfInput, Feeder, FeederEvent, PackedMicrobatch
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.local_packer import LocalPacker
from shmstage.orchestrator.queue import group_nbytes
from shmstage.orchestrator.resume import ResumeState
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.plan import PlanSettings
from shmstage.packing.source import Source
from shmstage.settings import Settings

WAIT_S = 20.0
TOKENS = 12
LAYOUT = microbatch_layout(1, TOKENS)
PLAN = PlanSettings(rows=1, tokens=TOKENS)
#: one trajectory of a whole row each: one micro-batch per group
GROUPS = [make_group(i, i, [TOKENS]) for i in range(12)]
NBYTES = group_nbytes(GROUPS[0])


class Run:
    """Stands where the program stands: takes what is packed, frees its slot as a trainer that is done with it would."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.feeder: Feeder
        self._events: list[FeederEvent] = []
        self._condition = threading.Condition()

    def begin(
        self,
        source: Source,
        *,
        resume: ResumeState | None = None,
        first_step: int = 1,
        per_step: int = 2,
        held: int = 0,
    ) -> Feeder:
        self._events.clear()  # what an earlier feeder had packed ahead
        self.pool.end_leases_of(0)
        intake = Intake(source, PLAN, passes=1, resume=resume, max_held_bytes=held)
        self.feeder = Feeder(
            intake, LocalPacker(self.pool, LAYOUT, slot_timeout_s=WAIT_S, peers=[]), microbatches_per_step=per_step,
            first_step=first_step, last_step=None, deliver=self._deliver,
        )  # fmt: skip
        self.feeder.allow((99, 0))
        self.feeder.start()
        return self.feeder

    def _deliver(self, event: FeederEvent) -> None:
        with self._condition:
            self._events.append(event)
            self._condition.notify_all()

    def next(self) -> FeederEvent:
        with self._condition:
            assert self._condition.wait_for(lambda: self._events, WAIT_S), "the feeder is stuck"
            event = self._events.pop(0)
        if isinstance(event, PackedMicrobatch):
            self.pool.end_leases_of(0)
        return event

    def packed(self) -> PackedMicrobatch:
        event = self.next()
        assert isinstance(event, PackedMicrobatch), event
        return event


@pytest.fixture
def run() -> Iterator[Run]:
    identity = ProcessIdentity.create("feeder", "orchestrator")
    pool = Pool.create("feeder", epoch=1, layouts=[LAYOUT], slots=3, identity=identity)
    run = Run(pool)
    yield run
    run.feeder.close()
    pool.close()
    identity.close()


def numbered(packed: PackedMicrobatch) -> tuple[int, int, str]:
    return packed.handle.step, packed.handle.index, *packed.trajectory_ids  # type: ignore[return-value]


def test_a_resumed_feeder_begins_with_the_first_microbatch_of_its_first_step(run: Run) -> None:
    run.begin(Given(GROUPS))
    first = [run.packed() for _ in range(4)]
    assert [numbered(packed) for packed in first] == [
        (1, 0, "t0.0"), (1, 1, "t1.0"), (2, 0, "t2.0"), (2, 1, "t3.0"),
    ]  # fmt: skip
    run.feeder.close()
    run.begin(Given(GROUPS), resume=first[-1].state_after, first_step=3)
    assert [numbered(run.packed()) for _ in range(2)] == [(3, 0, "t4.0"), (3, 1, "t5.0")]


def test_a_source_over_budget_and_the_next_step_do_not_wait_for_each_other(run: Run) -> None:
    """Three micro-batches fit: to plan the first of step k+1 the source needs the room that step k has taken.

    Landing alone makes that room; nothing of step k has been booked here.
    """
    feeder = run.begin(Given(GROUPS), held=3 * NBYTES)
    for step in range(1, 7):
        assert [numbered(run.packed())[:2] for _ in range(2)] == [(step, 0), (step, 1)]
        feeder.landed(step)
    assert isinstance(run.next(), EndOfInput)
    assert not feeder.wants_checkpoint


def test_a_step_that_never_fits_ends_the_run_by_name(run: Run) -> None:
    run.begin(Given(GROUPS), per_step=4, held=3 * NBYTES)
    seen = []
    while isinstance(event := run.next(), PackedMicrobatch):
        seen.append(event)
    assert isinstance(event.error, BudgetError)
    assert "one step does not fit" in str(event.error)
    assert len(seen) < 4


def test_a_live_source_over_budget_asks_for_a_checkpoint_and_goes_on_when_it_is_durable(
    run: Run, tmp_path: Path
) -> None:
    source = Input(Live(GROUPS), Settings(out=tmp_path))
    feeder = run.begin(source, held=6 * NBYTES)
    asked = []
    for step in range(1, 7):
        state = [run.packed() for _ in range(2)][-1].state_after
        feeder.landed(step)
        if feeder.wants_checkpoint:
            asked.append(step)
            feeder.durable(step)
            assert not feeder.wants_checkpoint
    assert isinstance(run.next(), EndOfInput)
    assert asked
    feeder.durable(6)
    assert state.cursor == 12
    assert list(source.groups(12)) == []
    source.close()
    (segment,) = (tmp_path / "journal").glob("segment-*")
    assert (segment.name, segment.stat().st_size) == ("segment-000000000012.journal", 0)


def test_closing_ends_a_wait_for_the_source(run: Run) -> None:
    run.begin(Given(GROUPS), held=3 * NBYTES)
    run.packed()
    run.packed()
    # the source waits for room now or soon, the feeder for the source
    run.feeder.close()
    for thread in threading.enumerate():
        if thread.name in ("feeder", "source reader"):
            thread.join(WAIT_S)
            assert not thread.is_alive(), thread.name


def test_the_last_microbatch_of_each_step_alone_is_final(run: Run) -> None:
    run.begin(Given(GROUPS), per_step=3)
    assert [run.packed().handle.is_final for _ in range(6)] == [False, False, True] * 2


def test_only_what_a_durable_checkpoint_covers_is_let_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(Intake, "release", lambda self, cursor, pass_number: released.append(cursor))
    feeder = run.begin(Given(GROUPS))
    cursors = [run.packed().state_after.cursor for _ in range(6)]
    feeder.durable(1)
    assert released == [cursors[1]]
    feeder.durable(3)
    assert released == [cursors[1], cursors[5]]


def test_a_field_that_a_trajectory_lacks_is_refused_and_not_trained_as_zero() -> None:
    layout = microbatch_layout(1, TOKENS, optional=frozenset({"ref_logprobs"}))
    identity = ProcessIdentity.create("lacking", "orchestrator")
    pool = Pool.create("lacking", epoch=1, layouts=[layout], slots=1, identity=identity)
    try:
        packer = LocalPacker(pool, layout, slot_timeout_s=WAIT_S, peers=[])
        planned = next(iter(Intake(Given(GROUPS), PLAN, passes=1)))
        with pytest.raises(LayoutError, match=r"have \['ref_per_token_logps'\], which trajectory 't0.0'"):
            packer.pack(planned, step=1, index=0, is_final=True, stop=lambda: False)
    finally:
        pool.close()
        identity.close()


def test_a_late_field_that_nobody_carries_is_zero_until_it_is_written() -> None:
    layout = microbatch_layout(1, TOKENS, late=["ref_per_token_logps"])
    identity = ProcessIdentity.create("late", "orchestrator")
    pool = Pool.create("late", epoch=1, layouts=[layout], slots=1, identity=identity)
    try:
        packer = LocalPacker(pool, layout, slot_timeout_s=WAIT_S, peers=[])
        for planned in islice(Intake(Given(GROUPS), PLAN, passes=1), 2):  # one after the other in one slot
            handle = packer.pack(planned, step=1, index=0, is_final=True, stop=lambda: False).handle
            late = pool.late_views(handle)["ref_per_token_logps"]
            assert not late.any()
            late[:] = 7
            del late
            pool.end_leases_of(0)
    finally:
        pool.close()
        identity.close()


def test_what_landed_is_let_go_at_once_where_the_source_gives_it_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(Intake, "release", lambda self, cursor, pass_number: released.append(cursor))
    feeder = run.begin(Given(GROUPS))
    cursors = [run.packed().state_after.cursor for _ in range(6)]
    feeder.landed(1)
    assert released == [cursors[1]]
    feeder.landed(3)
    assert released == [cursors[1], cursors[5]]


def test_what_landed_of_a_live_source_is_said_to_be_trained_and_kept_until_it_is_durable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(Intake, "release", lambda self, cursor, pass_number: told.append(("release", cursor)))
    monkeypatch.setattr(Intake, "landed", lambda self, cursor, pass_number: told.append(("landed", cursor)))
    source = Given(GROUPS)
    source.source_is_replayable = False  # type: ignore[attr-defined]
    feeder = run.begin(source)
    cursors = [run.packed().state_after.cursor for _ in range(6)]
    feeder.landed(1)
    feeder.landed(3)
    assert told == [("landed", cursors[1]), ("landed", cursors[5])]
    feeder.durable(1)
    assert told[2:] == [("release", cursors[1])]

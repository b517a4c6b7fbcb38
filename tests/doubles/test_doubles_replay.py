"""Trainers that drop tokens and replay: in every mode the reference loop's sums, and each replay exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from doubles.rig import Case, Reference, assert_as_the_reference, assert_contracts_calls, reference, run
from doubles.test_doubles_timing import as_late_as_it_goes

from shmstage.errors import TokenFailedError
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.doubles_device import Device
from shmstage.testing.engines_doubles import OverflowingEngine, PacedEngine

Overflows = Callable[[int, int], bool]
WHICH: dict[str, Overflows] = {
    "none": lambda step, index: False,
    "the_first": lambda step, index: index == 0,
    "a_middle_one": lambda step, index: index == 1,
    "the_last": lambda step, index: index == 2,
    "every_one": lambda step, index: True,
    "some_of_some_steps": lambda step, index: (step * 5 + index) % 3 == 0,
}


def oracle(case: Case, overflows: Overflows) -> tuple[Reference, list[str]]:
    """The reference loop with the same overflows, and what its engine did."""
    engines: list[OverflowingEngine] = []

    def make(inner: Any) -> OverflowingEngine:
        engines.append(OverflowingEngine(inner, overflows))
        return engines[0]

    return reference(case, make), engines[0].log


#: in the mode that moves most about every kind, in the others those that differ most
CASES: list[tuple[Boundary, str]] = [
    *(("staged_before_update", which) for which in WHICH),
    *((mode, which) for mode in BOUNDARIES[:3] for which in ("the_last", "every_one", "some_of_some_steps")),
]


@pytest.mark.parametrize(("mode", "which"), CASES)
def test_overflows_are_replayed_once_and_add_up_as_in_the_reference_loop(mode: Boundary, which: str) -> None:
    engines: list[OverflowingEngine] = []
    device = as_late_as_it_goes(mode, 3, 3)

    def make(inner: Any) -> PacedEngine:
        engines.append(OverflowingEngine(inner, WHICH[which]))
        return PacedEngine(engines[0], device)

    case = Case(mode=mode, microbatches=3, engine=make, device=device, checkpoint_every=1)
    outcome = run(case)
    wanted, log = oracle(case, WHICH[which])
    assert_as_the_reference(case, outcome, wanted)
    assert_contracts_calls(case, outcome)
    assert engines[0].log == log
    # counted once: what was replayed weighs as much as what was not
    assert wanted.denominators == reference(case).denominators


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_short_steps_that_overflow_every_time(mode: Boundary, microbatches: int) -> None:
    case = Case(mode=mode, microbatches=microbatches, engine=lambda inner: OverflowingEngine(inner, WHICH["every_one"]))
    assert_as_the_reference(case, run(case), oracle(case, WHICH["every_one"])[0])


@pytest.mark.parametrize("which", ["the_last", "every_one"])
@pytest.mark.parametrize("mode", BOUNDARIES[2:])
def test_a_third_device_buffer_changes_nothing_but_the_wait(mode: Boundary, which: str) -> None:
    case = Case(
        mode=mode, microbatches=3, device_buffers=3, engine=lambda inner: OverflowingEngine(inner, WHICH[which])
    )
    assert_as_the_reference(case, run(case), oracle(case, WHICH[which])[0])


def test_the_replay_of_one_goes_out_before_the_one_after_the_next() -> None:
    engines: list[OverflowingEngine] = []

    def make(inner: Any) -> OverflowingEngine:
        engines.append(OverflowingEngine(inner, WHICH["every_one"]))
        return engines[0]

    run(Case(mode="staged_before_update", steps=1, microbatches=3, engine=make))
    assert engines[0].log == [
        "first 1.0", "first 1.1", "replay 1.0", "first 1.2", "replay 1.1", "replay 1.2", "update 1",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_replay_that_fails_on_the_device_fails_its_step(mode: Boundary) -> None:
    def make(inner: Any) -> PacedEngine:
        overflowing = OverflowingEngine(inner, WHICH["a_middle_one"])
        return PacedEngine(overflowing, Device(), fails=frozenset({"replay 2.1"}))

    outcome = run(Case(mode=mode, microbatches=3, wire="memory", checkpoint_every=1, engine=make))
    assert isinstance(outcome.error, TokenFailedError) and "seeded device failure of replay 2.1" in str(outcome.error)
    assert 2 not in outcome.written and outcome.saved == [0, 1]

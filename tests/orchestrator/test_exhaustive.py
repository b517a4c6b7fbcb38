"""Every order of events that a step boundary can see, walked to the end against the contract's invariants.

``python -m pytest tests/orchestrator -k exhaustive -s`` prints states and orders of each configuration and in all. What
is walked: ``walk/plan.py``; what may happen: ``walk/world.py``; what must hold: ``walk/invariants.py``.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from walk import plan
from walk.cases import Case
from walk.invariants import ViolationError
from walk.machine import quick_replace, quickly
from walk.random_walk import random_case, random_path
from walk.seeded_faults import FAULTS, SeededFault
from walk.tally import Tally
from walk.walker import walk

from shmstage.orchestrator.schedule import State
from shmstage.settings import BOUNDARIES, Boundary

TALLY = Tally()


def test_the_quick_copy_of_a_state_is_what_dataclasses_make() -> None:
    state = State(1)
    changes = {"sent": 2, "deferred": True, "packed": ((1, 2),), "done": True}
    assert quick_replace(state, **changes) == replace(state, **changes)
    assert quick_replace(state) == state


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_small_configurations(mode: Boundary) -> None:
    assert not TALLY.walk_all(f"{mode}, all settings, 1x1 and 2x2", plan.product_of_settings(mode, plan.SMALL))


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_everything_that_can_go_wrong_once_in_one_step(mode: Boundary) -> None:
    assert not TALLY.walk_all(f"{mode}, one disturbance, 1x1 and 1x2", plan.disturbed(mode, ((1, 1), (1, 2))))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found(fault: SeededFault) -> None:
    TALLY.faults[fault.name] = False
    walk(fault.case)
    with fault.planted(), pytest.raises(ViolationError) as found:
        walk(fault.case)
    print(f"found: {fault.name}: {found.value} after {len(found.value.trace)} events")
    assert found.value.invariant in fault.invariants
    TALLY.faults[fault.name] = True


def test_single_events_lead_to_the_same_ends_as_those_that_ride_along() -> None:
    for mode in BOUNDARIES:
        coarse = Case(mode, 1, 2, checkpoint_every=1, sync="async", replay=True)
        assert walk(coarse).states < walk(replace(coarse, fine=True)).states


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_configuration(mode: Boundary) -> None:
    sizes = tuple(size for size in plan.SIZES if size not in plan.SMALL)
    assert not TALLY.walk_all(f"{mode}, all settings, the other sizes to 3x3", plan.product_of_settings(mode, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_configuration_whose_last_step_is_not_known(mode: Boundary) -> None:
    cases = plan.product_of_settings(mode, ((2, 1), (2, 2)), known_end=False)
    assert not TALLY.walk_all(f"{mode}, all settings, last step unknown, 2x1 and 2x2", cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_everything_that_can_go_wrong_once(mode: Boundary) -> None:
    cases = plan.disturbed(mode, ((2, 2), (3, 1)))
    assert not TALLY.walk_all(f"{mode}, one disturbance, 2x2 and 3x1", cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_everything_that_can_go_wrong_twice(mode: Boundary) -> None:
    assert not TALLY.walk_all(f"{mode}, two disturbances, 1x1, 1x2, 2x1", plan.twice_disturbed(mode))


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_everything_that_can_go_wrong_told_event_by_event(mode: Boundary) -> None:
    cases = plan.disturbed(mode, ((2, 1),), fine=True)
    assert not TALLY.walk_all(f"{mode}, one disturbance, every event alone, 2x1", cases)


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_everything_that_can_go_wrong_in_three_steps_of_three(mode: Boundary) -> None:
    assert not TALLY.walk_all(f"{mode}, one disturbance, 3x3", plan.large(mode))


def _random_walks(paths: int, most_steps: int, most_microbatches: int) -> None:
    seed = int(os.environ.get("SHMSTAGE_WALK_SEED") or random.SystemRandom().randrange(2**32))
    print(f"random walk: SHMSTAGE_WALK_SEED={seed} repeats it")
    dice = random.Random(seed)
    events = 0
    with quickly():
        for _ in range(paths):
            case = random_case(dice, most_steps=most_steps, most_microbatches=most_microbatches)
            try:
                events += random_path(case, dice).events
            except ViolationError as error:
                TALLY.violations.append(str(error))
                trace = "\n  ".join(error.trace)
                pytest.fail(f"SHMSTAGE_WALK_SEED={seed}, {case}: {error}\n  {trace}")
    print(f"random walk: {paths} paths, {events} events, 0 violations")


def test_a_random_walk_through_short_runs() -> None:
    _random_walks(20, most_steps=4, most_microbatches=3)


@pytest.mark.slow
def test_a_random_walk_through_runs_of_up_to_twelve_steps_of_nine() -> None:
    _random_walks(60, most_steps=12, most_microbatches=9)


def test_what_was_walked_in_all() -> None:
    """Last on purpose: its last line counts all that the tests above walked in this process."""
    if not TALLY.cases:
        pytest.skip("nothing was walked in this process")
    print("\n" + TALLY.summary())
    assert not TALLY.violations
    assert all(TALLY.faults.values())

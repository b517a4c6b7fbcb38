"""Restart or give up: bounded, backing off, counted anew after progress."""

from __future__ import annotations

import pytest

from shmstage.errors import (
    BudgetError,
    EngineError,
    PeerLostError,
    PeerRestartedError,
    ShmstageError,
    StoppedError,
    WaitTimeoutError,
)
from shmstage.launch.supervisor import DOUBLINGS, PROGRESS_STEPS, Ending, Restart, Restarts, ending_of


@pytest.mark.parametrize(
    ("code", "told", "ending"),
    [
        (0, None, Ending.FINISHED),
        (-9, None, Ending.DIED),
        (-11, None, Ending.DIED),
        (1, None, Ending.DIED),  # without a word: an interpreter or a native library that gave up
        (6, None, Ending.DIED),
        (6, PeerLostError("the trainer is dead"), Ending.DIED),
        (6, PeerRestartedError("another incarnation"), Ending.DIED),
        (6, WaitTimeoutError("it lives and does not answer"), Ending.FAILED),
        (2, None, Ending.FAILED),
        (2, BudgetError("too much"), Ending.FAILED),
        (5, EngineError("NaN"), Ending.FAILED),
        (-6, EngineError("NaN"), Ending.FAILED),  # it had spoken before it crashed on its way out
        (130, None, Ending.FAILED),
        (130, StoppedError("stopped by SIGINT"), Ending.FAILED),
    ],
)
def test_what_an_end_means_is_told_by_the_child_first_and_by_its_exit_code_second(
    code: int, told: ShmstageError | None, ending: Ending
) -> None:
    assert ending_of(code, told) is ending


def test_the_back_off_doubles_and_the_limit_ends_it() -> None:
    restarts = Restarts(3, 0.5)
    assert restarts.died(100.0, 0) == Restart(1, 100.5)
    assert restarts.died(200.0, 0) == Restart(2, 201.0)
    assert restarts.died(300.0, 0) == Restart(3, 302.0)
    assert restarts.died(400.0, 0) is None
    assert (restarts.total, restarts.in_vain) == (3, 3)


def test_no_restart_is_made_where_none_is_allowed() -> None:
    assert Restarts(0, 1.0).died(0.0, 0) is None


def test_the_back_off_stops_growing() -> None:
    restarts = Restarts(100, 1.0)
    waits = [restart.at_s for _ in range(DOUBLINGS + 5) if (restart := restarts.died(0.0, 0)) is not None]
    assert waits[-3:] == [2.0**DOUBLINGS] * 3


def test_progress_counts_restarts_anew_and_keeps_the_total() -> None:
    restarts = Restarts(2, 1.0)
    assert restarts.died(0.0, 5) == Restart(1, 1.0)
    assert restarts.died(0.0, PROGRESS_STEPS - 1) == Restart(2, 2.0)
    assert restarts.died(0.0, PROGRESS_STEPS) == Restart(1, 1.0)
    assert (restarts.total, restarts.in_vain) == (3, 1)


def test_steps_trained_again_are_no_progress() -> None:
    restarts = Restarts(2, 1.0)
    # step 40 is reached over and over from checkpoint 0, and never step 41
    assert [restarts.died(0.0, 40) for _ in range(3)][-1] is None


def test_a_run_that_gets_further_between_deaths_is_never_given_up() -> None:
    restarts = Restarts(3, 1.0)
    assert all(restarts.died(0.0, step) is not None for step in range(0, 400, PROGRESS_STEPS - 1))


def test_a_child_that_could_not_leave_a_word_but_says_failed_is_not_started_again() -> None:
    assert ending_of(5, None) is Ending.FAILED

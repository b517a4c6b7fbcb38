from __future__ import annotations

import pytest

from shmstage.errors import TokenFailedError, WaitTimeoutError
from shmstage.trainer.step_health import KEPT_STEPS, StepHealth


def finish(health: StepHealth, step: int, error: str = "") -> str:
    """Everything of a step that was begun is over."""
    health.upload_over(step, error)
    health.forward_over(step, "")
    verdict = health.update_verdict(step, "")
    health.update_over(step, verdict, 1)
    return verdict


def begin(health: StepHealth, step: int) -> None:
    health.upload_began(step)
    health.update_began(step)


def test_unfinished_steps_are_kept_however_many_there_are() -> None:
    health = StepHealth(0.01)
    steps = range(1, 2 * KEPT_STEPS + 1)
    for step in steps:  # one micro-batch per step and as many device buffers: all of them in flight
        begin(health, step)
    assert [finish(health, step) for step in steps] == [""] * len(steps)


def test_an_update_that_is_not_reported_in_time_names_the_setting_of_the_limit() -> None:
    health = StepHealth(0.01)
    begin(health, 1)
    with pytest.raises(WaitTimeoutError, match=r"update 1 not reported after 0.01 s; .*raise call_timeout_s"):
        health.require_landed(1)


def test_a_failed_step_is_not_forgotten_while_later_ones_finish() -> None:
    health = StepHealth(0.01)
    begin(health, 1)
    finish(health, 1, "the slot has moved on")
    for step in range(2, 2 * KEPT_STEPS):
        begin(health, step)
        finish(health, step)
    with pytest.raises(TokenFailedError, match="step 1 failed: the slot has moved on"):
        health.require_landed(1)


def test_finished_steps_are_forgotten_oldest_first() -> None:
    health = StepHealth(0.01)
    for step in range(1, 100):
        begin(health, step)
        finish(health, step)
    assert sorted(health._steps) == list(range(100 - KEPT_STEPS, 100))
    health.require_landed(1)  # has landed long ago

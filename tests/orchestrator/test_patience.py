"""Waits of the program, with a clock moved by hand."""

from __future__ import annotations

import pytest

from shmstage.errors import WaitTimeoutError
from shmstage.orchestrator.patience import Patience


class Hand:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def patience(stage_wait_s: float | None) -> tuple[Patience, Hand]:
    clock = Hand()
    return Patience(call_timeout_s=10.0, stage_wait_s=stage_wait_s, clock=clock), clock


def test_a_planned_stage_waits_its_time_and_each_wait_counts_anew() -> None:
    it, clock = patience(5.0)
    assert not it.stage_is_overdue(True)
    clock.now = 5.0
    assert not it.stage_is_overdue(True)
    assert not it.stage_is_overdue(False), "it came"
    clock.now = 8.0
    assert not it.stage_is_overdue(True)
    clock.now = 13.5
    assert it.stage_is_overdue(True)
    assert not it.stage_is_overdue(True), "said once per wait"


def test_without_a_setting_a_stage_is_never_overdue() -> None:
    it, clock = patience(None)
    it.stage_is_overdue(True)
    clock.now = 1e9
    assert not it.stage_is_overdue(True)


def test_silence_beyond_the_call_timeout_names_what_is_waited_for() -> None:
    it, clock = patience(None)
    clock.now = 10.0
    it.check("step 3 to complete")
    it.news()
    clock.now = 20.5
    with pytest.raises(WaitTimeoutError, match=r"for 10 s while waiting for step 3 to complete; see its log"):
        it.check("step 3 to complete")
    with pytest.raises(WaitTimeoutError, match=r"raise call_timeout_s; missing: update 3\.0 from host 1$"):
        it.check("step 3 to complete", lambda: "; missing: update 3.0 from host 1")

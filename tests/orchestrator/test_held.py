"""Which bytes count as held, when a source has to wait for them, and when waiting would never end."""

from __future__ import annotations

import pytest

from shmstage.errors import BudgetError
from shmstage.orchestrator.held import HeldBytes


def test_what_is_admitted_is_held_until_its_step_has_landed() -> None:
    held = HeldBytes(100)
    held.admit(60)
    assert held.total == 60
    held.let_go(10)
    held.pack(1, 30, is_final=True)
    assert held.total == 50
    assert not held.has_room(51, starving=False)
    held.land(1)
    assert held.total == 20
    assert held.has_room(80, starving=False)
    assert not held.wants_checkpoint


def test_a_landed_step_lands_those_before_it_too() -> None:
    held = HeldBytes(100)
    held.admit(60)
    held.pack(1, 30, is_final=True)
    held.pack(2, 30, is_final=True)
    held.land(2)
    assert held.total == 0


def test_what_a_source_cannot_give_again_is_held_until_it_is_durable() -> None:
    held = HeldBytes(100, until_durable=True)
    held.admit(80)
    held.pack(1, 30, is_final=True)
    held.land(1)
    assert held.total == 80
    assert not held.wants_checkpoint
    held.pack(2, 35, is_final=True)
    # 65 trained of 100, and a step may take 35
    assert not held.wants_checkpoint
    held.admit(1)
    held.pack(3, 1, is_final=True)
    assert held.wants_checkpoint
    held.make_durable(2)
    assert (held.total, held.wants_checkpoint) == (16, False)


def test_a_group_larger_than_the_budget_is_refused_with_both_figures() -> None:
    with pytest.raises(BudgetError, match=r"one group has 101 B, more than max_held_bytes = 100 B; raise"):
        HeldBytes(100).has_room(101, starving=False)
    assert HeldBytes(0).has_room(1 << 60, starving=True)


def test_a_starving_taker_waits_for_a_step_that_will_land() -> None:
    held = HeldBytes(100)
    held.admit(80)
    held.pack(1, 40, is_final=False)
    held.pack(1, 40, is_final=True)
    assert not held.has_room(30, starving=True)


def test_a_step_that_does_not_fit_is_an_error_not_a_deadlock() -> None:
    held = HeldBytes(100)
    held.admit(80)
    held.pack(1, 40, is_final=False)
    assert not held.has_room(30, starving=False)
    with pytest.raises(BudgetError, match=r"one step does not fit: 80 B are held.*group of 30 B.*max_held_bytes = 100"):
        held.has_room(30, starving=True)


def test_what_lies_in_the_journal_alone_does_not_stop_a_step_that_a_checkpoint_needs() -> None:
    held = HeldBytes(100, until_durable=True)
    held.admit(80)
    held.pack(1, 80, is_final=True)
    held.land(1)
    assert not held.has_room(30, starving=False)
    assert held.has_room(30, starving=True)
    held.admit(30)
    with pytest.raises(BudgetError, match="one step does not fit"):
        held.has_room(80, starving=True)

"""The gate that a run passes before anything is allocated."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from budget_making import GOLDEN, ROUTED, given, small

from shmstage.budget.check import check_run
from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.inputs import inputs_of, lower_bound
from shmstage.budget.search import suggestions
from shmstage.budget.verdict import Bound
from shmstage.errors import BudgetError
from shmstage.settings import Settings


def test_exactly_what_is_needed_passes_and_one_byte_less_is_refused() -> None:
    """S6, L3: the sum is refused before the first allocation, as an exception with both figures in bytes."""
    inputs = small(fields=ROUTED)
    need = forecast(inputs).total("steady", "shm", "host")
    check_run(inputs, given(need))
    with pytest.raises(BudgetError, match=rf"in all {need} bytes .* leaves {need - 1} bytes") as caught:
        check_run(inputs, given(need - 1))
    assert caught.value.exit_code == 2


def test_the_refusal_names_value_limit_and_a_remedy_that_holds() -> None:
    """S20: a 64 MB /dev/shm is named, and what docker and kubernetes call the knob."""
    mount = Bound("the mount /dev/shm (docker: --shm-size, kubernetes: a memory emptyDir)", "mount", 64 << 20)
    with pytest.raises(BudgetError) as caught:
        check_run(Inputs(rows=128, tokens=8192), [mount])
    text = str(caught.value)
    assert text.startswith("slots = 3 + aux_slots = 1 of rows = 128 x tokens = 8192 take 25165824 bytes (25.2 MB) each")
    assert "of shm memory; the mount /dev/shm (docker: --shm-size, kubernetes" in text
    assert "leaves 67108864 bytes (67.1 MB); use slots = 2 or rows = " not in text  # 2 + 1 slots do not fit either
    rows = int(text.split("use rows = ")[1].split()[0])
    check_run(Inputs(rows=rows, tokens=8192), [mount])


def test_a_smaller_encoding_is_among_the_remedies() -> None:
    inputs = Inputs(**GOLDEN, fields=ROUTED)
    need = forecast(inputs).total("steady", "shm", "host")
    with pytest.raises(BudgetError) as caught:
        check_run(inputs, given(need - 1))
    assert suggestions(inputs, given(need - 1))[0].text == "routing_encoding = ragged_packed"
    assert "; use routing_encoding = ragged_packed or " in str(caught.value)


def test_more_than_any_pool_may_hold_is_a_budget_error_too() -> None:
    with pytest.raises(BudgetError, match=r"the limit is 140737488355328; use fewer slots, or fewer rows or tokens"):
        check_run(Inputs(rows=1 << 20, tokens=1 << 24), given(1 << 62))


def test_a_lower_bound_counts_the_pool_and_what_is_certain_only() -> None:
    """A run that would work must never be refused on a guess."""
    settings = Settings(slots=4, aux_slots=2, rows=8, tokens=512, weight_sync="async")
    bound = lower_bound(inputs_of(settings, ROUTED), "accelerator")
    assert bound.fill == Fraction(0)
    found = forecast(bound)
    assert found.total("restart", "shm", "host") == found.pool_nbytes
    on_cpu = forecast(lower_bound(inputs_of(settings, ROUTED), "cpu"))
    assert on_cpu.total("restart", "shm", "host") == found.pool_nbytes + 2 * found.slot_nbytes


def test_everything_that_settings_say_reaches_the_formula() -> None:
    settings = Settings(
        rows=5, tokens=300, slots=7, aux_slots=2, device_buffers=3, microbatches_per_step=9, steps=20,
        checkpoint_every=4, max_held_bytes=1234, max_real_tokens=99, weight_sync="sync", reference_logps=True,
    )  # fmt: skip
    assert inputs_of(settings, ROUTED) == Inputs(
        rows=5, tokens=300, fields=ROUTED, slots=7, aux_slots=2, device_buffers=3, microbatches_per_step=9, steps=20,
        checkpoint_every=4, max_held_nbytes=1234, max_real_tokens=99, weight_sync=True, reference=True,
    )  # fmt: skip

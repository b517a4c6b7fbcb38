"""The gate that a run passes before anything is allocated."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "packing"))
from budget_making import GOLDEN, ROUTED, given, small
from test_bundle_facts import make_bundle

from shmstage.budget import check
from shmstage.budget.check import check_run
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.inputs import inputs_of, lower_bound
from shmstage.budget.search import suggestions
from shmstage.budget.verdict import Bound
from shmstage.errors import BudgetError
from shmstage.memory.names import new_name
from shmstage.packing.fields import late_fields
from shmstage.packing.source import BundleSource
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
    bound = lower_bound(inputs_of(settings, ROUTED, platform="accelerator"))
    assert bound.fill == Fraction(0)
    found = forecast(bound)
    assert found.total("restart", "shm", "host") == found.pool_nbytes
    on_cpu = forecast(lower_bound(inputs_of(settings, ROUTED, platform="cpu")))
    assert on_cpu.total("restart", "shm", "host") == found.pool_nbytes + 2 * found.slot_nbytes


def test_a_trainer_that_may_have_its_buffers_is_not_asked_for_them_again() -> None:
    """On CPU they are private memory: a restarted orchestrator would count what is there already twice."""
    settings = Settings(rows=8, tokens=512, reference_logps=True, recompute_old_logps=True)
    inputs = inputs_of(settings, MicrobatchFields(late=late_fields(settings)), platform="cpu")
    fresh, again = forecast(lower_bound(inputs)), forecast(lower_bound(inputs, has_buffers=True))
    assert fresh.total("steady", "host") == 3 * fresh.slot_nbytes  # two to train, one to score
    assert again.total("steady", "shm", "host") == again.pool_nbytes == fresh.pool_nbytes


def test_both_gates_ask_with_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator's has no bundle left to read: its arrays are in memory already."""
    seen: list[Inputs] = []
    monkeypatch.setattr(check, "check_run", seen.append)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = make_bundle(tmp_path / "b")
    settings = Settings(bundle=path, eval_bundle=path, eval_every=2, reference_logps=True)
    first = next(iter(BundleSource(path).groups(0))).trajectories[0]
    check.check_before_start(settings)
    check.check_before_pool(settings, first, first, restarted=False)
    check.check_before_pool(settings, first, first, restarted=True)
    before_start, before_pool, restarted = seen
    assert before_start.held_input_nbytes == before_start.evaluation_nbytes > 0
    assert replace(before_start, held_input_nbytes=0, evaluation_nbytes=0, longest=0) == before_pool
    assert before_start.longest == 12
    assert lower_bound(before_pool, has_buffers=True) == restarted != before_pool


def test_a_refusal_says_what_gc_would_free() -> None:
    """S7: what dead processes left counts against the limit, and `shmstage gc` gives it back."""
    mount = Bound("the mount", "mount", 1 << 10)
    path = Path("/dev/shm", new_name(f"left-{os.getpid()}"))
    path.write_bytes(bytes(1 << 20))  # half made by somebody who is not making it any more
    try:
        with pytest.raises(BudgetError) as caught:
            check_run(small(), [mount])
        found = re.search(r"; `shmstage gc` frees (\d+) bytes \(.*\) that dead processes left; `", str(caught.value))
        assert found is not None
        assert int(found[1]) >= 1 << 20  # others may have left something, too
        assert path.exists()  # it was told, not done
        # private memory is not gc's to free
        device = small(platform="accelerator", param_nbytes=1 << 20)
        with pytest.raises(BudgetError) as caught:
            check_run(device, [Bound("the device", "device", 1)])
        assert "gc" not in str(caught.value)
    finally:
        path.unlink()


def test_everything_that_settings_say_reaches_the_formula() -> None:
    settings = Settings(
        rows=5, tokens=300, slots=7, aux_slots=2, device_buffers=3, microbatches_per_step=9, steps=20,
        checkpoint_every=4, max_held_bytes=1234, max_real_tokens=99, weight_sync="sync", reference_logps=True,
        boundary="staged_after_update",
    )  # fmt: skip
    assert inputs_of(settings, ROUTED) == Inputs(
        rows=5, tokens=300, fields=ROUTED, slots=7, aux_slots=2, device_buffers=3, microbatches_per_step=9, steps=20,
        checkpoint_every=4, max_held_nbytes=1234, max_real_tokens=99, weight_sync=True, reference=True, stages=True,
        pipelined=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "scores", "evaluates"),
    [
        ({}, False, False),
        ({"reference_logps": True}, True, False),
        ({"recompute_old_logps": True}, True, False),
        ({"eval_every": 2, "steps": 4}, False, True),
        ({"eval_every": 5, "steps": 4}, False, False),  # never reached
        ({"eval_every": 5, "passes": 1}, False, True),
    ],
)
def test_what_is_scored_and_evaluated_is_as_the_settings_say(
    settings: dict[str, Any], scores: bool, evaluates: bool
) -> None:
    found = inputs_of(Settings(**settings, eval_bundle=Path("e")), ROUTED, ROUTED)
    assert (found.scores, found.evaluates) == (scores, evaluates)

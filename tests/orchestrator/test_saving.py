"""What goes into checkpoints, and what may be let go of."""

from __future__ import annotations

from pathlib import Path

import pytest

from shmstage.errors import SettingsError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.feeder import PackedMicrobatch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.resume import ResumeState, state_from_metadata
from shmstage.orchestrator.saving import Saving, last_published


def packed(step: int, index: int, arrivals: int) -> PackedMicrobatch:
    handle = Handle(0, 2, 1, step=step, index=index)
    state = ResumeState(first_arrival=arrivals, planned_through=arrivals)
    return PackedMicrobatch(handle, (), (), 8, 1, 0.0, 0.0, 0.0, 0, state_after=state)


def saving(out: Path, first_step: int = 1) -> Saving:
    return Saving(out, {"rows": 4}, start=ResumeState.start(), first_step=first_step)


def test_save_checkpoint_k_carries_the_last_microbatchs_stamp(tmp_path: Path) -> None:
    it = saving(tmp_path)
    for step, index, arrivals in [(1, 0, 3), (1, 1, 7), (2, 0, 9), (2, 1, 12)]:
        it.trained(packed(step, index, arrivals))
    metadata = it.metadata(2)
    assert metadata["step"] == 2
    assert metadata["plan"] == {"rows": 4}
    assert state_from_metadata(metadata, tmp_path).first_arrival == 12


def test_checkpoint_0_carries_where_the_input_began(tmp_path: Path) -> None:
    assert state_from_metadata(saving(tmp_path).metadata(0), tmp_path) == ResumeState.start()


def test_a_step_is_safe_only_when_its_checkpoint_is_durable_and_its_line_is_written(tmp_path: Path) -> None:
    it = saving(tmp_path)
    assert it.line_ready({"step": 1}, written=True) is None
    assert it.checkpoint_durable(2, {}) is None
    assert it.line_ready({"step": 2}, written=True) == 2
    assert it.line_ready({"step": 3}, written=True) is None
    assert it.checkpoint_durable(3, {}) == 3
    assert it.saved == 3


def test_the_published_version_is_found_again_in_out_and_never_goes_back(tmp_path: Path) -> None:
    assert last_published(tmp_path) == 0
    saving(tmp_path).publishing(7)
    again = saving(tmp_path, first_step=5)
    assert again.published == 7
    again.publishing(5)
    assert last_published(tmp_path) == 7


def test_facts_come_from_the_line_when_it_is_written_before_the_checkpoint_is_durable(tmp_path: Path) -> None:
    it = saving(tmp_path)
    ledger = Ledger(mode="serial", tokens_per_microbatch=8, rows=1, slot_nbytes=64)
    ledger.sent(packed(1, 0, 3))
    it.checkpoint_durable(1, {"path": "checkpoints/1"})
    assert it.facts(1, ledger) is None, "metrics are missing"
    ledger.metrics(1, {"loss": 0.5})
    assert it.facts(1, ledger) == {"path": "checkpoints/1", "metrics": {"loss": 0.5}, "eval": None}
    ledger.eval_sent(1)
    assert it.facts(1, ledger) is None, "the evaluation goes on"
    ledger.eval_done(1, {"loss_sum": 3.0, "denominator": 4.0})
    facts = it.facts(1, ledger)
    assert facts is not None
    assert facts["eval"] == {"loss": 0.75, "denominator": 4.0}
    it.line_ready({"step": 1, "metrics": {"loss": 0.5}, "eval": None}, written=True)
    assert it.facts(1, ledger) == {"path": "checkpoints/1", "metrics": {"loss": 0.5}, "eval": None}


def test_a_line_that_could_not_be_written_makes_nothing_safe_and_nothing_after_it(tmp_path: Path) -> None:
    it = saving(tmp_path)
    it.checkpoint_durable(1, {})
    assert it.line_ready({"step": 1}, written=False) is None
    it.checkpoint_durable(2, {})
    assert it.line_ready({"step": 2}, written=True) is None, "a restart goes back to the last line before the hole"


def test_the_hook_of_a_restored_checkpoint_is_told_what_its_line_says(tmp_path: Path) -> None:
    line = {"step": 4, "metrics": {"loss": 0.5}, "eval": {"loss": 0.25}}
    it = Saving(tmp_path, {}, start=ResumeState.start(), first_step=5, restored_line=line)
    ledger = Ledger(mode="serial", tokens_per_microbatch=8, rows=1, slot_nbytes=64)
    path = str(tmp_path / "checkpoints" / "4")
    assert it.facts(4, ledger) == {"path": path, "metrics": {"loss": 0.5}, "eval": {"loss": 0.25}}


def test_an_unreadable_record_of_published_weights_is_said_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text("{")
    with pytest.raises(SettingsError, match=r"weights\.json cannot be read"):
        last_published(tmp_path)

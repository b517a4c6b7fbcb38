from __future__ import annotations

from collections.abc import Callable

import pytest

from shmstage.errors import (
    GateClosedError,
    ShmstageError,
    StageMismatchError,
    StageOccupiedError,
    TokenFailedError,
    TrainerError,
    UpdateDeferredError,
)
from shmstage.memory.handle import Handle
from shmstage.trainer.gate import COMMANDS, NOT_WHEN_DEFERRED, WHEN_CLOSED, WHEN_FAILED, Gate


def micro(step: int, index: int = 0, *, final: bool = False, slot: int = 0) -> Handle:
    return Handle(slot, 2, 1, step=step, index=index, is_final=final)


@pytest.fixture
def gate() -> Gate:
    """Open at step 0, its checkpoint durable."""
    gate = Gate()
    gate.restored(0)
    return gate


def refused(gate: Gate, kind: type[ShmstageError], ask: Callable[[], None]) -> str:
    """The refusal's text; asserts that nothing changed."""
    before = gate.state
    with pytest.raises(kind) as caught:
        ask()
    assert type(caught.value) is kind
    assert gate.state == before
    return str(caught.value)


def allowed(gate: Gate) -> set[str]:
    def admitted(command: str) -> bool:
        try:
            gate.admit(command)
        except ShmstageError:
            return False
        return True

    return {command for command in COMMANDS if admitted(command)}


def test_after_a_start_only_info_compile_restore_and_shutdown_are_accepted() -> None:
    gate = Gate()
    assert allowed(gate) == {"info", "compile", "ranges", "restore_checkpoint", "shutdown"} == WHEN_CLOSED
    assert "restore_checkpoint" in refused(gate, GateClosedError, lambda: gate.admit("fwd_bwd"))


def test_a_restore_opens_the_gate_for_every_command(gate: Gate) -> None:
    assert allowed(gate) == COMMANDS


def test_a_new_epoch_closes_the_gate_and_forgets_stage_and_deferral(gate: Gate) -> None:
    gate.trained(micro(1, final=True), deferred=True)
    gate.staged("2.0@1:2")
    gate.detached()
    assert allowed(gate) == WHEN_CLOSED
    assert gate.state.staged is None
    assert gate.state.deferred_step is None


def test_after_a_failed_token_only_restore_and_shutdown_are_accepted(gate: Gate) -> None:
    gate.failed("fwd_bwd of 1.0@0:2 failed")
    assert allowed(gate) == {"restore_checkpoint", "shutdown"} == WHEN_FAILED
    assert "fwd_bwd of 1.0@0:2 failed" in refused(gate, TokenFailedError, lambda: gate.admit("info"))


def test_the_first_failure_is_the_one_that_is_told(gate: Gate) -> None:
    gate.failed("the cause")
    gate.failed("what followed from it")
    assert gate.state.cause == "the cause"


def test_a_restore_ends_a_failure_a_deferral_and_a_stage(gate: Gate) -> None:
    gate.trained(micro(1, final=True), deferred=True)
    gate.staged("2.0@1:2")
    gate.failed("cause")
    gate.restored(0)
    assert allowed(gate) == COMMANDS
    gate.admit_forward(micro(1))
    gate.admit_stage(micro(1))


DEFERRED_REFUSES = (
    *("fwd_bwd", "fwd_bwd_staged", "update", "get_metrics", "save_checkpoint", "prepare_weight_sync"),
    *("per_token_logps", "eval_step"),
)


@pytest.mark.parametrize("command", DEFERRED_REFUSES)
def test_while_an_update_is_deferred_what_needs_the_step_closed_is_refused(gate: Gate, command: str) -> None:
    gate.trained(micro(1, final=True), deferred=True)
    gate.staged("2.0@1:2")
    assert "update 1 is deferred" in refused(gate, UpdateDeferredError, lambda: gate.admit(command))


def test_while_an_update_is_deferred_everything_else_is_accepted(gate: Gate) -> None:
    gate.trained(micro(1, final=True), deferred=True)
    assert allowed(gate) == COMMANDS - set(DEFERRED_REFUSES)
    assert set(DEFERRED_REFUSES) == NOT_WHEN_DEFERRED


def test_the_deferred_update_can_be_applied_once(gate: Gate) -> None:
    gate.trained(micro(1, final=True), deferred=True)
    gate.admit_apply()
    gate.updated()
    assert "last update is 1" in refused(gate, TrainerError, gate.admit_apply)


def test_another_staged_id_is_refused_and_the_stage_kept(gate: Gate) -> None:
    gate.staged("1.1@1:2")
    assert "'1.1@1:2'" in refused(gate, StageMismatchError, lambda: gate.admit_staged("1.2@2:2"))
    gate.admit_staged("1.1@1:2")


def test_a_staged_forward_without_a_stage_is_refused(gate: Gate) -> None:
    refused(gate, StageMismatchError, lambda: gate.admit_staged("1.1@1:2"))


def test_staging_over_an_unused_stage_is_refused(gate: Gate) -> None:
    gate.staged("1.1@1:2")
    assert "1.1@1:2" in refused(gate, StageOccupiedError, lambda: gate.admit_stage(micro(1, 2)))


def test_without_a_checkpoint_the_first_forward_waits_for_checkpoint_zero() -> None:
    gate = Gate()
    gate.restored(None)
    assert "save_checkpoint(0)" in refused(gate, GateClosedError, lambda: gate.admit_forward(micro(1)))
    gate.admit_snapshot("save_checkpoint", 0)
    gate.checkpoint_durable()
    gate.admit_forward(micro(1))


def test_steps_are_trained_in_order(gate: Gate) -> None:
    assert "next step is 1" in refused(gate, TrainerError, lambda: gate.admit_forward(micro(2)))
    gate.trained(micro(1, final=True), deferred=False)
    gate.updated()
    refused(gate, TrainerError, lambda: gate.admit_forward(micro(1)))
    gate.admit_forward(micro(2))


def test_the_next_step_waits_for_the_update(gate: Gate) -> None:
    gate.trained(micro(1), deferred=False)
    assert "step 1 is not updated" in refused(gate, TrainerError, lambda: gate.admit_forward(micro(2)))


def test_a_microbatch_is_trained_once(gate: Gate) -> None:
    gate.trained(micro(1, 0), deferred=False)
    refused(gate, TrainerError, lambda: gate.admit_forward(micro(1, 0, slot=3)))
    gate.admit_forward(micro(1, 1))


def test_an_update_needs_gradients_so_that_none_runs_twice(gate: Gate) -> None:
    refused(gate, TrainerError, gate.admit_update)
    gate.trained(micro(1), deferred=False)
    gate.admit_update()
    gate.updated()
    refused(gate, TrainerError, gate.admit_update)


@pytest.mark.parametrize("command", ["get_metrics", "save_checkpoint", "prepare_weight_sync"])
def test_snapshots_come_after_their_update_and_before_the_next_forward(gate: Gate, command: str) -> None:
    gate.trained(micro(1, final=True), deferred=False)
    gate.updated()
    gate.admit_snapshot(command, 1)
    assert "the last update is 1" in refused(gate, TrainerError, lambda: gate.admit_snapshot(command, 2))
    gate.trained(micro(2), deferred=False)
    assert "step 2 has begun" in refused(gate, TrainerError, lambda: gate.admit_snapshot(command, 1))


def test_inside_a_step_what_its_forward_passes_do_not_change_can_be_saved(gate: Gate) -> None:
    gate.trained(micro(1, final=True), deferred=False)
    gate.updated()
    gate.trained(micro(2), deferred=False)
    gate.admit_snapshot("save_checkpoint", 1, inside=True)
    for other in (0, 2):
        refused(gate, TrainerError, lambda other=other: gate.admit_snapshot("save_checkpoint", other, inside=True))


def test_training_goes_on_from_the_restored_step() -> None:
    gate = Gate()
    gate.restored(7)
    gate.admit_forward(micro(8))
    refused(gate, TrainerError, lambda: gate.admit_forward(micro(7)))

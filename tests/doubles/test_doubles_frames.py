"""Frames that are lost, doubled or late: every command is executed once, and the run ends as the reference loop's."""

from __future__ import annotations

import pytest
from doubles.rig import Case, assert_as_the_reference, assert_contracts_calls, run

from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.fault_plan import Effect, Fault, FaultPlan

CALLS = (
    "restore_checkpoint", "save_checkpoint 0", "prepare_weight_sync 0", "fwd_bwd 1.0", "stage_fwd_bwd 1.1",
    "fwd_bwd_staged 1.1", "stage_fwd_bwd 2.0", "apply_deferred_update", "get_metrics 1", "save_checkpoint 1",
    "prepare_weight_sync 1", "fwd_bwd_staged 2.0", "shutdown",
)  # fmt: skip
EVENTS = (
    "token staged 1.0", "token fwd_bwd 1.0", "token fwd_bwd 1.1", "token update 1.0", "ticket metrics 1",
    "ticket checkpoint 0", "ticket checkpoint 2", "ticket weights 1",
)  # fmt: skip


def staged(**faults: FaultPlan) -> Case:
    return Case(mode="staged_before_update", steps=2, checkpoint_every=1, weight_sync="async", wire="memory", **faults)


def check(case: Case) -> None:
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)


def once(frame: str, effect: Effect, until: str = "") -> FaultPlan:
    return FaultPlan((Fault(frame, Effect(effect), until=until),))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("what", "effect"), [("request", "lose"), ("reply", "lose"), ("reply", "delay")])
def test_a_command_is_executed_once_whatever_happens_to_its(what: str, effect: Effect, call: str) -> None:
    """B4"""
    check(staged(client_faults=once(f"{what} {call}", effect)))


@pytest.mark.parametrize("frame", ["hello", "welcome", "ack", *EVENTS])
def test_a_run_survives_the_loss_of_a(frame: str) -> None:
    check(staged(client_faults=once(frame, Effect.LOSE)))


@pytest.mark.parametrize("effect", [Effect.DOUBLE, Effect.DELAY])
@pytest.mark.parametrize("frames", ["request *", "reply *", "token *", "ticket *", "hello", "welcome", "ack"])
def test_a_run_survives_that_every_frame_of_a_kind_is_doubled_or_late(frames: str, effect: Effect) -> None:
    # every other one where something has to get through
    faults = [Fault(frames, effect, nth=nth) for nth in range(1, 40, 2)]
    outcome = run(case := staged(client_faults=FaultPlan(tuple(faults))))
    outcome.faults_unmet.clear()  # there are fewer frames than that
    assert outcome.faults_done
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)


@pytest.mark.parametrize("call", ["stage_fwd_bwd 2.0", "apply_deferred_update", "fwd_bwd_staged 1.1"])
def test_a_reply_that_comes_long_after_its_call_was_answered_is_passed_over(call: str) -> None:
    check(staged(client_faults=once(f"reply {call}", Effect.DELAY, until="request get_metrics 2")))


@pytest.mark.parametrize("call", ["stage_fwd_bwd 1.1", "fwd_bwd_staged 1.1", "apply_deferred_update", "get_metrics 1"])
def test_a_request_that_comes_long_after_its_retry_was_answered_is_not_executed_again(call: str) -> None:
    check(staged(client_faults=once(f"request {call}", Effect.DELAY, until="request get_metrics 2")))


@pytest.mark.parametrize("wire", ["zmq", "memory"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_reply_lost_once_and_every_request_doubled(mode: Boundary, wire: str) -> None:
    names = {"zmq": "server_faults", "memory": "client_faults"}
    lost = [Fault(f"reply {call}", Effect.LOSE) for call in CALLS]
    plan = FaultPlan((*lost, Fault("request *", Effect.DOUBLE, times=None)))
    case = Case(mode=mode, steps=2, checkpoint_every=1, weight_sync="async", wire=wire, **{names[wire]: plan})
    outcome = run(case)
    outcome.faults_unmet.clear()  # the plan names the commands of every mode
    assert len(outcome.faults_done) > 20
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)


@pytest.mark.parametrize("seed", range(12))
def test_random_faults_at_both_ends(seed: int) -> None:
    case = Case(
        mode=BOUNDARIES[seed % 4], steps=3, microbatches=1 + seed % 3, checkpoint_every=seed % 3, wire="memory",
        client_faults=FaultPlan(seed=seed, rate=0.15), server_faults=FaultPlan(seed=seed + 1000, rate=0.15),
    )  # fmt: skip
    outcome = run(case)
    assert outcome.faults_done
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)

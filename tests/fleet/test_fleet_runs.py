"""The real program over several hosts: what one trainer would have made, whatever happens to frames on the way."""

from __future__ import annotations

from typing import Any

import pytest
from fleet.rig import FleetCase, assert_as_one_trainer, run

from shmstage.errors import EngineError, PeerLostError, TokenFailedError
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.boundary_table import expected_calls
from shmstage.testing.doubles_device import Device
from shmstage.testing.doubles_trainer import Script
from shmstage.testing.engines_doubles import PacedEngine
from shmstage.testing.fault_plan import Effect, Fault, FaultPlan

pytestmark = pytest.mark.slow
STAGED = BOUNDARIES[2:]


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_mode_trains_what_one_trainer_would(mode: Boundary, hosts: int) -> None:
    case = FleetCase(mode=mode, hosts=hosts, checkpoint_every=2, weight_sync="async")
    outcome = run(case)
    assert_as_one_trainer(case, outcome)
    assert all(saved == [0, 2, 3] for saved in outcome.saved)
    wanted = [
        expected_calls(mode, microbatches=[2] * 3, microbatches_per_step=2, checkpoint_every=2, weight_sync=True)
    ]
    assert outcome.calls == wanted * hosts
    prepared = [commands.count("prepare") for commands in outcome.commands]
    others = [len(commands) - count for commands, count in zip(outcome.commands, prepared, strict=True)]
    assert prepared == others, "a command was not prepared"


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_recomputed_and_reference_log_probs_are_those_of_one_trainer(mode: Boundary) -> None:
    more = {"recompute_old_logps": True, "reference_logps": True}
    one, two = (run(FleetCase(mode=mode, hosts=hosts, more=more)) for hosts in (1, 2))
    for outcome in (one, two):
        if outcome.error is not None:
            raise outcome.error
    assert one.digest == two.digest
    assert [line["loss"] for line in one.lines] == [line["loss"] for line in two.lines]
    assert two.calls[0] == two.calls[1]


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_reply_is_lost_once_and_every_request_doubled_on_one_host(mode: Boundary) -> None:
    calls = ("fwd_bwd", "stage_fwd_bwd", "fwd_bwd_staged", "apply_deferred_update", "get_metrics", "save_checkpoint")
    lost = [Fault(f"reply {prefix}{call}*", Effect.LOSE, nth=2) for call in calls for prefix in ("", "prepare ")]
    plan = FaultPlan((*lost, Fault("request *", Effect.DOUBLE, times=None)))
    case = FleetCase(mode=mode, hosts=2, checkpoint_every=1, faults={1: plan})
    outcome = run(case)
    assert_as_one_trainer(case, outcome)
    assert sum(entry.startswith("lose") for entry in outcome.faults_done) >= 6


@pytest.mark.parametrize("effect", [Effect.LOSE, Effect.DOUBLE, Effect.DELAY])
@pytest.mark.parametrize("frames", ["token *", "ticket *"])
def test_events_of_one_host_that_are_lost_doubled_or_late_are_told_once(frames: str, effect: Effect) -> None:
    faults = tuple(Fault(frames, effect, nth=nth) for nth in range(1, 30, 2))
    case = FleetCase(mode="staged_before_update", hosts=2, checkpoint_every=1, faults={1: FaultPlan(faults)})
    outcome = run(case)
    assert_as_one_trainer(case, outcome)
    assert outcome.faults_done


@pytest.mark.parametrize("seed", range(8))
def test_random_faults_on_every_host(seed: int) -> None:
    hosts = 2 + seed % 2
    case = FleetCase(
        mode=BOUNDARIES[seed % 4], hosts=hosts, microbatches=1 + seed % 3, checkpoint_every=seed % 3,
        faults={host: FaultPlan(seed=100 * host + seed, rate=0.12) for host in range(hosts)},
    )  # fmt: skip
    outcome = run(case)
    assert_as_one_trainer(case, outcome)
    assert outcome.faults_done


@pytest.mark.parametrize("how", ["request", "reply"])
@pytest.mark.parametrize("mode", STAGED)
def test_a_stage_that_does_not_reach_one_host_is_sent_whole_and_staging_is_off(
    mode: Boundary, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = FaultPlan((Fault(f"{how} stage_fwd_bwd 2.0", Effect.LOSE, times=None),))
    case = FleetCase(mode=mode, hosts=2, call_timeout_s=7.0, faults={1: plan})
    outcome = run(case)
    assert outcome.calls[0].remove("stage_fwd_bwd 2.0") is None
    if how == "reply":
        outcome.calls[1].remove("stage_fwd_bwd 2.0")
    assert_as_one_trainer(case, outcome)
    said = capsys.readouterr().out
    assert said.count("staging is off for the rest of the run") == 1 and "host 1 (node-1)" in said
    assert [line["staged"] for line in outcome.lines] == [False] * 3


@pytest.mark.parametrize("call", ["prepare stage_fwd_bwd 2.0", "stage_fwd_bwd 2.0"])
@pytest.mark.parametrize("mode", STAGED)
def test_a_stage_that_fails_on_one_host_ends_the_run_when_update_and_checkpoint_k_are_safe(
    mode: Boundary, call: str
) -> None:
    scripts = {1: Script(refuses={call: EngineError("seeded, out of device memory")})}
    outcome = run(FleetCase(mode=mode, hosts=2, scripts=scripts))
    assert type(outcome.error) is EngineError and "host 1 (node-1): seeded" in str(outcome.error)
    assert [line["step"] for line in outcome.lines] == [1]
    assert outcome.saved == [[0, 1], [0, 1]]
    dropped = [commands.count("drop_staged") for commands in outcome.commands]
    assert dropped == ([0, 0] if call.startswith("prepare") else [1, 1])


@pytest.mark.parametrize("call", ["fwd_bwd* 2.0", "get_metrics 1", "save_checkpoint 1"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_host_that_dies_ends_the_run_and_is_named(mode: Boundary, call: str) -> None:
    if call == "fwd_bwd* 2.0":
        call = "fwd_bwd_staged 2.0" if mode in STAGED else "fwd_bwd 2.0"
    case = FleetCase(mode=mode, hosts=3, checkpoint_every=1, scripts={1: Script(dies_before=call)})
    outcome = run(case)
    assert isinstance(outcome.error, PeerLostError) and "host 1 (node-1)" in str(outcome.error)
    assert outcome.commands[0][-1] == outcome.commands[2][-1] == "shutdown", "the living were not told to stop"


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_device_work_that_fails_on_one_host_is_no_step_of_any(mode: Boundary) -> None:
    def failing(inner: Any) -> PacedEngine:
        return PacedEngine(inner, Device(), fails=frozenset({"2.1"}))

    engines = {0: lambda inner: PacedEngine(inner, Device()), 1: failing}
    outcome = run(FleetCase(mode=mode, hosts=2, checkpoint_every=1, engines=engines))
    assert isinstance(outcome.error, TokenFailedError) and "host 1 (node-1)" in str(outcome.error)
    assert [line["step"] for line in outcome.lines] == [1]
    assert outcome.saved[1] == [0, 1]

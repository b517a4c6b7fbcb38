"""The table "Failures" of BOUNDARY.md, row by row, with the real program, transport and shared memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from doubles.rig import STEPS, Case, KilledError, World, assert_as_the_reference, reference, run

from shmstage.errors import (
    EngineError,
    GateClosedError,
    PeerLostError,
    RunFailedError,
    ShmstageError,
    StaleHandleError,
    TokenFailedError,
    UpdateDeferredError,
)
from shmstage.memory.reader import Lease
from shmstage.orchestrator.step_lines import read_step_lines
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.boundary_table import expected_calls
from shmstage.testing.doubles_device import Device
from shmstage.testing.doubles_trainer import Script
from shmstage.testing.engines_doubles import PacedEngine
from shmstage.testing.engines_refusing import RefusingEngine, RefusingUploads
from shmstage.testing.fault_plan import Effect, Fault, FaultPlan
from shmstage.trainer import aliasing

STAGED = BOUNDARIES[2:]
F = "stage_fwd_bwd 2.0"

# --- the stage does not reach the trainer (transport) ---------------------------------------------------

LOST = {
    "no request arrives": Fault(f"request {F}", Effect.LOSE, times=None),
    "no reply arrives": Fault(f"reply {F}", Effect.LOSE, times=None),
    "it arrives after what replaced it": Fault(f"request {F}", Effect.DELAY, times=None, until="request fwd_bwd 2.0"),
}


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("mode", STAGED)
def test_the_stage_does_not_reach_the_trainer_so_f_is_sent_whole_and_staging_is_off(
    mode: Boundary, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(mode=mode, wire="memory", call_timeout_s=7.0, client_faults=FaultPlan((LOST[how],)))
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert capsys.readouterr().out.count("staging is off for the rest of the run: no answer to stage_fwd_bwd") == 1
    deferred = mode == "staged_before_update"
    last_call = ["fwd_bwd_staged 1.1 defer"] if deferred else ["fwd_bwd_staged 1.1"]
    assert outcome.calls == [
        "save_checkpoint 0", "fwd_bwd 1.0", "stage_fwd_bwd 1.1", *last_call,
        *([F] if how == "no reply arrives" else []),
        *(["apply_deferred_update"] if deferred else []),
        "get_metrics 1", "fwd_bwd 2.0", "fwd_bwd 2.1", "get_metrics 2", "fwd_bwd 3.0", "fwd_bwd 3.1", "get_metrics 3",
        "save_checkpoint 3",
    ]  # fmt: skip
    assert [line["staged"] for line in outcome.lines] == [False] * 3
    assert outcome.lines[2]["not_staged_because"] == "staging was switched off"


@pytest.mark.parametrize("mode", STAGED)
def test_a_stage_lost_inside_a_step_costs_no_more(mode: Boundary) -> None:
    plan = FaultPlan((Fault("request stage_fwd_bwd 2.1", Effect.LOSE, times=None),))
    case = Case(mode=mode, wire="memory", call_timeout_s=7.0, client_faults=plan)
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert outcome.lines[1]["staged"] and not outcome.lines[2]["staged"]
    assert "defer" not in " ".join(call for call in outcome.calls if " 2." in call or " 3." in call)


# --- the trainer ran the stage and it raised ------------------------------------------------------------


@pytest.mark.parametrize("how", ["refused", "in the middle of the upload"])
@pytest.mark.parametrize("checkpoint_every", [0, 1])
@pytest.mark.parametrize("mode", STAGED)
def test_the_trainer_ran_the_stage_and_it_raised_so_update_and_checkpoint_k_are_kept_and_the_run_ends_with_it(
    mode: Boundary, checkpoint_every: int, how: str
) -> None:
    case = Case(mode=mode, wire="memory", checkpoint_every=checkpoint_every, weight_sync="async")
    if how == "refused":
        case.script = Script(refuses={F: StaleHandleError("seeded refusal, out of device memory")})
    else:
        case.engine = lambda inner: RefusingUploads(inner, nth=3)
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert type(error) is (StaleHandleError if how == "refused" else EngineError)
        assert "seeded" in str(error) and "out of device memory" in str(error)
        assert outcome.written == [1]
        assert outcome.saved == [0, 1]
        updates = ["apply_deferred_update"] if mode == "staged_before_update" else []
        assert outcome.calls[-5:] == [
            *["fwd_bwd_staged 1.1"][: 1 - len(updates)], F, *updates,
            "get_metrics 1", "save_checkpoint 1", "prepare_weight_sync 1",
        ][-5:]  # fmt: skip
        assert_resumes_to_the_reference(world, case)


def test_a_stage_that_raised_inside_a_step_leaves_the_last_checkpoint_to_resume_from() -> None:
    case = Case(
        mode="staged_before_update", wire="memory", checkpoint_every=1,
        script=Script(refuses={"stage_fwd_bwd 2.1": EngineError("seeded refusal")}),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert isinstance(error, EngineError)
        assert (outcome.written, outcome.saved) == ([1], [0, 1])
        assert "apply_deferred_update" not in outcome.calls[outcome.calls.index("get_metrics 1") :]
        assert_resumes_to_the_reference(world, case)


@pytest.mark.parametrize("mode", STAGED)
def test_the_stages_upload_fails_after_its_call_returned_and_update_and_checkpoint_k_are_kept(
    mode: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)  # as on an accelerator
    monkeypatch.setattr(Lease, "check", moved_on_behind_the_upload_of(2, 0))
    case = Case(mode=mode, wire="memory", payload_shift=4)
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert isinstance(error, TokenFailedError) and "staged of step 2, micro-batch 0 failed" in str(error)
        assert (outcome.written, outcome.saved) == ([1], [0, 1])
        assert_resumes_to_the_reference(world, case)


def moved_on_behind_the_upload_of(step: int, index: int) -> Callable[[Lease], None]:
    """Looked at twice per upload: before it is issued, and when it is over. At the second look the slot has moved."""
    looks = iter([False, True])

    def check(lease: Lease) -> None:
        if (lease.handle.step, lease.handle.index) == (step, index) and next(looks, False):
            raise StaleHandleError("seeded: the slot has moved on")

    return check


# --- a reply is lost: see test_doubles_frames.py ---------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_reply_is_lost_and_retried_with_the_same_sequence_and_the_update_is_made_once(mode: Boundary) -> None:
    """B4"""
    update = "apply_deferred_update" if mode == "staged_before_update" else "fwd_bwd* 1.1"
    plan = FaultPlan((Fault(f"reply {update}", Effect.LOSE, times=2),))
    device = Device()
    case = Case(
        mode=mode, wire="memory", client_faults=plan, device=device, engine=lambda inner: PacedEngine(inner, device)
    )
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert len(outcome.faults_done) == 2
    assert device.log.count("began update 1") == 1
    assert outcome.calls == expected_calls(mode, microbatches=[2, 2, 2], microbatches_per_step=2)


# --- reference log-probs for F fail ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_reference_log_probs_are_scored_in_every_mode_and_change_nothing_that_does_not_read_them(
    mode: Boundary,
) -> None:
    case = Case(mode=mode, wire="memory", more={"reference_logps": True})
    outcome = run(case)
    if outcome.error is not None:
        raise outcome.error
    assert outcome.param_digest == reference(case).param_digests[-1]
    assert all(micro["ref_per_token_logps"] for line in outcome.lines for micro in line["late_digests"])


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_reference_log_probs_for_f_fail_so_line_and_metrics_of_step_k_are_kept_and_the_run_ends_after_them(
    mode: Boundary,
) -> None:
    case = Case(
        mode=mode, wire="memory", more={"reference_logps": True},
        engine=lambda inner: RefusingEngine(inner, "per_token_logps", nth=3),
    )  # fmt: skip
    outcome = run(case)
    assert isinstance(outcome.error, EngineError) and "seeded refusal of per_token_logps" in str(outcome.error)
    assert outcome.written == [1]
    assert outcome.lines[0]["loss"] == reference(case).losses[0]
    assert outcome.saved == [0, 1]


# --- a token of step k fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["2.0", "2.1", "2.2", "update 2"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_token_of_step_k_fails_and_update_metrics_snapshot_and_sync_of_k_with_it(mode: Boundary, work: str) -> None:
    device = Device({work: "never"})  # it fails as late as can be: when the host stops and waits for it
    case = Case(
        mode=mode, microbatches=3, wire="memory", checkpoint_every=1, weight_sync="async", device=device,
        device_buffers=4, engine=lambda inner: PacedEngine(inner, device, fails=frozenset({work})),
        script=Script(hears=lambda call: device.end_all_but(0) if call in ENDS_STEP_2[mode] else None),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert isinstance(error, TokenFailedError), error
        assert f"seeded device failure of {work}" in str(error)
        assert 2 not in outcome.written and outcome.saved == [0, 1]
        assert_resumes_to_the_reference(world, case)


ENDS_STEP_2 = {
    "serial": {"get_metrics 2", "save_checkpoint 2", "prepare_weight_sync 2"},
    "pipelined": {"fwd_bwd 3.0"},
    "staged_after_update": {"fwd_bwd_staged 3.0"},
    "staged_before_update": {"fwd_bwd_staged 3.0"},
}


@pytest.mark.parametrize("work", ["2.1", "update 2"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_token_that_fails_at_once_ends_the_run_the_same_way(mode: Boundary, work: str) -> None:
    case = Case(
        mode=mode, wire="memory", checkpoint_every=1,
        engine=lambda inner: PacedEngine(inner, Device(), fails=frozenset({work})),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert isinstance(error, TokenFailedError)
        assert 2 not in outcome.written and outcome.saved == [0, 1]
        assert_resumes_to_the_reference(world, case)


# --- the trainer refuses, whatever the command ----------------------------------------------------------

#: method of the engine, its call that fails, the error's class, steps whose checkpoint is durable
REFUSALS: list[tuple[str, int, type[ShmstageError], list[int]]] = [
    ("shardings", 1, EngineError, []),
    ("restore", 1, EngineError, []),
    ("compile", 1, EngineError, []),
    ("fwd_bwd", 3, EngineError, [0, 1]),
    ("fwd_bwd", 4, EngineError, [0, 1]),
    ("update", 2, EngineError, [0, 1]),
    ("metrics", 2, EngineError, [0, 1]),
    ("save", 3, EngineError, [0, 1]),
    ("weights", 3, EngineError, [0, 1, 2]),
]


@pytest.mark.parametrize(
    ("mode", "after"), [("pipelined", False), ("staged_before_update", False), ("staged_before_update", True)]
)
@pytest.mark.parametrize(("method", "nth", "error", "saved"), REFUSALS, ids=[f"{r[0]}-{r[1]}" for r in REFUSALS])
def test_an_engine_that_raises_ends_the_run_with_its_words_and_a_resume_goes_on(
    mode: Boundary, method: str, nth: int, error: type[ShmstageError], saved: list[int], after: bool
) -> None:
    case = Case(
        mode=mode, wire="memory", checkpoint_every=1, weight_sync="async", compiles=method == "compile",
        engine=lambda inner: RefusingEngine(inner, method, nth=nth, after=after),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        raised, _ = world.session()
        outcome = world.outcome(trainer, raised, "")
        assert type(raised) is error, raised
        assert "seeded" in str(raised) and method in str(raised)
        assert outcome.saved == saved
        assert_resumes_to_the_reference(world, case)


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_snapshot_that_cannot_be_copied_ends_the_run_at_the_next_boundary_at_the_latest(mode: Boundary) -> None:
    case = Case(
        mode=mode, steps=6, wire="memory", checkpoint_every=1,
        engine=lambda inner: RefusingEngine(inner, "copy_to_host", nth=3),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        raised, _ = world.session()
        outcome = world.outcome(trainer, raised, "")
        assert type(raised) is RunFailedError and "checkpoint of step 2" in str(raised), raised
        # it was told before update 3 was dispatched: at boundary 3 everybody knows
        assert outcome.saved in ([0, 1], [0, 1, 3])
        assert not any(call.startswith("fwd_bwd") and " 4." in call for call in outcome.calls)
        assert_resumes_to_the_reference(world, case)


@pytest.mark.parametrize("mode", ["pipelined", "staged_before_update"])
def test_a_snapshot_that_cannot_be_written_ends_the_run(mode: Boundary) -> None:
    case = Case(
        mode=mode, wire="memory", checkpoint_every=1, engine=lambda inner: RefusingEngine(inner, "write", nth=3)
    )
    with World(case) as world:
        trainer = world.start_trainer()
        raised, _ = world.session()
        outcome = world.outcome(trainer, raised, "")
        assert type(raised) is RunFailedError and "seeded refusal of write" in str(raised), raised
        assert outcome.saved in ([0, 1], [0, 1, 3])
        assert_resumes_to_the_reference(world, case)


#: command, what it is refused with, steps whose checkpoint is durable
COMMANDS: list[tuple[str, ShmstageError, list[int]]] = [
    ("hello", EngineError("seeded"), []),
    ("restore_checkpoint", EngineError("seeded"), []),
    ("fwd_bwd 1.0", GateClosedError("seeded"), [0]),
    ("fwd_bwd_staged 1.1", EngineError("seeded"), [0]),
    ("apply_deferred_update", EngineError("seeded"), [0]),
    ("get_metrics 1", UpdateDeferredError("seeded"), [0]),
    ("save_checkpoint 1", EngineError("seeded"), [0]),
    ("prepare_weight_sync 1", EngineError("seeded"), [0, 1]),
    ("fwd_bwd_staged 2.0", UpdateDeferredError("seeded"), [0, 1]),
    ("shutdown", EngineError("seeded"), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("call", "error", "saved"), COMMANDS, ids=[each[0] for each in COMMANDS])
def test_a_command_that_is_refused_ends_the_run_with_the_trainers_own_error(
    call: str, error: ShmstageError, saved: list[int]
) -> None:
    case = Case(
        mode="staged_before_update", wire="memory", checkpoint_every=1, weight_sync="async",
        script=Script(refuses={call: error}),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        raised, _ = world.session()
        outcome = world.outcome(trainer, raised, "")
        assert type(raised) is type(error) and str(raised) == "seeded"
        assert outcome.saved == saved
        if call != "shutdown":
            assert_resumes_to_the_reference(world, case)


# --- somebody dies --------------------------------------------------------------------------------------

DEATHS = (
    "restore_checkpoint", "save_checkpoint 0", "fwd_bwd 1.0", "fwd_bwd_staged 1.1", F, "apply_deferred_update",
    "get_metrics 1", "save_checkpoint 1", "prepare_weight_sync 1", "fwd_bwd_staged 2.0", "get_metrics 2",
    "save_checkpoint 2", "shutdown",
)  # fmt: skip


@pytest.mark.slow  # nobody's last words are waited for, a quarter of a second long
@pytest.mark.parametrize(
    ("when", "call"), [*(("before", call) for call in DEATHS), *(("after", call) for call in DEATHS[1::3])]
)
def test_the_trainer_dies_and_another_one_trains_to_the_same_end(when: str, call: str) -> None:
    script = Script(dies_before=call) if when == "before" else Script(dies_after=call)
    case = Case(mode="staged_before_update", steps=2, checkpoint_every=1, weight_sync="async", script=script)
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        assert isinstance(error, PeerLostError) and "is dead" in str(error)
        assert trainer.dead.is_set()
        assert_resumes_to_the_reference(world, case)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["--dies-at=fwd_bwd_staged 1.1", f"--dies-after={F}"])
def test_the_trainer_is_killed_and_another_process_trains_to_the_same_end(dies: str) -> None:
    case = Case(mode="staged_before_update", steps=2, checkpoint_every=1)
    with World(case) as world:
        process = world.start_process(dies)
        error, _ = world.session()
        assert isinstance(error, PeerLostError), error
        assert process.wait() == -signal.SIGKILL
        world.start_process()
        error, digest = world.session()
        assert error is None
        assert digest == reference(case).param_digests[-1]
        assert [line["step"] for line in read_step_lines(world.out / STEPS)] == [1, 2]


def orchestrator_dying_after(turns: int) -> Callable[[], bool]:
    """What to ask for a stop: the orchestrator dies in its ``turns``-th turn, between two commands."""
    left = iter(range(turns))

    def dies() -> bool:
        if next(left, None) is None:
            raise KilledError
        return False

    return dies


@pytest.mark.parametrize(
    ("mode", "turns"),
    [*(("staged_before_update", turns) for turns in range(16)), *(("serial", turns) for turns in range(2, 14, 3))],
)
def test_the_orchestrator_dies_and_the_next_epoch_trains_to_the_same_end(mode: Boundary, turns: int) -> None:
    """The trainer lives on, with whatever it was doing."""
    dying = orchestrator_dying_after(turns)
    case = Case(mode=mode, steps=2, checkpoint_every=1, wire="memory", stop_requested=dying)
    with World(case) as world:
        trainer = world.start_trainer()
        error, digest = world.session()
        if error is not None:
            assert isinstance(error, KilledError)
            error, digest = world.session(replace(case, stop_requested=lambda: False))
        assert_as_the_reference(case, world.outcome(trainer, error, digest))


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_step_whose_checkpoint_became_durable_before_its_line_was_written_is_trained_again(mode: Boundary) -> None:
    case = Case(
        mode=mode, steps=2, checkpoint_every=1, wire="memory",
        engine=lambda inner: RefusingEngine(inner, "fwd_bwd", nth=3),
    )  # fmt: skip
    with World(case) as world:
        trainer = world.start_trainer()
        error, _ = world.session()
        outcome = world.outcome(trainer, error, "")
        assert outcome.saved == [0, 1]
        assert outcome.written == ([1] if mode == "serial" else [])
        assert_resumes_to_the_reference(world, case)
        assert world.first_step == (2 if mode == "serial" else 1)


# --- a step line, hook for logging or exporter raises ---------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_step_line_raises_and_it_is_said_and_ends_no_step(mode: Boundary, capsys: pytest.CaptureFixture[str]) -> None:
    """B1"""
    case = Case(mode=mode, wire="memory", write_step=_raises_for_step_2)
    outcome = run(case)
    assert outcome.error is None
    assert outcome.written == [1, 3]
    assert outcome.param_digest == reference(case).param_digests[-1]
    assert capsys.readouterr().out.count("step line 2 was not written: seeded") == 1


def _raises_for_step_2(line: dict[str, Any]) -> None:
    if line["step"] == 2:
        raise ValueError("seeded")


# --- afterwards -----------------------------------------------------------------------------------------


def assert_resumes_to_the_reference(world: World, case: Case) -> None:
    """A new trainer over the same checkpoints, unharmed, and a new orchestrator end where nothing ever failed."""
    whole = replace(case, engine=lambda inner: inner, device=None, script=Script(), stop_requested=lambda: False)
    trainer = world.start_trainer(whole)
    error, digest = world.session(whole)
    outcome = world.outcome(trainer, error, digest)
    assert_as_the_reference(whole, outcome)
    assert [line["attempt"] for line in outcome.lines] == [1 if k < world.first_step else 2 for k in outcome.written]

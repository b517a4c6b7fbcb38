"""Late fields, hooks, weight sync, evaluation, the latch and early ends, as orders of commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from schedule_driver import Driver

from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config, Kind
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.boundary_table import expected_calls

STAGED: tuple[Boundary, ...] = ("staged_after_update", "staged_before_update")


def calls(log: list[str]) -> list[str]:
    words = {"per_token_logps actor": "per_token_logps", "per_token_logps reference": "reference"}
    found = []
    for call in log:
        for long, short in words.items():
            if call.startswith(long):
                call = f"{short}{call.removeprefix(long)}" + (" actor" if short == "per_token_logps" else "")
        found.append(call)
    return [call for call in found if not call.startswith("bookkeep")]


def order(log: list[str], *wanted: str) -> None:
    """The wanted calls occur in this order."""
    places = [log.index(call) for call in wanted]
    assert places == sorted(places), list(zip(wanted, places, strict=True))


# --- recomputed log-probs -------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_recomputed_log_probs_are_scored_after_the_update_and_patched_before_the_forward_call(
    mode: Boundary, microbatches: int
) -> None:
    log = calls(Driver(Config(mode, microbatches, 3, recompute_logps=True)).run())
    wanted = expected_calls(
        mode, microbatches=[microbatches] * 3, microbatches_per_step=microbatches, recompute_old_logps=True
    )
    assert log == wanted[1:-1]  # checkpoint 0 and the last one are the program's


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_nothing_is_scored_while_an_update_is_deferred(mode: Boundary) -> None:
    log = calls(Driver(Config(mode, 2, 4, recompute_logps=True, reference_logps=True)).run())
    deferred = False
    for call in log:
        deferred = call.endswith("defer") or (deferred and call != "apply_deferred_update")
        assert not (deferred and call.startswith(("per_token_logps", "reference", "get_metrics"))), log


# --- reference log-probs --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", STAGED)
def test_reference_log_probs_of_f_are_scored_before_step_ks_last_call_is_sent(mode: Boundary) -> None:
    log = calls(Driver(Config(mode, 3, 3, reference_logps=True)).run())
    order(log, "reference 2.0", next(c for c in log if c.startswith("fwd_bwd_staged 1.2")), "stage_fwd_bwd 2.0")
    assert [c for c in log if c.startswith("reference")] == [f"reference {k}.{i}" for k in (1, 2, 3) for i in range(3)]


@pytest.mark.parametrize("mode", STAGED)
def test_if_f_cannot_be_scored_in_time_no_stage_is_planned_and_f_is_scored_after_the_update(mode: Boundary) -> None:
    log = calls(Driver(Config(mode, 3, 3, reference_logps=True), late=frozenset([(2, 0)])).run())
    assert "stage_fwd_bwd 2.0" not in log
    order(log, "fwd_bwd_staged 1.2", "get_metrics 1", "reference 2.0", "fwd_bwd 2.0")


def test_where_patience_is_asked_for_the_last_call_waits_until_f_is_scored() -> None:
    config = Config("staged_before_update", 3, 3, reference_logps=True, stage_waits_for_deadline=True)
    log = calls(Driver(config, late=frozenset([(2, 0)])).run())
    order(log, "reference 2.0", "fwd_bwd_staged 1.2 defer", "stage_fwd_bwd 2.0", "apply_deferred_update")


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_if_reference_log_probs_for_f_fail_step_k_is_kept_and_the_run_ends_after_it(mode: Boundary) -> None:
    def fail(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.SCORE_REFERENCE and command.key == (3, 0):
            assert schedule.late_field_failed(command.key)
            return True
        return False

    driver = Driver(Config(mode, 2, 5, reference_logps=True), on_complete=fail)
    log = driver.run()
    assert [c for c in log if c.startswith("bookkeep")] == ["bookkeep 1", "bookkeep 2"]
    order(calls(log), "get_metrics 2", "save_checkpoint 2")
    assert not any(c.startswith(("fwd_bwd 3", "fwd_bwd_staged 3", "stage_fwd_bwd 3")) for c in log)
    assert not driver.schedule.state.deferred


def test_scoring_that_fails_inside_a_step_leaves_nothing_to_complete() -> None:
    def fail(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.SCORE_REFERENCE and command.key == (2, 1):
            raise ArithmeticError(schedule.late_field_failed(command.key))
        return False

    with pytest.raises(ArithmeticError, match="False"):
        Driver(Config("pipelined", 2, 5, reference_logps=True), late=frozenset([(2, 1)]), on_complete=fail).run()


# --- hooks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_the_call_that_includes_update_k_plus_1_waits_until_the_hook_has_returned(
    mode: Boundary, microbatches: int
) -> None:
    config = Config(mode, microbatches, 4, checkpoint_every=1, hook=True)
    schedule_of: list[BoundarySchedule] = []

    def hold(schedule: BoundarySchedule, command: Command) -> bool:
        schedule_of.append(schedule)
        updates = command.kind in (Kind.APPLY_DEFERRED, Kind.UPDATE) or (
            command.kind in (Kind.FWD_BWD, Kind.FWD_BWD_STAGED) and command.is_final and not command.defer_update
        )
        assert not (updates and schedule.state.verdicts_due), command
        return False

    log = Driver(config, fault=hold).run()
    assert [c for c in log if c.startswith("save_checkpoint")] == [f"save_checkpoint {k}" for k in range(1, 5)]
    assert schedule_of


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_hook_that_ends_the_run_drops_what_is_deferred_or_staged_and_keeps_the_steps_before(mode: Boundary) -> None:
    def end(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.SAVE_CHECKPOINT and command.step == 2:
            schedule.hook_returned(2, go_on=False)
            return True
        return False

    driver = Driver(Config(mode, 2, 6, checkpoint_every=1, hook=True), on_complete=end)
    log = driver.run()
    assert [c for c in log if c.startswith("bookkeep")] == ["bookkeep 1", "bookkeep 2"]
    assert "get_metrics 3" not in log
    assert log.count("apply_deferred_update") == (2 if mode == "staged_before_update" else 0)


def test_a_stop_while_deferred_applies_the_update_after_the_hook_allows_it() -> None:
    schedule = BoundarySchedule(Config("staged_before_update", 1, None, checkpoint_every=1, hook=True))
    log: list[str] = []
    for step in range(1, 4):
        schedule.packed(step, 0, True)
    while (command := schedule.next()) is not None and len(log) < 20:
        log.append(f"{command.kind.value} {command.step}")
        schedule.returned(command)
    assert log[-2:] == ["fwd_bwd_staged 2", "stage_fwd_bwd 3"]  # the verdict on checkpoint 1 is missing
    schedule.stop()
    assert schedule.next() is None
    schedule.hook_returned(1, go_on=True)
    command = schedule.next()
    assert command is not None and command.kind is Kind.APPLY_DEFERRED


# --- weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_synchronous_weights_are_published_before_the_next_step_begins(mode: Boundary) -> None:
    published: list[int] = []

    def note(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.SYNC_WEIGHTS:
            published.append(command.step)
        return False

    def check(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind in (Kind.FWD_BWD, Kind.FWD_BWD_STAGED) and command.index == 0 and command.step > 1:
            assert command.step - 1 in published
        return False

    Driver(Config(mode, 2, 4, weight_sync="sync"), on_complete=note, fault=check).run()
    assert published[:3] == [1, 2, 3]


def test_replayed_steps_publish_no_weights_below_the_published_version() -> None:
    config = Config("staged_before_update", 2, 6, weight_sync="sync", first_step=3, weights_floor=5)
    log = replayed(config)
    assert [c for c in log if c.startswith("prepare")] == ["prepare_weight_sync 5", "prepare_weight_sync 6"]


def replayed(config: Config) -> list[str]:
    driver = Driver(config)
    driver._next = (config.first_step - 1) * config.microbatches_per_step
    return driver.run()


# --- evaluation, checkpoints on demand, the latch -------------------------------------------------------


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_eval_step_comes_between_weight_sync_and_fs_forward_call(mode: Boundary) -> None:
    log = calls(Driver(Config(mode, 2, 4, weight_sync="async", eval_every=2)).run())
    assert [c for c in log if c.startswith("eval_step")] == ["eval_step 2", "eval_step 4"]
    forward = next(c for c in log if c.startswith(("fwd_bwd 3.0", "fwd_bwd_staged 3.0")))
    order(log, "prepare_weight_sync 2", "eval_step 2", forward)


def test_a_checkpoint_that_memory_asks_for_is_written_at_the_next_boundary_and_only_there() -> None:
    def want(schedule: BoundarySchedule, command: Command) -> bool:
        if command.key == (2, 0):
            schedule.want_checkpoint()
        return False

    log = Driver(Config("pipelined", 2, 4), fault=want).run()
    assert [c for c in log if c.startswith("save")] == ["save_checkpoint 2"]


@pytest.mark.parametrize("level", ["after_update", "off"])
def test_the_latch_moves_the_stage_behind_the_update_or_leaves_it_out(level: str) -> None:
    def flip(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.BOOKKEEP and command.step == 1:
            schedule.latch(level)  # type: ignore[arg-type]
        return False

    log = calls(Driver(Config("staged_before_update", 2, 4), fault=flip, device_is_slow=False).run())
    order(log, "stage_fwd_bwd 2.0", "apply_deferred_update", "get_metrics 1")
    assert log.count("apply_deferred_update") == 1
    assert ("stage_fwd_bwd 3.0" in log) == (level == "after_update")
    if level == "after_update":
        order(log, "fwd_bwd_staged 2.1", "stage_fwd_bwd 3.0", "get_metrics 2")


# --- snapshots that fail --------------------------------------------------------------------------------


def boundary_of_step_2(mode: Boundary) -> tuple[BoundarySchedule, list[str]]:
    """Driven by hand until step 2's last call has returned."""
    schedule = BoundarySchedule(Config(mode, 1, None, checkpoint_every=1))
    log: list[str] = []
    for step in (1, 2, 3):
        schedule.packed(step, 0, True)
    while schedule.state.closed < 2:
        command = schedule.next()
        assert command is not None
        log.append(f"{command.kind.value} {command.step}")
        schedule.returned(command)
        schedule.landed(schedule.state.closed - schedule.state.deferred)
        schedule.metrics_ready(schedule.state.closed - schedule.state.deferred)
    return schedule, log


def test_a_ticket_that_fails_before_the_next_update_is_dispatched_ends_the_run_there() -> None:
    schedule, _ = boundary_of_step_2("staged_before_update")
    assert schedule.state.deferred
    assert not schedule.ticket_failed(1)


def test_a_ticket_that_fails_later_ends_the_run_at_the_next_boundary() -> None:
    schedule, log = boundary_of_step_2("staged_after_update")
    assert schedule.ticket_failed(1)
    while (command := schedule.next()) is not None:
        log.append(f"{command.kind.value} {command.step}")
        schedule.returned(command)
        schedule.landed(2)
        schedule.metrics_ready(2)
    assert log[-5:] == ["get_metrics 2", "save_checkpoint 2", "bookkeep 1", "bookkeep 2", "finish 3"]
    assert schedule.state.done


# --- what has to be known first -------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["landed", "metrics"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_step_line_needs_landed_update_k_ok(mode: Boundary, missing: str) -> None:
    schedule = BoundarySchedule(Config(mode, 1, 1))
    schedule.packed(1, 0, True)
    for _ in range(2):
        command = schedule.next()
        assert command is not None
        schedule.returned(command)
    for step in () if missing == "landed" else (1,):
        schedule.landed(step)
    for step in () if missing == "metrics" else (1,):
        schedule.metrics_ready(step)
    assert schedule.next() is None
    schedule.landed(1)
    schedule.metrics_ready(1)
    command = schedule.next()
    assert command is not None
    assert command.kind is Kind.BOOKKEEP


@pytest.mark.parametrize("mode", STAGED)
def test_no_stage_is_planned_when_the_source_is_known_to_be_exhausted(mode: Boundary) -> None:
    schedule = BoundarySchedule(Config(mode, 1, None))
    schedule.packed(1, 0, True)
    schedule.end_of_input()
    command = schedule.next()
    assert command is not None
    assert not command.defer_update
    schedule.returned(command)
    assert Kind.STAGE not in schedule.state.duties


@pytest.mark.parametrize("mode", STAGED)
def test_no_stage_is_planned_at_the_last_step_of_an_endless_source(mode: Boundary) -> None:
    schedule = BoundarySchedule(Config(mode, 1, 1))
    schedule.packed(1, 0, True)
    command = schedule.next()
    assert command is not None
    assert not command.defer_update
    schedule.returned(command)
    assert Kind.STAGE not in schedule.state.duties

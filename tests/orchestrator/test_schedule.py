"""The sans-IO schedule keeps the contract of the step boundary, whatever the speed of feeder and device."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from schedule_driver import Driver

from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config, Kind
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.boundary_table import expected_calls

STAGED: tuple[Boundary, ...] = ("staged_after_update", "staged_before_update")


def config(mode: Boundary, microbatches: int = 3, last_step: int | None = 4, **more: object) -> Config:
    return Config(mode, microbatches, last_step, **more)  # type: ignore[arg-type]


def trainer_calls(log: list[str]) -> list[str]:
    return [call for call in log if not call.startswith("bookkeep")]


@pytest.mark.parametrize(
    ("mode", "microbatches", "steps", "every", "sync"),
    list(product(BOUNDARIES, (1, 2, 3, 5), (1, 2, 4), (0, 1, 2), (False, True))),
)
def test_commands_match_the_contracts_table(
    mode: Boundary, microbatches: int, steps: int, every: int, sync: bool
) -> None:
    publishing = "async" if sync else "off"
    log = Driver(config(mode, microbatches, steps, checkpoint_every=every, weight_sync=publishing)).run()
    wanted = expected_calls(
        mode,
        microbatches=[microbatches] * steps,
        microbatches_per_step=microbatches,
        checkpoint_every=every,
        weight_sync=sync,
    )
    saved_by_the_program = not every or steps % every != 0
    assert trainer_calls(log) == wanted[2 if sync else 1 : -1 if saved_by_the_program else None]
    assert [call for call in log if call.startswith("bookkeep")] == [f"bookkeep {k + 1}" for k in range(steps)]


@pytest.mark.parametrize("device_is_slow", [True, False])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_every_microbatch_is_trained_once_in_order_with_one_update_per_step(
    mode: Boundary, device_is_slow: bool
) -> None:
    for late in ([], [(2, 0)], [(2, 0), (3, 0)], [(2, 1)], [(1, 0), (4, 2)]):
        log = Driver(config(mode), late=frozenset(late), device_is_slow=device_is_slow).run()
        trained = [call.split()[1] for call in log if call.startswith(("fwd_bwd ", "fwd_bwd_staged "))]
        assert trained == [f"{k}.{i}" for k in range(1, 5) for i in range(3)]
        deferred = sum(call.endswith("defer") for call in log)
        assert log.count("apply_deferred_update") == deferred
        assert log.count("update") == 0


def test_serial_packs_the_next_step_only_after_bookkeeping() -> None:
    driver = Driver(config("serial"))
    log = driver.run()
    assert log.index("bookkeep 1") < log.index("fwd_bwd 2.0")
    schedule = BoundarySchedule(config("serial", 1))
    schedule.packed(1, 0, True)
    command = schedule.next()
    assert command is not None
    schedule.returned(command)
    assert schedule.pack_limit < (2, 0)


@pytest.mark.parametrize("mode", BOUNDARIES[1:])
def test_bookkeeping_runs_when_the_first_call_of_the_next_step_has_returned(mode: Boundary) -> None:
    log = Driver(config(mode), device_is_slow=False).run()
    first = next(i for i, call in enumerate(log) if call.startswith("fwd_bwd") and " 2.0" in call)
    assert log.index("bookkeep 1") > first


@pytest.mark.parametrize("mode", BOUNDARIES[1:])
def test_bookkeeping_does_not_wait_for_an_unpacked_first_microbatch(mode: Boundary) -> None:
    log = Driver(config(mode), late=frozenset({(2, 0)})).run()
    first = next(i for i, call in enumerate(log) if call.startswith("fwd_bwd") and " 2.0" in call)
    assert log.index("bookkeep 1") < first


def test_a_planned_stage_waits_until_the_last_microbatch_finished_then_the_deferred_update_runs_at_once() -> None:
    log = Driver(config("staged_before_update"), late=frozenset({(2, 0)})).run()
    at = log.index("fwd_bwd_staged 1.2 defer")
    assert log[at + 1] == "apply_deferred_update"
    assert "fwd_bwd 2.0" in log
    assert "stage_fwd_bwd 2.1" in log


def test_with_a_deadline_a_planned_stage_outwaits_the_device() -> None:
    driver = Driver(config("staged_before_update", stage_waits_for_deadline=True), late=frozenset({(2, 0)}))
    log = driver.run()
    at = log.index("fwd_bwd_staged 1.2 defer")
    assert log[at + 1] == "stage_fwd_bwd 2.0"


@pytest.mark.parametrize("mode", STAGED)
def test_no_stage_and_no_deferral_at_the_last_step(mode: Boundary) -> None:
    log = Driver(config(mode, last_step=2)).run()
    assert trainer_calls(log)[-3:] == ["stage_fwd_bwd 2.2", "fwd_bwd_staged 2.2", "get_metrics 2"]


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_input_that_ends_inside_a_step_is_closed_by_an_update_without_stage_or_deferral(mode: Boundary) -> None:
    """B5"""
    log = Driver(config(mode, last_step=None), input_end=7).run()
    assert log.count("update") == 1
    after = log[log.index("update") :]
    assert trainer_calls(after) == ["update", "get_metrics 3"]
    assert log[-1] == "bookkeep 3"


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_input_that_ends_at_a_boundary_ends_the_run_there(mode: Boundary) -> None:
    log = Driver(config(mode, last_step=None), input_end=6).run()
    assert "update" not in log
    assert log[-1] == "bookkeep 2"
    assert log.count("apply_deferred_update") == sum(call.endswith("defer") for call in log)


def test_the_feeder_is_at_most_one_step_ahead() -> None:
    driver = Driver(config("staged_before_update", 3, 6))
    schedule = driver.schedule
    ahead: list[int] = []
    original = schedule.packed

    def packed(step: int, index: int, is_final: bool) -> None:
        open_step = schedule.state.step + 1 if schedule.state.duties else schedule.state.step
        ahead.append(step - open_step)
        assert (step, index) <= (open_step + 1, 0)
        original(step, index, is_final)

    schedule.packed = packed  # type: ignore[method-assign]
    driver.run()
    assert max(ahead) == 1


@pytest.mark.parametrize("mode", STAGED)
def test_a_stage_that_is_lost_on_the_way_is_sent_whole_and_staging_stays_off(mode: Boundary) -> None:
    def lose(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.STAGE and command.step == 2 and command.index == 0:
            schedule.stage_lost(command)
            return True
        return False

    log = Driver(config(mode), fault=lose).run()
    after = log[log.index("get_metrics 1") :]
    assert not [call for call in after if call.startswith("stage_fwd_bwd")]
    assert [call.split()[1] for call in after if call.startswith("fwd_bwd ")] == [
        f"{k}.{i}" for k in (2, 3, 4) for i in range(3)
    ]
    assert log.count("apply_deferred_update") == sum(call.endswith("defer") for call in log)


def test_a_stage_that_raised_ends_the_run_after_update_and_checkpoint() -> None:
    def fail(schedule: BoundarySchedule, command: Command) -> bool:
        if command.kind is Kind.STAGE and command.step == 3 and command.index == 0:
            schedule.stage_raised(command)
            return True
        return False

    log = Driver(config("staged_before_update"), fault=fail).run()
    at = log.index("fwd_bwd_staged 2.2 defer")
    assert [c for c in log[at + 1 :] if c != "bookkeep 1"] == [
        "apply_deferred_update",
        "get_metrics 2",
        "save_checkpoint 2",
        "bookkeep 2",
    ]


@pytest.mark.parametrize(
    ("after", "every"), [("stage_fwd_bwd", 0), ("apply_deferred_update", 0), ("get_metrics", 0), ("get_metrics", 2)]
)
def test_a_stage_that_fails_after_its_call_returned_ends_the_run_the_same_way(after: str, every: int) -> None:
    driver = Driver(config("staged_before_update", checkpoint_every=every))
    failed: list[bool] = []

    def fail(schedule: BoundarySchedule, command: Command) -> bool:
        if failed or command.step != (3 if after == "stage_fwd_bwd" else 2) or command.kind.value != after:
            return False
        if after == "stage_fwd_bwd" and command.index != 0:
            return False
        driver.log.append(f"{after} returned")
        schedule.returned(command)
        driver._pending.append(command)
        failed.append(schedule.stage_failed_later(3, 0))
        return True

    driver.fault = fail
    log = driver.run()
    assert failed == [True]
    assert "save_checkpoint 2" in log
    assert log[-1] == "bookkeep 2"
    assert log.count("save_checkpoint 2") == 1
    assert not [call for call in log if " 3." in call and call.startswith("fwd")]
    assert driver.schedule.stage_failed_later(3, 0) is False


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_stop_while_an_update_is_deferred_applies_it_first(mode: Boundary) -> None:
    def stop(schedule: BoundarySchedule, command: Command) -> bool:
        if command.step == 2 and command.is_final and command.kind is not Kind.STAGE:
            schedule.stop()
        return False

    log = Driver(config(mode), fault=stop).run()
    assert log.count("apply_deferred_update") == sum(call.endswith("defer") for call in log)
    assert log[-1] == "bookkeep 2"
    assert not [call for call in log if " 3." in call and call.startswith("fwd")]


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_metrics_of_a_step_come_before_the_next_steps_first_forward_call(mode: Boundary) -> None:
    for slow in (True, False):
        log = Driver(config(mode), device_is_slow=slow).run()
        for k in range(1, 4):
            first = next(i for i, c in enumerate(log) if c.startswith("fwd_bwd") and f" {k + 1}.0" in c)
            assert log.index(f"get_metrics {k}") < first

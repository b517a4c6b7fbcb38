"""Whatever a trainer does with its time: the same commands, one update per step, the reference loop's parameters."""

from __future__ import annotations

from typing import Any

import pytest
from doubles.rig import Case, assert_as_the_reference, assert_contracts_calls, run

from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.doubles_device import Device
from shmstage.testing.engines_doubles import Blocks, PacedEngine

COUNTS = (1, 2, 3)


def as_late_as_it_goes(mode: Boundary, steps: int, microbatches: int) -> Device:
    """No work of step k ends before a command that the contract sends without waiting for it.

    That is step k+1's first forward call; in serial mode, and after the last step, it is ``get_metrics(k)``. Where the
    host waits for a device buffer or in a throttle, the device gets on as far as that needs.
    """
    ends = {}
    for k in range(1, steps + 1):
        forward = "fwd_bwd_staged" if mode.startswith("staged") else "fwd_bwd"
        until = f"get_metrics {k}" if mode == "serial" or k == steps else f"{forward} {k + 1}.0"
        ends |= dict.fromkeys([*(f"{k}.{i}" for i in range(microbatches)), f"update {k}"], until)
    return Device(ends)


def paced(mode: Boundary, microbatches: int, **how: Any) -> tuple[Case, Device]:
    device = as_late_as_it_goes(mode, 3, microbatches)
    options = {key: how.pop(key) for key in ("checkpoint_every", "weight_sync", "wire", "device_buffers") if key in how}
    case = Case(
        mode=mode, microbatches=microbatches, device=device, engine=lambda inner: PacedEngine(inner, device, **how),
        **options,
    )  # fmt: skip
    return case, device


def assert_each_began_once_in_order(device: Device, case: Case) -> None:
    """Invariants 2 and 3 as the device saw them."""
    began = [entry.removeprefix("began ") for entry in device.log if entry.startswith("began")]
    steps = enumerate(case.counts, start=1)
    assert began == [name for k, n in steps for name in [*(f"{k}.{i}" for i in range(n)), f"update {k}"]]


@pytest.mark.parametrize("wire", ["zmq", "memory"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_trainer_that_does_not_block(mode: Boundary, wire: str) -> None:
    case, device = paced(mode, 2, wire=wire)
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)
    assert_each_began_once_in_order(device, case)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("blocks", ["never", "two deep", "until last done"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_with_checkpoints_and_weights_at_every_boundary(mode: Boundary, blocks: Blocks, microbatches: int) -> None:
    case, device = paced(mode, microbatches, blocks=blocks, checkpoint_every=1, weight_sync="async")
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)
    assert_each_began_once_in_order(device, case)
    assert outcome.saved == [0, 1, 2, 3]


@pytest.mark.parametrize("microbatches", COUNTS)
@pytest.mark.parametrize("mode", BOUNDARIES[1:])
def test_the_next_step_goes_out_before_the_update_has_landed(mode: Boundary, microbatches: int) -> None:
    case, device = paced(mode, microbatches)
    assert_as_the_reference(case, run(case))
    for k in (1, 2):
        forward = "fwd_bwd_staged" if mode.startswith("staged") else "fwd_bwd"
        assert device.position(f"received {forward} {k + 1}.0") < device.position(f"ended update {k}")


def test_serial_sends_nothing_of_the_next_step_before_the_update_has_landed() -> None:
    case, device = paced("serial", 2)
    assert_as_the_reference(case, run(case))
    for k in (1, 2):
        assert device.position(f"ended update {k}") < device.position(f"received fwd_bwd {k + 1}.0")


@pytest.mark.parametrize("microbatches", COUNTS)
@pytest.mark.parametrize("mode", BOUNDARIES[2:])
def test_the_stage_goes_out_while_the_last_microbatch_computes(mode: Boundary, microbatches: int) -> None:
    case, device = paced(mode, microbatches)
    assert_as_the_reference(case, run(case))
    for k in (1, 2):
        assert device.position(f"received stage_fwd_bwd {k + 1}.0") < device.position(f"ended {k}.{microbatches - 1}")


@pytest.mark.parametrize("microbatches", COUNTS)
def test_a_trainer_that_blocks_in_the_update_is_given_the_stage_first(microbatches: int) -> None:
    """What staged_before_update is for: in a trainer whose update waits for L, only a stage ahead of it overlaps L."""
    case, device = paced("staged_before_update", microbatches, blocks="until last done")
    assert_as_the_reference(case, run(case))
    for k in (1, 2):
        assert device.position(f"received stage_fwd_bwd {k + 1}.0") < device.position(f"ended {k}.{microbatches - 1}")
    case, device = paced("staged_after_update", microbatches, blocks="until last done")
    assert_as_the_reference(case, run(case))
    for k in (1, 2):
        assert device.position(f"ended {k}.{microbatches - 1}") < device.position(f"received stage_fwd_bwd {k + 1}.0")


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_throttled_trainer_never_has_more_than_two_unfinished(mode: Boundary) -> None:
    case, device = paced(mode, 3, blocks="two deep")
    assert_as_the_reference(case, run(case))
    depth = deepest = 0
    for entry in device.log:
        depth += entry.startswith("began") - entry.startswith("ended")
        deepest = max(deepest, depth)
    assert deepest == 3  # the third is dispatched, and its call returns when the first is over


@pytest.mark.parametrize("microbatches", COUNTS)
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_trainer_without_tokens(mode: Boundary, microbatches: int) -> None:
    case, device = paced(mode, microbatches, tokens=False, checkpoint_every=2)
    outcome = run(case)
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)
    assert_each_began_once_in_order(device, case)


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_input_that_ends_inside_a_step(mode: Boundary) -> None:
    """B5"""
    device = Device()
    case = Case(
        mode=mode, microbatches=3, bounded=False, input_length=7, device=device,
        engine=lambda inner: PacedEngine(inner, device),
    )  # fmt: skip
    outcome = run(case)
    assert case.counts == [3, 3, 1]
    assert_as_the_reference(case, outcome)
    assert_contracts_calls(case, outcome)
    assert_each_began_once_in_order(device, case)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_recomputed_log_probs_end_in_the_same_parameters_in_every_mode(microbatches: int) -> None:
    """The reference loop does not score; here ``serial`` stands for it."""
    made = {}
    for mode in BOUNDARIES:
        more = {"recompute_old_logps": True}
        made[mode] = run(Case(mode=mode, steps=2, microbatches=microbatches, wire="memory", more=more))
        if made[mode].error is not None:
            raise made[mode].error
    assert len({outcome.param_digest for outcome in made.values()}) == 1
    losses = {mode: [line["loss"] for line in outcome.lines] for mode, outcome in made.items()}
    assert all(loss == losses["serial"] for loss in losses.values())
    assert made["staged_before_update"].lines[1]["staged"]

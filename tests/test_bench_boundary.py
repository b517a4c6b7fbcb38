"""The replay rig's claims can fail: what it checks, what it refuses, what it chooses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmstage.errors import BudgetError, RunFailedError, StoppedError
from shmstage.memory.limits import Limit
from shmstage.testing import simulated_device
from shmstage.testing.engines_simulated import SimulatedEngine, SimulatedSettings
from shmstage.testing.simulated_device import SimulatedDevice
from shmstage.testing.simulated_input import InputSettings
from shmstage.timeline.idle import BoundaryIdle

BENCH = Path(__file__).parents[1] / "bench"
INPUT = InputSettings(rows=8, tokens=4096, microbatches=3, layers=2, top_k=2, experts=64)
STEPS, PER_STEP = 3, 2
Bench = Callable[[str], Any]
Run = dict[str, Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Imports a script of ``bench/``, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def trained(bench: Bench, keeps: str = "copies", order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> tuple[Run, int]:
    """A run of the engine over the rig's input, micro-batch by micro-batch as ``order`` says, and the payload's size.

    The clock stands while a step is dispatched, and the update's idle is 7 ms each time.
    """
    now_ns = [0]
    device = SimulatedDevice(clock_ns=lambda: now_ns[0], sleep_until=lambda ns: None)
    settings = SimulatedSettings(microbatch_s=0.1, update_s=0.01, keeps=keeps)  # type: ignore[arg-type]
    engine = SimulatedEngine(settings, device)
    packed = bench("packed_input").PackedInput(INPUT)
    buffers = [np.zeros(packed.layout.payload_nbytes, np.uint8) for _ in range(max(order) + 1)]
    for buffer in buffers:
        packed.pack_into(buffer)
    run: Run = {"losses": [], "denominators": []}
    for number, which in enumerate(order, 1):
        engine.fwd_bwd(engine.put(packed.layout.views(buffers[which], 0), {})).block_until_ready()
        if number % PER_STEP == 0:
            now_ns[0] = device._compute_end + 7_000_000
            engine.update().block_until_ready()
            metrics = {name: float(np.asarray(value)) for name, value in engine.metrics().items()}
            run["losses"].append(metrics["loss"])
            run["denominators"].append(metrics["denominator"])
    run["device"] = json.loads(json.dumps(device.record()))
    engine.close()
    return run, packed.layout.payload_nbytes


def faults(bench: Bench, run: Run, payload_nbytes: int) -> list[str]:
    checks = bench("boundary_checks")
    wanted = checks.expected(checks.contents_of(INPUT), STEPS, PER_STEP)
    return list(checks.faults_of(run, wanted, payload_nbytes, PER_STEP))


@pytest.mark.parametrize("keeps", ["copies", "hashes"])
def test_a_run_that_trained_the_input_in_order_has_no_fault(bench: Bench, keeps: str) -> None:
    run, payload_nbytes = trained(bench, keeps)
    assert faults(bench, run, payload_nbytes) == []
    assert [b["idle_ns"] for b in run["device"]["boundaries"]] == [7_000_000] * (STEPS - 1)


@pytest.mark.parametrize("order", [(0, 1, 1, 2, 3, 4), (1, 0, 2, 3, 4, 5), (0, 1, 2, 3, 4, 4)])
def test_a_micro_batch_twice_or_out_of_order_is_a_fault(bench: Bench, order: tuple[int, ...]) -> None:
    assert "of the input" in faults(bench, *trained(bench, order=order))[0]


@pytest.mark.parametrize("keeps", ["copies", "hashes"])
def test_an_upload_that_skips_a_page_is_a_fault(
    bench: Bench, keeps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arms would skip it alike: only the input tells."""

    class Skipping:
        @staticmethod
        def copy_guarded(destination: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> bool:
            destination[:] = source
            if source.nbytes > 8192:
                destination[4096:8192] = 0
            return True

    monkeypatch.setattr(simulated_device, "_native", Skipping)
    assert "losses of step 1" in faults(bench, *trained(bench, keeps))[0]


def test_work_too_many_too_few_or_in_another_place_is_a_fault(bench: Bench) -> None:
    order_faults = bench("boundary_checks").order_faults
    right = [{"step": step, "index": index} for step in (1, 2) for index in (0, 1, -1)]
    assert order_faults(right, 2, 2) == []
    twice, fewer = [*right[:3], right[2], *right[3:]], right[:-1]
    early = [*right[:2], right[3], right[2], *right[4:]]  # before the update
    for wrong in (twice, fewer, early, [*right, right[-1]]):
        assert len(order_faults(wrong, 2, 2)) == 1


def test_stamps_from_wake_ups_do_not_add_up(bench: Bench) -> None:
    run, payload_nbytes = trained(bench)
    stamp_faults = bench("boundary_checks").stamp_faults

    def altered(where: str, number: int, key: str, by: int) -> list[str]:
        device = json.loads(json.dumps(run["device"]))
        device[where][number][key] += by
        return list(stamp_faults(device, payload_nbytes))

    assert stamp_faults(run["device"], payload_nbytes) == []
    assert "took" in altered("compute", 1, "end_ns", 60_000)[0]
    assert "began 60000 ns after" in altered("compute", 2, "begin_ns", 60_000)[0]
    assert "idle of the boundaries" in altered("boundaries", 0, "idle_ns", -7_000_000)[0]
    assert "less than the bandwidth" in altered("uploads", 0, "duration_ns", 10**12)[0]
    assert "bytes of" in altered("uploads", 0, "nbytes", -4096)[0]


def test_an_estimate_is_compared_with_the_boundary_before_its_line(bench: Bench) -> None:
    lines = [{"step": 1, "boundary_idle_s": None}, {"step": 2, "boundary_idle_s": 0.003}]
    lines.append({"step": 3, "boundary_idle_s": 0.001})
    boundaries = [{"step": 1, "idle_ns": 1_000_000}, {"step": 2, "idle_ns": 2_000_000}]
    assert bench("boundary_checks").estimate_errors_s(lines, boundaries) == pytest.approx([0.002, -0.001])
    told = {2: BoundaryIdle(1_500_000, 2_250_000, ((0, 1_000_000),), ((2_000_000, 3_500_000),), 0, 0)}
    errors = bench("boundary_checks").event_errors_s(told, boundaries)
    assert errors["reported"] == [None, pytest.approx(0.0005)]
    assert errors["by_stamps"] == [None, pytest.approx(-0.0005)]
    assert errors["by_calibration"] == [None, pytest.approx(0.00025)]


def test_a_boundary_that_events_do_not_tell_of_is_a_problem_and_a_wrong_one_misses_the_target(bench: Bench) -> None:
    off = {"idle_share": 0.0, "arm": "A1", "variant": "plain", "microbatches_per_step": 3}
    figures = {worst: off | {"events_off_s": {"reported": {"max": worst}}} for worst in (0.0009, 0.0011)}
    assert [each["met"] for each in bench("boundary").targets_of(figures)] == [True, False]


def test_an_arm_that_ends_in_an_error_is_a_problem_and_the_others_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    boundary = bench("boundary")
    run, payload_nbytes = trained(bench)
    run |= {"param_digest": "p", "idle_s": [0.007], "step_s": [0.2], "pack_s": [0.0], "placed_s": [0.0]}
    run |= {"told_late_s": 0.0, "arrival_s": [0.0]}

    seeded: Exception = RunFailedError("seeded")

    def measured(rig: Any, path: str, *rest: Any) -> Run:
        if path == "shm":
            raise seeded
        return run

    monkeypatch.setattr(boundary, "measured", measured)
    rig = SimpleNamespace(source=INPUT, payload_nbytes=payload_nbytes)
    args = SimpleNamespace(events=None, variants=["plain"], microbatches=[PER_STEP], steps=STEPS, rounds=1)
    found = boundary.measure(rig, {"A0": "grpc", "A3": "shm"}, args, tmp_path)
    assert list(found["figures"]) == ["A0 plain 2"]
    assert found["problems"] == ["plain, 2 per step, round 1 of 1: A3: RunFailedError: seeded"]
    seeded = StoppedError("stopped by SIGTERM")
    with pytest.raises(StoppedError):  # nobody who stops the script wants the next arm
        boundary.measure(rig, {"A3": "shm"}, args, tmp_path)


def test_the_serial_arm_is_the_one_that_waits_less(bench: Bench) -> None:
    stronger_of = bench("boundary").stronger_of
    slow, fast = {"idle_s": 0.6, "step_s": 1.0}, {"idle_s": 0.2, "step_s": 1.1}
    assert stronger_of({"grpc": fast, "unary": slow}) == "grpc"
    assert stronger_of({"grpc": slow, "unary": fast}) == "unary"


def test_memory_is_judged_by_what_an_arm_holds_at_once(bench: Bench) -> None:
    rig = bench("boundary_arms").Rig.of(1, 5.15e9, slots=2)
    memory = bench("boundary_memory")
    payload = rig.payload_nbytes
    ours, streamed = (memory.amounts_of(rig, path, "serial") for path in ("shm", "grpc"))
    assert ours["slots"] == 2 * payload and "device buffers" not in ours  # hashes are kept of what was uploaded
    assert streamed["packing buffers"] == payload and streamed["receiving buffers"] == 2 * payload
    small = bench("boundary_arms").Rig.of(100, 5.15e9)
    assert memory.amounts_of(small, "shm", "serial")["device buffers"] == 2 * small.payload_nbytes


def test_what_does_not_fit_is_refused_with_value_limit_and_remedy(bench: Bench) -> None:
    rig = bench("boundary_arms").Rig.of(1, 5.15e9)
    check = bench("boundary_memory").check_memory
    arms = [("A3", "shm", "staged_before_update")]
    need = sum(bench("boundary_memory").amounts_of(rig, *arms[0][1:]).values())
    check(rig, arms, [Limit("available RAM", need, "ram"), Limit("the mount", 3 * rig.payload_nbytes, "mount")])
    with pytest.raises(BudgetError, match=r"A3 needs 17.5 GB.* available RAM leaves .* --slots 2"):
        check(rig, arms, [Limit("available RAM", need - 1, "ram")])
    with pytest.raises(BudgetError, match=r"needs 15.4 GB \(slots 15.4 GB\); the mount leaves"):
        check(rig, arms, [Limit("the mount", 3 * rig.payload_nbytes - 1, "mount")])
    with pytest.raises(BudgetError, match="in one message"):
        check(rig, [("U0", "unary", "serial")], [])


@pytest.mark.slow
def test_the_script_refuses_what_does_not_fit_before_it_runs_anything(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "boundary.py"), "--scale", "0.01", "--arms", "A3", "--results"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "arm A3 needs 1." in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_variant_runs_and_is_exact(tmp_path: Path) -> None:
    shape = "--scale 2000 --microbatches 1 --variants blocking,two-deep --steps 3 --rounds 1 --arms A3"
    kept = ("--results", str(tmp_path), "--events", str(tmp_path / "events"), "--json")
    done = subprocess.run(
        [sys.executable, str(BENCH / "boundary.py"), *shape.split(), *kept],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == [] and len(found["figures"]) == 2
    for figure in found["figures"].values():
        assert {"median", "min", "max", "samples"} == figure["estimate_off_s"].keys() == figure["placed_s"].keys()
        assert figure["events_off_s"]["reported"]["max"] == pytest.approx(figure["estimate_off_s"]["max"], abs=1e-9)
        assert figure["events_missing"] == 0
    assert len(list((tmp_path / "events").glob("*/events/trainer.jsonl"))) == 2
    assert sum(each["name"].startswith("idle from the events") for each in found["targets"]) == 2
    plots = {path.name for path in tmp_path.glob("*.svg")}
    assert plots in ({f"boundary-{name}.svg" for name in ("blocking", "two-deep")}, set())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_stronger_way_over_grpc_is_found_and_stated(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    began = time.monotonic()
    shape = "--scale 2000 --microbatches 1 --variants settling --steps 3 --rounds 1 --arms A0,G3"
    done = subprocess.run(
        [sys.executable, str(BENCH / "boundary.py"), *shape.split(), "--results", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    told = found["serial_over"]
    assert told["chosen"] == min(("grpc", "unary"), key=lambda path: float(told[path]["idle_s"]))
    assert found["figures"]["A0 settling 1"]["path"] == told["chosen"] and not found["problems"]
    assert 0 < found["figures"]["G3 settling 1"]["arrival_s"]["max"] < time.monotonic() - began

"""The memory bench: what a baseline and a peak are, that it runs, and that it would see a payload too many."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def figure(of_payload: float, path: str = "shm", payload_nbytes: int = 1 << 28) -> dict[str, Any]:
    return {"path": path, "payload_nbytes": payload_nbytes, "of_payload": {"max": of_payload}}


def test_the_limit_is_the_pool_the_device_buffers_and_64_mib(bench: Callable[[str], Any]) -> None:
    memory = bench("memory")
    assert memory.limit_of(1 << 28) == (3 + 1 + 2) * (1 << 28) + (64 << 20)
    figures = {"a": figure(6.25), "b": figure(6.26), "g": figure(10.0, "grpc")}
    assert [each["met"] for each in memory.targets_of(figures)] == [True, False]  # gRPC has no target to meet


def test_an_arm_that_has_no_room_is_left_out_and_named(bench: Callable[[str], Any], tmp_path: Path) -> None:
    asked = argparse.Namespace(payload=[1 << 50], rounds=1, steps=3, hold=0, every_ms=1.0)
    found = bench("memory").measure(["optax", "pickled"], asked, tmp_path)
    assert not found["figures"] and "optax, pickled left out at " in found["notes"][0]


def test_the_peak_is_that_of_both_together_and_growth_is_seen_past_the_ramp(
    bench: Callable[[str], Any], tmp_path: Path
) -> None:
    sampling = bench("memory_sampling")
    sampler = sampling.Sampler(tmp_path, bench("memory_rig").Gate(tmp_path), 0.0)

    def use(pss: int) -> Any:
        return sampling.Use(pss, pss, 0, 0)

    sampler.baseline = {"orchestrator": use(100), "trainer": use(10)}
    # together 290, 990, 1,000, 190: neither's own highest is at the peak
    both = [(300, 100), (700, 400), (600, 510), (100, 520)]
    sampler.samples = [(float(at), [use(one), use(other)]) for at, (one, other) in enumerate(both)]
    sampler.reading_s = [0.01]
    sampler.resident = [10, 400, 899, *range(1000, 991, -1), 700]  # shrinks by 1 each time, past the ramp
    sampler.high_water = [sampling.HighWater(1, 50, 700, 400), sampling.HighWater(2, 60, 560, 300)]
    seen = sampler.seen()
    assert seen["peak"]["pss_nbytes"] == 1000
    assert [seen["peak_of"][role]["pss_nbytes"] for role in ("orchestrator", "trainer")] == [500, 500]
    assert seen["growth_nbytes"] == 993 - 999  # of the last third and of the first
    assert seen["high_water_nbytes"] == 650 + 500 - 300  # what both map of the pool is there once


def test_a_process_that_has_ended_takes_nothing(bench: Callable[[str], Any]) -> None:
    sampling = bench("memory_sampling")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert sampling.use_of(child.pid) == sampling.NOTHING
    assert sampling.use_of(os.getpid()).pss > 1 << 20


def test_nobody_passes_the_gate_before_the_baseline_has_been_read(
    bench: Callable[[str], Any], tmp_path: Path
) -> None:
    rig, sampling = bench("memory_rig"), bench("memory_sampling")
    gate = rig.Gate(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"pids": dict.fromkeys(rig.ROLES, os.getpid())}))
    passed = threading.Event()
    waiting = threading.Thread(target=lambda: (gate.ready("orchestrator"), gate.wait(), passed.set()))
    waiting.start()
    with sampling.Sampler(tmp_path, gate, 0.001) as sampler:
        assert not sampler.baseline and not (tmp_path / rig.GO).exists()  # the trainer is not ready yet
        gate.ready("trainer")
        assert passed.wait(30.0)
        assert sampler.baseline.keys() == set(rig.ROLES)
        assert all(use.pss > 0 for use in sampler.baseline.values())
    waiting.join()


@pytest.mark.slow
def test_the_engine_is_compiled_before_it_is_ready(
    bench: Callable[[str], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    rig = bench("memory_rig")
    given = {"rows": 2, "tokens": 48, "layers": 3, "top_k": 2, "experts": 16}
    with jax.log_compiles(True):
        settings = {"gate": str(tmp_path), "kind": "optax", "input": given, "checkpoint_dir": None}
        engine = rig.make_engine(settings)
        assert (tmp_path / "trainer").exists() and "Compiling jit(forward)" in caplog.text
        layout = rig.layout_of(bench("memory").InputSettings(**given))
        placed = engine.shardings(layout)
        batch = {
            field.name: jax.device_put(np.ones(field.shape, field.dtype), placed[field.name]) for field in layout.fields
        }
        caplog.clear()
        engine.fwd_bwd(batch)
        engine.update().block_until_ready()
    assert "Compiling" not in caplog.text


def test_a_run_that_fails_before_it_is_ready_leaves_no_sampler_behind(
    bench: Callable[[str], Any], tmp_path: Path
) -> None:
    gate = bench("memory_rig").Gate(tmp_path)
    with pytest.raises(ValueError, match="no such engine"), bench("memory_sampling").Sampler(tmp_path, gate, 0.001):
        raise ValueError("no such engine")
    assert not [thread for thread in threading.enumerate() if thread.name == "memory-sampler"]


def run_memory(folder: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH / "memory.py"), "--steps", "3", "--results", str(folder), "--json", *options],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert {"machine", "figures", "targets"} <= found.keys() and not found["problems"]
    assert json.loads((folder / "memory.json").read_text())["figures"] == found["figures"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_is_measured_from_before_its_pool_and_beside_grpc(tmp_path: Path) -> None:
    found = run_memory(tmp_path, "--payload", "4MB", "--arms", "simulated,streamed")
    ours = found["figures"]["simulated 4 MB"]
    # the pool is no part of the baseline: both its ends are in the rise
    assert ours["baseline"]["orchestrator"]["shared_nbytes"] == 0 < ours["baseline"]["orchestrator"]["pss_nbytes"]
    assert ours["peak"]["shared_nbytes"] >= 4 * ours["payload_nbytes"]
    assert ours["high_water_of_payload"]["median"] >= 4
    if "streamed 4 MB" in found["figures"]:
        assert found["figures"]["streamed 4 MB"]["peak"]["anonymous_nbytes"] > 8 * ours["payload_nbytes"]
    else:
        assert "grpc is missing" in found["notes"][0]
    assert [each["name"] for each in found["targets"]] == ["peak over the baseline in payloads, simulated 4 MB"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_engine_that_ships_is_measured_and_a_payload_too_many_is_seen(tmp_path: Path) -> None:
    found = run_memory(tmp_path, "--payload", "4MB", "--arms", "optax", "--hold", "200MB")
    (target,) = found["targets"]
    assert not target["met"] and target["value"] > 200 / 4 + 4

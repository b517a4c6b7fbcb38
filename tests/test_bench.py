"""The benchmarks run, and their verdicts are what their figures say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmstage.events import LANES
from shmstage.timeline.reading import Event, ProcessEvents

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script of ``bench/``, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def figure(arm: str, variant: str, count: int, idle_s: float, step_s: float = 0.4) -> dict[str, object]:
    return {
        "arm": arm, "variant": variant, "microbatches_per_step": count, "idle_s": {"median": idle_s},
        "step_s": {"median": step_s}, "idle_share": idle_s / step_s,
    }  # fmt: skip


def test_a_verdict_is_met_up_to_its_target_and_not_beyond(bench: Callable[[str], Any]) -> None:
    verdict = bench("results").verdict
    assert verdict("x", 1.0, 1.0)["met"] and not verdict("x", 1.1, 1.0)["met"]
    assert verdict("x", 100, 100, at_least=True)["met"] and not verdict("x", 99, 100, at_least=True)["met"]


def test_a_kept_result_says_what_made_it(bench: Callable[[str], Any], tmp_path: Path) -> None:
    results = bench("results")
    result = {"machine": results.machine(), "figures": {}}
    path = results.keep("speed", result, tmp_path / "new")
    assert path == tmp_path / "new" / "speed.json" and json.loads(path.read_text()) == result
    assert result["script"] == "speed" and result["command"].startswith("python ")
    assert datetime.now(UTC) - datetime.fromisoformat(result["at"]) < timedelta(minutes=5)
    machine = result["machine"]
    assert machine["cpu"] and 0 < machine["available_gb"] <= machine["memory_gb"]
    assert machine["packages"]["numpy"] == importlib.import_module("numpy").__version__
    assert "core" in results.machine_line(machine)


def test_the_revision_is_that_of_the_checkout_and_absent_elsewhere(
    bench: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench("results")
    monkeypatch.setattr(results, "BENCH", tmp_path)
    assert "revision" not in kept(results, tmp_path)
    for arguments in ("init -q", "-c user.name=a -c user.email=b@c commit -q --allow-empty -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *arguments.split()], check=True)
    asked = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert kept(results, tmp_path)["revision"] == asked.stdout.strip()[:12]
    subprocess.run(["git", "-C", str(tmp_path), "add", "--all"], check=True)
    assert kept(results, tmp_path)["revision"] == asked.stdout.strip()[:12] + "+"


def kept(results: Any, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    results.keep("x", result, folder)
    return result


def test_a_plot_is_drawn_or_the_missing_package_named(
    bench: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench("results")
    notes = results.plot(tmp_path / "new" / "x.svg", lambda figure: figure.subplots().plot([1, 2]))
    assert notes == ([] if (tmp_path / "new" / "x.svg").exists() else [results.NO_PLOT])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert results.plot(tmp_path / "y.svg", lambda figure: None) == [results.NO_PLOT]
    assert not (tmp_path / "y.svg").exists()


def test_the_boundary_is_judged_by_idle_share_and_against_serial_over_grpc(bench: Callable[[str], Any]) -> None:
    targets_of = bench("boundary").targets_of
    figures = {"A0 plain 3": figure("A0", "plain", 3, 0.09), "A3 plain 3": figure("A3", "plain", 3, 0.001)}
    assert [each["met"] for each in targets_of(figures)] == [False, False]  # 0.25 % of the step; 90 times less
    figures["A3 plain 3"] = figure("A3", "plain", 3, 0.0)
    assert [each["met"] for each in targets_of(figures)] == [True, True]


def test_a_rig_is_scaled_in_bytes_and_seconds_alike(tmp_path: Path, bench: Callable[[str], Any]) -> None:
    Rig = bench("boundary").Rig
    small, large = Rig.of(1000, 5.15e9), Rig.of(100, 5.15e9)
    assert large.payload_nbytes == pytest.approx(5.15e7, rel=0.01)
    engines = [rig.engine("plain", tmp_path) for rig in (small, large)]
    assert engines[1]["microbatch_s"] == pytest.approx(10 * engines[0]["microbatch_s"]) == pytest.approx(0.1338)
    assert engines[0]["upload_gbps"] == engines[1]["upload_gbps"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_boundary_rig_runs_and_leaves_out_what_it_has_no_package_for(tmp_path: Path) -> None:
    shape = "--scale 2000 --microbatches 2 --variants plain --steps 4 --rounds 1 --arms A0,S0,A3 --serial-over stream"
    done = subprocess.run(
        [sys.executable, str(BENCH / "boundary.py"), *shape.split(), "--results", str(tmp_path), "--json"],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"S0 plain 2", "A3 plain 2"} <= found["figures"].keys() and not found["problems"]
    assert "A0 plain 2" in found["figures"] or "shmstage[bench]" in found["notes"][0]
    assert {"name", "value", "target", "met"} == found["targets"][0].keys()
    assert json.loads((tmp_path / "boundary.json").read_text())["figures"] == found["figures"]


# --- uploads to a real device, without one ------------------------------------------------------------------


def upload_part(wrong: int = 0, problem: str = "") -> dict[str, Any]:
    arms = {arm: {"gbps": {"median": gbps}} for arm, gbps in (("registered", 20.0), ("pageable", 10.0))}
    return {
        "uploads": {str(1 << 20): arms, str(1 << 30): arms}, "overlap": {"registered": {"share": 0.9}},
        "poison": {
            "registered": {"wrong": wrong, "errors": []}, "pageable": {"wrong": 0, "errors": []},
            "control": {"wrong": 5, "errors": []},
        },
        "problems": [problem] if problem else [],
    }  # fmt: skip


def rig_part(serial: float, staged: float, digest: str = "d") -> dict[str, Any]:
    exact = {"param_digest": digest, "losses": [1.0], "denominators": [1.0]}
    runs = [
        {"mode": mode, "idle_s": [idle], "step_s": [1.0], "staged": 1, "host_memory": "", **exact}
        for mode, idle in (("serial", serial), ("staged_before_update", staged))
    ]
    return {"runs": runs, "cut_short": False}


def measured_uploads(bench: Callable[[str], Any], parts: dict[str, Any], errors: dict[str, str]) -> Any:
    script = bench("gpu_upload")
    asked: list[tuple[str, float]] = []

    def run_part(name: str, given: dict[str, Any], limit_s: float, work: Path) -> tuple[Any, str]:
        title = "direct" if given.get("direct") else {"uploads": "staged by XLA"}.get(name, name)
        asked.append((title, limit_s))
        return parts.get(title), errors.get(title, "")

    script.run_part = run_part
    args = SimpleNamespace(cpu=True, budget_s=420.0, until=time.monotonic() + 420.0, only="staged by XLA,rig,direct")
    try:
        found, _ = script.measure(args, Path("/nowhere"))
    finally:
        sys.modules.pop("gpu_upload")
    return found, asked, script.targets_of(found["figures"], [1 << 20, 1 << 30])


def test_the_upload_script_judges_what_its_parts_found(bench: Callable[[str], Any]) -> None:
    parts = {"staged by XLA": upload_part(), "direct": upload_part(), "rig": rig_part(0.5, 0.001)}
    found, asked, targets = measured_uploads(bench, parts, {})
    assert not found["problems"] and sum(limit_s for _, limit_s in asked) <= 420.0
    by_name = {each["name"]: each for each in targets}
    assert by_name["upload direct, registered / pageable, 1024 MiB"]["value"] == 2.0
    assert by_name["rig, idle share of the step, staged before"]["value"] == 0.001
    assert all(each["met"] for each in targets)
    assert not any("control" in name for name in by_name)  # it has to be wrong


@pytest.mark.parametrize(
    ("parts", "errors", "problem"),
    [
        ({"staged by XLA": upload_part(wrong=1)}, {}, "staged by XLA, poison, registered"),
        ({"staged by XLA": upload_part(problem="not registered: X")}, {}, "staged by XLA: not registered: X"),
        ({}, {"rig": "not done after 200 s"}, "rig: not done after 200 s"),
        ({}, {"direct": "exit -6"}, "direct: exit -6"),
    ],
)
def test_the_upload_script_fails_for_what_went_wrong(
    bench: Callable[[str], Any], parts: dict[str, Any], errors: dict[str, str], problem: str
) -> None:
    found, _, _ = measured_uploads(bench, parts, errors)
    assert len(found["problems"]) == 1 and found["problems"][0].startswith(problem)


def test_rig_runs_that_trained_different_things_are_a_problem(bench: Callable[[str], Any]) -> None:
    rig = rig_part(0.5, 0.001)
    rig["runs"][1]["param_digest"] = "other"
    found, _, _ = measured_uploads(bench, {"rig": rig}, {})
    assert found["problems"] == ["rig: the runs trained different things"]


def gpu_upload(*arguments: str) -> tuple[int, dict[str, Any], str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu_upload.py"), "--json", *arguments],
        capture_output=True, text=True, timeout=230, env=environment,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_upload_script_says_so_when_there_is_no_gpu(tmp_path: Path) -> None:
    code, found, _ = gpu_upload("--results", str(tmp_path))
    assert code == 0 and found["gpu"] is None and "no GPU: JAX computes on cpu" in found["reason"]
    assert found["targets"] == [] and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_upload_script_can_be_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    code, found, said = gpu_upload("--cpu", "--only", "staged by XLA,rig", "--results", str(tmp_path))
    assert code == 0, (found["problems"], said)
    figures = found["figures"]
    for arm in ("registered", "pageable"):
        assert figures[f"upload staged by XLA, {arm}, 1 MiB"]["gbps"]["median"] > 0
        assert figures[f"poison staged by XLA, {arm}"] == {"microbatches": 8, "wrong": 0, "errors": []}
        assert {"share", "compute_s", "upload_s", "both_s"} <= figures[f"overlap staged by XLA, {arm}"].keys()
    assert figures["registration staged by XLA"]["registered_nbytes"] > 0
    assert figures["rig serial"]["staged"] == [0] and figures["rig staged_before_update"]["staged"] == [3]
    assert {"name", "value", "target", "met"} == found["targets"][0].keys()
    assert json.loads((tmp_path / "gpu_upload.json").read_text())["figures"] == figures


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_packing_is_exact_and_kept_with_its_figures_and_its_plot(tmp_path: Path, bench: Callable[[str], Any]) -> None:
    pack = bench("pack")
    lists = tmp_path / "lengths"
    lists.mkdir()
    lengths = [[3 * number % 40, 20 + number % 50] for number in range(60)]
    (lists / "gsm8k.json").write_text(json.dumps({"pairs": lengths}))
    found = pack.measure(lists, 1, [100])
    (figures,) = found["figures"]["lists"]
    assert found["equal"] and figures["equal_to_numpy"] and len(found["notes"]) >= 3
    assert 0 < figures["efficiency"] <= 1 and {"fill", "gather", "native", "numpy"} <= figures["ms"].keys()
    if figures["grain"] is None:
        assert "shmstage[bench]" in found["notes"][-1]
    else:
        assert figures["grain"]["nothing_lost"] and 0 < figures["grain"]["efficiency"] <= 1
    named = {each["name"] for each in found["targets"]}
    assert named == {"ragged_packed_of_dense_bytes", "fill_times_numpy_gsm8k"}
    if pack.plot(found, tmp_path / "pack.svg"):
        assert (tmp_path / "pack.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.slow
def test_the_bounds_of_the_overhead_are_measured_and_drawn(tmp_path: Path, bench: Callable[[str], Any]) -> None:
    parts = bench("overhead_parts")
    figures = {
        "engine_alone_s": parts.engine_alone(1, 8, 2, steps=2), "hand_over_s": parts.hand_over(20),
        "calls_s": parts.calls(f"test-{tmp_path.name}", 20), "round_trip_s": parts.round_trip(tmp_path, 20),
        "control": {"serial": {"per_microbatch_s": 0.002, "cpu_per_microbatch_s": 0.003}},
    }  # fmt: skip
    overhead = bench("overhead")
    assert set(overhead.PARTS) <= set(figures)
    for name in overhead.PARTS:
        assert 0 < figures[name]["min"] <= figures[name]["median"] <= figures[name]["max"]
    # two calls of ours are two round trips and more
    assert figures["calls_s"]["min"] > figures["round_trip_s"]["min"]
    assert not overhead.plot(figures, tmp_path / "o.svg") or (tmp_path / "o.svg").stat().st_size


@pytest.mark.slow
def test_what_events_cost_is_measured_of_those_that_a_step_notes(
    tmp_path: Path, bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = bench("overhead_events")
    monkeypatch.setattr(script, "BURSTS", 1)
    monkeypatch.setattr(script, "REPEATS", 1)
    events = [
        Event(t, 0, name, LANES[name], step, -1, "", {"odd": 'say "so"'})
        for step in range(1, 6)
        for t, name in ((10 * step, "received"), (10 * step + 1, "dispatched"), (10 * step + 2, "landed"))
    ]
    process = ProcessEvents("trainer", 1, 1, "r", 0, events)
    found = script.costs([process], 1, tmp_path)["trainer"]
    assert found["events_per_step"] == 3 and found["by_name"] == {"received": 1, "dispatched": 1, "landed": 1}
    assert 0 < found["note_s"]["median"] < found["all_s"]["median"] and found["note_share"] < found["share"]
    assert found["share"] == pytest.approx(found["all_s"]["median"] * 3 / script.STEP_S)
    told = script.alternating(lambda events, number: [0.02 if events == "on" else 0.01], 2)
    assert told["of_off"] == pytest.approx(1.0)

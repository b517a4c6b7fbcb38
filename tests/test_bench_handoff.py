"""The hand-off benchmark: what it measures really arrives, its verdicts follow its figures, and nothing outlives it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

BENCH = Path(__file__).parents[1] / "bench"
KB, GB = 1_000, 1_000_000_000


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of ``bench/``, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def figure(path: str, nbytes: int, hand_off_s: float, whole_path_s: float = 1.0) -> dict[str, Any]:
    return {
        "path": path, "nbytes": nbytes, "hand_off_s": {"median": hand_off_s}, "whole_path_s": {"median": whole_path_s}
    }  # fmt: skip


def test_the_hand_off_is_judged_by_its_constancy_and_against_grpc_and_ray(bench: Callable[[str], Any]) -> None:
    targets_of = bench("handoff").targets_of
    met = {
        "a": figure("ours", KB, 1e-4), "b": figure("ours", GB, 1.3e-4, 0.1), "c": figure("grpc_stream", GB, 0.13, 0.5),
        "d": figure("ray", GB, 0.039, 0.2),
    }  # fmt: skip
    assert [(round(each["value"], 6), each["target"], each["met"]) for each in targets_of(met)] == [
        (1.3, 1.3, True), (1000, 1000, True), (300, 300, True), (5, 5, True), (2, 2, True),
    ]  # fmt: skip
    missed = {**met, "b": figure("ours", GB, 1.4e-4, 0.11)}
    assert not any(each["met"] for each in targets_of(missed))


def test_a_target_whose_size_or_path_was_not_measured_is_not_judged(bench: Callable[[str], Any]) -> None:
    found = bench("handoff").targets_of({"a": figure("ours", GB, 1e-4), "b": figure("ray", GB, 1.0)})
    assert [each["name"] for each in found] == ["hand-off of 1 GB, ray / ours", "whole path of 1 GB, ray / ours"]


@pytest.mark.parametrize("nbytes", [1_000, 1_000_000, 64_000_000, 1_000_000_000, 5_000_000_000])
def test_a_micro_batch_has_the_size_that_was_asked_for(bench: Callable[[str], Any], nbytes: int) -> None:
    batch = bench("paths.batch")
    settings = batch.input_settings(nbytes)
    of_token = 4 * 6 + 2 * settings.layers * settings.top_k
    assert settings.rows * settings.tokens * of_token == pytest.approx(nbytes, rel=0.05)


def test_the_digest_sees_every_byte_and_foresees_the_serial_number(bench: Callable[[str], Any]) -> None:
    proof = bench("paths.proof")
    arrays = {
        "completion_ids": np.zeros((2, proof.CHUNK_NBYTES // 4), np.int32),
        "routed_experts": np.zeros((2, 3, 1, 1), np.int16),
    }
    expected = proof.Expected(arrays)
    seen = {proof.digest(arrays)}
    for place in ("completion_ids", 0, 0), ("completion_ids", 1, -1), ("routed_experts", 1, 2):
        name, *index = place
        arrays[name][tuple(index)] += 1
        seen.add(proof.digest(arrays))
    assert len(seen) == 4
    for array in arrays.values():
        array[...] = 0
    proof.number(arrays, 77)
    assert proof.digest(arrays) == expected.digest(77) != expected.digest(78)


def test_a_path_that_says_it_copies_nothing_must_show_the_same_memory(bench: Callable[[str], Any]) -> None:
    measured, paths = bench("paths.measured"), bench("paths").PATHS
    private = {"completion_ids": np.zeros((1, 8), np.int32)}
    report = {"read_s": 0.0, "where": None}
    cell = measured.Cell()
    cell.received(report, paths["zmq"], private)
    with pytest.raises(measured.PathError, match="ours is said to copy 0 times"):
        cell.received(report, paths["ours"], private)


@pytest.fixture
def runtime() -> Iterator[str]:
    """A directory of its own for what scripts leave behind in temporary directories: nothing."""
    with tempfile.TemporaryDirectory(prefix="ht", dir="/tmp") as directory:
        yield directory
        left = [name for name in os.listdir(directory) if name.startswith(("handoff", "ray"))]
        assert not left


def start(runtime: str, results: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": runtime, "PYTHONPATH": str(BENCH.parent)}
    return subprocess.Popen(
        [sys.executable, str(BENCH / "handoff.py"), "--results", str(results), "--json", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def left_of(script: subprocess.Popen[str]) -> list[str]:
    """What still runs of the session that the script led. Its resource tracker ends by itself, on seeing it gone."""
    session = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == script.pid and process.pid != script.pid:
                session.append(process)
    deadline = time.monotonic() + 20
    while (alive := [process.info["name"] for process in session if runs(process)]) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return alive


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


#: few packages are imported by these: what is tested is the rig
QUICK = ("ours", "queue", "zmq")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_quick_path_delivers_and_its_figures_are_kept(tmp_path: Path, runtime: str) -> None:
    script = start(
        runtime, tmp_path, "--sizes", "1KB,100KB", "--paths", ",".join(QUICK), "--rounds", "2", "--handoffs", "6"
    )
    out, err = script.communicate(timeout=110)
    assert script.returncode == 0, err
    found = json.loads(out)
    assert found["figures"].keys() == {f"{path} {size}" for path in QUICK for size in ("1 kB", "100 kB")}
    for each in found["figures"].values():
        assert each["hand_off_s"]["min"] > 0 and each["whole_path_s"]["min"] > 0 and each["hand_off_s"]["samples"] <= 6
        assert each["copied_nbytes"] == each["copied_payloads"] * each["payload_nbytes"]
    assert found["figures"]["ours 1 kB"]["copied_nbytes"] == 0
    assert not found["problems"] and {"machine", "targets"} <= found.keys()
    assert json.loads((tmp_path / "handoff.json").read_text())["figures"] == found["figures"]
    assert not left_of(script)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("paths", [("grpc_unary", "grpc_stream", "iceoryx2"), ("ray", "grain")])
def test_a_path_of_an_optional_package_delivers_or_is_left_out(
    tmp_path: Path, runtime: str, paths: tuple[str, ...]
) -> None:
    script = start(runtime, tmp_path, "--sizes", "1KB", "--paths", ",".join(paths), "--rounds", "1", "--handoffs", "3")
    out, err = script.communicate(timeout=230)
    assert script.returncode == 0, err
    found = json.loads(out)
    for path in paths:
        missing = any(path in each and "shmstage[bench]" in each for each in found["notes"])
        assert (f"{path} 1 kB" in found["figures"]) != missing
    assert not left_of(script)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_other_bytes_than_were_sent_make_the_run_fail(
    tmp_path: Path, bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{BENCH}:{BENCH.parent}")
    handoff, batch = bench("handoff"), bench("paths.batch")
    monkeypatch.setattr(batch.Batch, "mark", lambda self, views: None)  # every transfer is the one before
    run = handoff.Run([bench("paths").PATHS["ours"]], [KB], 1, 1)
    run.measure()
    assert "other bytes arrived" in run.problems[0] and not run.figures


def test_a_size_that_does_not_fit_is_left_out_and_said(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handoff, paths = bench("handoff"), bench("paths").PATHS
    monkeypatch.setattr(handoff, "room_nbytes", lambda: 3 * GB)
    run = handoff.Run(list(paths.values()), [GB], 1, 1)
    run._peers = dict.fromkeys(paths)
    assert run._fitting(GB) == ["ours"]
    assert run._fitting(5 * GB) == []
    assert any("queue at 1 GB left out: it takes 6.54 GB, there is 3 GB" in each for each in run.notes)
    assert any("grpc_unary at 5 GB left out: a message holds 2.15 GB" in each for each in run.notes)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing_running(tmp_path: Path, runtime: str, number: signal.Signals) -> None:
    script = start(runtime, tmp_path, "--sizes", "1KB", "--paths", ",".join(QUICK), "--rounds", "1000")
    assert script.stderr is not None
    while "round 2" not in script.stderr.readline():
        assert script.poll() is None
    os.killpg(script.pid, number)  # as a terminal does
    _, err = script.communicate(timeout=60)
    assert script.returncode == 128 + number, err
    assert "Traceback" not in err
    assert not left_of(script)
    assert not (tmp_path / "handoff.json").exists()

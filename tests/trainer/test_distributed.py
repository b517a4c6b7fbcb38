"""Two real processes with ``jax.distributed`` on loopback, two virtual devices each, against one process alone."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TESTS = Path(__file__).parents[1]
DEADLINE_S = 180
CASES = ["demo", "rows", "spread"]
Found = dict[str, Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(devices: int) -> dict[str, str]:
    """Of a process on a host; what one has compiled the next need not."""
    cache = Path(tempfile.gettempdir()) / f"shmstage-test-xla-{os.getpid()}"
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PJRT_NPROC": "2",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }


def run(what: str, *directories: Path, hosts: int) -> list[Found]:
    """What each of ``hosts`` processes found, by rank."""
    port, place = free_port(), directories[0]
    outputs = [place / f"{what}.{hosts}.{rank}.json" for rank in range(hosts)]
    logs = [output.with_suffix(".log") for output in outputs]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, (output, log) in enumerate(zip(outputs, logs, strict=True)):
            arguments = [str(part) for part in (rank, hosts, port, what, *directories, output)]
            with log.open("wb") as stream:
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "trainer.one_of_several", *arguments], cwd=TESTS,
                        env=environment(2), stdout=stream, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        codes = [process.wait(DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * hosts, "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads(output.read_text()) for output in outputs]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    place = tmp_path_factory.mktemp("distributed")
    for hosts in ("1", "2"):
        (place / hosts).mkdir()
    return {hosts: place / str(hosts) for hosts in (1, 2)}


@pytest.fixture(scope="module")
def alone(directories: dict[int, Path]) -> Found:
    return run("train", directories[1], hosts=1)[0]


@pytest.fixture(scope="module")
def both(directories: dict[int, Path]) -> list[Found]:
    return run("train", directories[2], hosts=2)


def test_all_devices_are_used(both: list[Found]) -> None:
    assert [found["devices"] for found in both] == [[2, 4], [2, 4]]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_host_and_denominators_are_equal(alone: Found, both: list[Found], case: str) -> None:
    first, second = both[0][case]["steps"], both[1][case]["steps"]
    assert first == second
    assert len(first) == 3
    for got, want in zip(first, alone[case]["steps"], strict=True):
        assert got["denominator"] == want["denominator"]
        assert got == pytest.approx(want, rel=2e-5, abs=1e-6)
    assert both[0][case]["evaluated"] == both[1][case]["evaluated"]
    assert both[0][case]["evaluated"] == pytest.approx(alone[case]["evaluated"], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_the_same_on_both_hosts_and_close_to_those_of_one(
    alone: Found, both: list[Found], case: str
) -> None:
    first, second = both[0][case], both[1][case]
    assert first["digest"] == second["digest"]
    assert first["weights"] == second["weights"]
    for name, want in alone[case]["weights"].items():
        np.testing.assert_allclose(first["weights"][name], want, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_each_host_writes_the_scores_of_its_own_rows_and_tokens(alone: Found, both: list[Found], case: str) -> None:
    for number, want in enumerate(alone[case]["scores"]):
        whole = np.full(np.shape(want), np.nan)
        for found in both:
            part = tuple(slice(*pair) for pair in found[case]["ranges"]["old_per_token_logps"])
            assert np.isnan(whole[part]).all(), "two hosts hold the same part"
            whole[part] = found[case]["scores"][number]
        np.testing.assert_allclose(whole, want, rtol=1e-3, atol=1e-4)


def test_ranges_and_tiles_follow_the_mesh(both: list[Found]) -> None:
    first, second = both
    assert [found["demo"]["ranges"]["completion_ids"] for found in both] == [[[0, 4], [0, 24]], [[4, 8], [0, 24]]]
    assert first["demo"]["tiles"] == second["demo"]["tiles"] == [4, 1]
    assert [found["rows"]["ranges"]["x"] for found in both] == [[[0, 2], [0, 32]], [[2, 4], [0, 32]]]
    assert [found["spread"]["ranges"]["x"] for found in both] == [[[0, 4], [0, 16]], [[0, 4], [16, 32]]]
    assert [found["spread"]["ranges"]["y"] for found in both] == [[[0, 4]], [[0, 4]]]
    assert first["spread"]["tiles"] == [2, 2]


def test_the_first_host_alone_writes_checkpoints(both: list[Found]) -> None:
    assert [[found[case]["wrote"] for case in CASES] for found in both] == [[True] * 3, [False] * 3]


def test_what_no_host_has_whole_and_what_does_not_span_the_hosts_is_refused_when_the_engine_is_made(
    both: list[Found],
) -> None:
    for found in both:
        parts, one = found["refused"]
        assert "w [32]" in parts
        assert "no host has all of it; replicate it over the hosts" in parts
        assert "spans 2 hosts" in one


def test_all_do_what_the_first_one_says(both: list[Found]) -> None:
    assert [found["agreed"] for found in both] == [[3, None], [3, None]]


@pytest.mark.parametrize("hosts", [1, 2])
def test_what_either_saved_both_restore(
    directories: dict[int, Path], alone: Found, both: list[Found], hosts: int
) -> None:
    """``run`` restores what ``launch`` wrote and the other way round; the values, not only the step."""
    for found in run("restore", *directories.values(), hosts=hosts):
        for saved_by, trained in ((1, alone), (2, both[0])):
            for case in CASES:
                assert found[f"{saved_by}.{case}"] == {"step": 3, "note": 7, "digest": trained[case]["digest"]}

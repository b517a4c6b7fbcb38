"""Two real processes with ``jax.distributed`` on loopback, two virtual devices each, against one process alone.

At the end what needs no second process: who writes, who decides, and what is refused.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from shmstage.errors import EngineError
from shmstage.testing.engines import MemoryStore, ToyEngine
from shmstage.trainer import distributed, optax_engine
from shmstage.trainer.digests import param_digest

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


# --- without a second process -------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_hosts_the_first_alone_writes_and_discards_checkpoints(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that write one file, or remove what the other restores, leave none."""
    engine = ToyEngine(store=(store := MemoryStore()))

    def save(step: int) -> dict[str, object]:
        snapshot = engine.save(step, {"note": step})
        snapshot.copy_to_host()
        return snapshot.write()

    for step in (1, 2, 3):
        save(step)
    monkeypatch.setattr(jax, "process_index", lambda: rank)
    monkeypatch.setattr(optax_engine, "said_by_first", lambda what, mine: mine)
    engine._spans_hosts = True
    assert save(4) == {"step": 4, "path": "" if rank else "memory/4"}
    assert store.steps() == ([1, 2, 3] if rank else [1, 2, 3, 4])
    digest = param_digest(engine)
    assert engine.restore(at_most=2) == {"note": 2, "step": 2}
    assert param_digest(engine) == digest
    assert store.steps() == ([1, 2, 3] if rank else [1, 2])


def test_what_the_first_host_says_counts_for_all_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}
    shared = SimpleNamespace(key_value_set=said.__setitem__, blocking_key_value_get=lambda key, ms: said[key])
    monkeypatch.setattr(distributed, "coordinator_store", lambda: shared)
    found = []
    for rank, own in enumerate([[3, None, 5], [9, 1, None]]):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "_asked", itertools.count())
        found.append([distributed.said_by_first("restore", mine) for mine in own])
    assert found == [[3, None, 5]] * 2


def test_state_that_is_copied_over_hosts_is_the_callers_no_more() -> None:
    memory = np.zeros(4096 + 64, np.uint8)
    begin = -memory.ctypes.data % 64  # so aligned, the CPU backend takes memory as it is
    values = memory[begin : begin + 4096].view(np.float32)
    copy = distributed.copied_over_hosts(values, SingleDeviceSharding(jax.devices()[0]))
    values[:] = 7
    assert not np.asarray(copy).any()


def test_state_of_which_no_host_has_all_is_refused_by_name() -> None:
    def lying(*parts: tuple[int, int]) -> Any:
        shards = [SimpleNamespace(index=(slice(*part),)) for part in parts]
        return SimpleNamespace(shape=(4,), size=4, sharding="cut over hosts", addressable_shards=shards)

    distributed.check_replicated({"whole": lying((0, 4)), "twice": lying((0, 4), (0, 4)), "cut": lying((0, 2), (2, 4))})
    with pytest.raises(EngineError, match=r"state w \[4\] lies as cut over hosts: no host has all of it"):
        distributed.check_replicated({"a": lying((0, 4)), "w": lying((0, 2), (0, 2))})


def test_a_mesh_spans_hosts_if_one_of_its_devices_is_anothers() -> None:
    for processes, spans in (([0, 0], False), ([0, 1], True), ([1, 1], True)):
        mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=each) for each in processes]))
        assert distributed.spans_processes(mesh) is spans

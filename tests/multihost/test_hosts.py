"""A trainer that spans hosts trains as one on one host does, and goes on when somebody dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import finish, wait_for_line
from conftest import need_hosts
from hosts import Hosts, end_with_children, made_hosts
from launching import EQUAL, OPTIONS, pools, record_of, run_on_one_host, start, summary_of, wait_for_step
from ray_hosts import RayCluster, ray_on, start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: long enough that a kill after the second step comes in the middle
STEPS = 24
SETTINGS = ("--steps", str(STEPS), "--checkpoint-every", "1", "--restart-backoff-s", "0.1")
EXAMPLE = Path(__file__).parents[2] / "examples" / "launch" / "multi_host.sh"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    need_hosts()
    with made_hosts(2) as hosts, ray_on(hosts) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module")
def undisturbed(cluster: RayCluster, where: Path) -> dict[str, Any]:
    return summary_of(start(cluster, where / "undisturbed", *SETTINGS))


def test_two_hosts_train_what_one_does(cluster: RayCluster, where: Path, undisturbed: dict[str, Any]) -> None:
    one = run_on_one_host(cluster.hosts[0], where / "one", *SETTINGS)
    assert undisturbed["steps"] == one["steps"] == STEPS
    for key in ("digests", "denominators", "trajectories"):
        assert undisturbed[key] == one[key], key
    # sums over devices in another order
    assert [loss for step in undisturbed["losses"] for loss in _flat(step)] == pytest.approx(
        [loss for step in one["losses"] for loss in _flat(step)], rel=1e-4, abs=1e-5
    )
    assert undisturbed["hosts"] == 2
    assert undisturbed["orchestrator_bytes_per_trajectory"] <= 256
    assert len(undisturbed["fetched_nbytes_per_host"]) == 2
    assert all(nbytes > 0 for nbytes in undisturbed["fetched_nbytes_per_host"])
    assert undisturbed["leaked_pools"] == 0
    assert pools(cluster.hosts) == {"h0": set(), "h1": set()}


def _flat(step: Any) -> list[float]:
    return step if isinstance(step, list) else [step]


def test_each_host_has_a_pool_of_its_own_while_it_trains(cluster: RayCluster, where: Path) -> None:
    out = where / "pools"
    process = start(cluster, out, "--steps", "100000")
    try:
        wait_for_step(process, out, 2)
        found = pools(cluster.hosts)
        assert all(found.values()), found
        assert not found["h0"] & found["h1"], "one pool in two hosts"
        for host in cluster.hosts:
            for role, pid in record_of(out, host)["pids"].items():
                assert host.pid_outside(pid) > 0, role
    finally:
        interrupt(cluster, process, out)
    assert finish(process)[0] == 130
    assert pools(cluster.hosts) == {"h0": set(), "h1": set()}


def interrupt(cluster: RayCluster, process: subprocess.Popen[str], out: Path) -> None:
    launcher = json.loads((out / "run.json").read_text())["pids"]["launcher"]
    os.kill(cluster.hosts[0].pid_outside(launcher), 2)


@pytest.mark.parametrize("role", ["trainer", "agent"])
def test_a_killed_process_of_a_host_is_named_and_what_it_left_is_trained_again(
    role: str, cluster: RayCluster, where: Path, undisturbed: dict[str, Any]
) -> None:
    out = where / f"killed-{role}"
    process = start(cluster, out, *SETTINGS)
    wait_for_step(process, out, 2)
    victim = record_of(out, cluster.hosts[1])
    cluster.hosts[1].kill(victim["pids"][role])
    said = wait_for_line(process, "the restart", lambda line: "restarting" in line)
    assert f"{victim['name']}: the {role} (pid {victim['pids'][role]})" in said
    assert "(h1)" in victim["name"]
    summary = summary_of(process)
    assert summary["restarts"][role] == 1
    assert_equal(summary, undisturbed)
    assert pools(cluster.hosts) == {"h0": set(), "h1": set()}


def assert_equal(summary: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for key in EQUAL:
        assert summary[key] == undisturbed[key], key
    assert summary["leaked_pools"] == 0


def test_a_host_whose_raylet_was_killed_trains_again_once_it_is_back(
    cluster: RayCluster, where: Path, undisturbed: dict[str, Any]
) -> None:
    out = where / "killed-raylet"
    process = start(cluster, out, *SETTINGS)
    wait_for_step(process, out, 2)
    second = cluster.hosts[1]
    cluster.raylet(second).kill()
    said = wait_for_line(process, "the restart", lambda line: "restarting" in line)
    assert "(h1)" in said
    start_node(second, cluster.address, 1, cluster.store_nbytes)
    summary = summary_of(process)
    assert sum(summary["restarts"].values()) >= 1
    assert_equal(summary, undisturbed)
    assert pools(cluster.hosts) == {"h0": set(), "h1": set()}


def test_more_hosts_than_there_are_nodes_are_waited_for_and_then_refused(cluster: RayCluster, where: Path) -> None:
    process = start(cluster, where / "many", *SETTINGS, "--start-timeout-s", "5", hosts=3)
    code, printed, said = finish(process)
    there_is = "the cluster has 2 living nodes and "
    assert f"waiting up to 5 s for 3 nodes with a free CPU; {there_is}" in said
    assert code == 2
    text = json.loads(printed)["error"]["text"]
    assert text.startswith(f"hosts = 3: not placed within 5 s; {there_is}")
    assert pools(cluster.hosts) == {"h0": set(), "h1": set()}


def test_a_host_that_is_cut_off_and_stays_away_ends_the_run_with_its_name(where: Path) -> None:
    need_hosts()
    out = where / "cut"
    with made_hosts(2) as hosts, ray_on(hosts) as cluster:
        process = start(cluster, out, *SETTINGS, "--steps", "100000", "--start-timeout-s", "60")
        wait_for_step(process, out, 2)
        hosts.cut(hosts[1])
        code, printed, said = finish(process)
        assert code == 6, said
        error = json.loads(printed)["error"]
        assert error["kind"] == "PeerLostError"
        assert "(h1)" in error["text"]
        assert pools(hosts)["h0"] == set()
        # nobody can reach it: it ends by itself when it has heard nothing for long enough
        wait_until_empty(hosts, 90.0)


def wait_until_empty(hosts: Hosts, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := {name: found for name, found in pools(hosts).items() if found}:
        assert time.monotonic() < deadline, f"still there after {seconds:g} s: {left}"
        threading.Event().wait(0.02)


def test_four_hosts_train_what_one_does(where: Path) -> None:
    need_hosts()
    settings = ("--steps", "4")
    with made_hosts(4, shm="256m") as hosts, ray_on(hosts, store_nbytes=80_000_000) as cluster:
        four = summary_of(start(cluster, where / "four", *settings, hosts=4))
        one = run_on_one_host(hosts[0], where / "one-of-four", *settings)
        assert four["hosts"] == 4
        for key in ("digests", "denominators", "trajectories"):
            assert four[key] == one[key], key
        assert four["leaked_pools"] == 0
        assert not any(pools(hosts).values())


def test_the_example_for_hosts_by_hand_trains_on_two(hosts_allowed: None, tmp_path: Path) -> None:
    """examples/launch/multi_host.sh, typed as its head says."""
    binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"PATH": binaries, "RAY_AUTH_TOKEN": "f" * 64, "STORE_NBYTES": "100000000", "OUT": str(tmp_path / "out")}
    with made_hosts(2) as hosts:
        joining = hosts[1].start(
            [str(EXAMPLE), "join", hosts[0].address], cwd=tmp_path, env=given, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            done = hosts[0].run(
                [str(EXAMPLE), "head", "2", "--steps", "2", *OPTIONS], cwd=tmp_path, env=given, timeout_s=250
            )
        finally:
            end_with_children(joining)
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (summary["steps"], summary["hosts"], summary["leaked_pools"]) == (2, 2, 0), done.stderr
        assert not any(p.name() == "raylet" for p in hosts[0].processes()), "the head stops its Ray"

"""`shmstage launch --address` in the first of the hosts, its record of who runs where, and what has to be equal."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import finish
from hosts import Host, Hosts
from ray_hosts import RayCluster

#: what a death must not change
EQUAL = ("param_digest", "initial_param_digest", "steps", "digests", "denominators", "losses", "trajectories")
#: a small model: most of the time goes into starting processes, and that is what is tested
ENGINE = '[engine]\npolicy = "fresh"\nlayers = 1\nd_model = 16\nd_ff = 32\nlearning_rate = 1e-3\n'
OPTIONS = ("--rows", "4", "--tokens", "192", "--microbatches-per-step", "2", "--boundary", "staged_before_update")
DEADLINE_S = 240.0


def command(name: str, out: Path, *options: str) -> list[str]:
    config = out.parent / "engine.toml"
    config.write_text(ENGINE)
    return [
        sys.executable, "-m", "shmstage.cli", name, "--json", "--config", str(config), "--run", out.name, "--out",
        str(out), *OPTIONS, *options,
    ]  # fmt: skip


def start(cluster: RayCluster, out: Path, *options: str, hosts: int = 2) -> subprocess.Popen[str]:
    fleet = ("--address", cluster.address, "--hosts", str(hosts))
    return cluster.hosts[0].start(command("launch", out, *fleet, *options), cwd=out.parent, env=compiled(out))


def compiled(out: Path) -> dict[str, str]:
    """One place for what XLA compiled: most of a run's time would go into compiling the same."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def summary_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    code, out, err = finish(process)
    assert code == 0, f"exit {code}\n{out}\n{err}"
    assert len(out.splitlines()) == 1, out
    found: dict[str, Any] = json.loads(out)
    return found


def run_on_one_host(host: Host, out: Path, *options: str) -> dict[str, Any]:
    return summary_of(host.start(command("run", out, *options), cwd=out.parent, env=compiled(out)))


def record_of(out: Path, host: Host) -> dict[str, Any]:
    """What run.json says of a host: rank, name, pids by role as that host knows them. Ray says who gets which rank."""
    records = json.loads((out / "run.json").read_text())["hosts"]
    return next(record for record in records if record["address"] == host.address)


def steps_done(out: Path) -> int:
    with contextlib.suppress(OSError):
        return len((out / "steps.jsonl").read_text().splitlines())
    return 0


def wait_until(process: subprocess.Popen[str], what: str, is_so: Callable[[], bool]) -> None:
    """While ``process`` runs."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert process.poll() is None, f"ended before {what}: {process.communicate()}"
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        threading.Event().wait(0.02)


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    wait_until(process, f"step {step}", lambda: steps_done(out) >= step)


def pools(hosts: Hosts) -> dict[str, set[str]]:
    """What lies in each host's /dev/shm."""
    return {host.name: {name for name in host.shared_memory() if not name.endswith(".lock")} for host in hosts}

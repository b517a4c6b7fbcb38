"""`shmstage launch --local-cluster`: several raylets on this machine, everything real; what dies is started anew."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import finish, run_json, start

from shmstage.errors import MissingExtraError, SettingsError
from shmstage.launch import cluster
from shmstage.launch.run_directory import newest_checkpoint

OPTIONS = (
    "--steps",
    "6",
    "--checkpoint-every",
    "2",
    "--boundary",
    "staged_before_update",
    "--restart-backoff-s",
    "0.1",
)
LOCAL = ("launch", "--local-cluster", "--hosts", "2")
DEADLINE_S = 200.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("launched") / "out"
    return run_json(*LOCAL, *OPTIONS, "--out", str(out), cwd=out.parent)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(process: subprocess.Popen[str], so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def hosts_of(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / "run.json").read_text())["hosts"]
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_hosts_train_what_one_does(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    alone = run_json("run", *OPTIONS, "--out", str(tmp_path / "out"), cwd=tmp_path)
    for name in ("digests", "denominators", "trajectories", "initial_param_digest", "steps"):
        assert undisturbed[name] == alone[name], name
    assert undisturbed["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    assert undisturbed["hosts"] == 2
    assert undisturbed["orchestrator_bytes_per_trajectory"] <= 256
    assert undisturbed["leaked_pools"] == 0
    assert set(undisturbed["restarts"].values()) == {0}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_status_and_gc_know_a_run_of_several_hosts(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    status = run_json("status", undisturbed["out"], cwd=tmp_path)["runs"][0]
    assert status["verdict"]["state"] == "finished"
    assert run_json("gc", undisturbed["out"], "--dry-run", cwd=tmp_path)["removed"] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", ["trainer", "agent", "host"])
def test_a_death_is_named_and_changes_nothing_in_the_result(
    undisturbed: dict[str, Any], tmp_path: Path, role: str
) -> None:
    out = tmp_path / "out"
    process = start(*LOCAL, *OPTIONS, "--out", str(out), "--json", cwd=tmp_path)
    try:
        wait_until(process, lambda: lines_in(out / "steps.jsonl") >= 3)
        hosts = hosts_of(out)
        # not the one that was started first: the launcher itself is attached to it
        named = max(hosts, key=lambda host: parent_of(host["pids"]["agent"])) if role == "host" else hosts[1]
        pid = parent_of(named["pids"]["agent"]) if role == "host" else named["pids"][role]
        os.kill(pid, signal.SIGKILL)
    finally:
        code, printed, err = finish(process)
    assert code == 0, err
    summary = json.loads(printed)  # one object: nothing of Ray's is on stdout
    assert summary["param_digest"] == undisturbed["param_digest"]
    assert summary["digests"] == undisturbed["digests"]
    assert summary["restarts"] == {**undisturbed["restarts"], role: 1}
    assert summary["leaked_pools"] == 0
    said = next(line for line in err.splitlines() if "restarting all from the last checkpoint, 1 of 3" in line)
    assert said.startswith(named["name"])
    assert role == "host" or f"the {role} (pid {pid}) " in said


LIVE_SOURCE = """
from shmstage.demo.source import make_source


class Live:
    replayable = False

    def __init__(self, groups):
        self._groups = groups

    def groups(self, cursor):
        yield from self._groups[cursor:]

    def shard(self, index, count):
        return Live(self._groups[index::count])


def make(settings):
    return Live(list(make_source({}).groups(0)))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_live_source_goes_on_from_the_journal_when_its_store_was_killed(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "live_source.py").write_text(LIVE_SOURCE)
    out = tmp_path / "out"
    process = start(*LOCAL, *OPTIONS, "--source", "live_source:make", "--out", str(out), "--json", cwd=tmp_path)
    try:
        wait_until(process, lambda: lines_in(out / "steps.jsonl") >= 3)
        os.kill(hosts_of(out)[1]["pids"]["store"], signal.SIGKILL)
    finally:
        code, printed, err = finish(process)
    assert code == 0, err
    summary = json.loads(printed)
    for name in ("param_digest", "digests", "denominators", "trajectories"):
        assert summary[name] == undisturbed[name], name
    assert summary["restarts"] == {**undisturbed["restarts"], "store": 1}
    assert summary["leaked_pools"] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_death_that_is_one_too_many_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(*LOCAL, *OPTIONS, "--out", str(out), "--max-restarts", "0", "--json", cwd=tmp_path)
    try:
        wait_until(process, lambda: lines_in(out / "steps.jsonl") >= 1)
        hosts = hosts_of(out)
        os.kill(hosts[1]["pids"]["store"], signal.SIGKILL)
    finally:
        code, printed, _ = finish(process)
    assert code == 6
    told = json.loads(printed)["error"]
    assert told["kind"] == "PeerLostError"
    assert f"the store (pid {hosts[1]['pids']['store']})" in told["text"] and told["text"].startswith("host 1 (")
    assert [pid for host in hosts for pid in host["pids"].values() if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_launch_ends_in_good_order_and_can_be_resumed(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start(*LOCAL, *OPTIONS, "--out", str(out), cwd=tmp_path)
    try:
        wait_until(process, lambda: lines_in(out / "steps.jsonl") >= 3)
        process.send_signal(signal.SIGINT)
    finally:
        code, _, err = finish(process)
    assert code == 130, err
    saved = newest_checkpoint(out)
    again = f"`shmstage launch --local-cluster --hosts 2 --resume {out}` goes on"
    assert f"StoppedError: stopped by SIGINT; saved up to step {saved}; {again}" in err
    resumed = run_json(*LOCAL, *OPTIONS, "--out", str(out), "--resume", cwd=tmp_path)
    assert resumed["param_digest"] == undisturbed["param_digest"]
    assert resumed["leaked_pools"] == 0


def test_run_on_one_host_imports_no_ray() -> None:
    code = (
        "import sys, shmstage.launch.run_command, shmstage.launch.single_host, shmstage.launch.launch_command\n"
        "import shmstage.launch.multi_host\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'ray']\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_without_ray_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'shmstage\[ray\]'"), cluster.cluster(None, 2):
        pass


def test_where_to_launch_has_to_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, _, err = finish(start("launch", "--steps", "1", cwd=tmp_path))
    assert (code, err.count("\n")) == (2, 1)
    assert "--local-cluster" in err
    assert finish(start("launch", "--local-cluster", "--hosts", "0", cwd=tmp_path))[0] == 2
    assert not list(tmp_path.iterdir())


class NodesThatTakeSignals:
    """Ray's ``cluster_utils.Cluster``, as far as its nodes take SIGTERM for themselves; ``breaks``: none can start."""

    address = "127.0.0.1:1"
    breaks = False

    def __init__(self, **options: Any) -> None:
        self.nodes = 0

    def add_node(self, **options: Any) -> None:
        if self.breaks:
            raise ValueError("the object store is larger than /dev/shm")
        self.nodes += 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def shutdown(self) -> None:
        self.nodes = 0


@pytest.fixture
def ray_double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[NodesThatTakeSignals]:
    double = types.ModuleType("ray.cluster_utils")
    double.Cluster = NodesThatTakeSignals  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", double)
    monkeypatch.setattr("tempfile.mkdtemp", lambda **options: str(tmp_path / "ray"))
    (tmp_path / "ray").mkdir()
    return NodesThatTakeSignals


def test_a_raylet_that_is_started_does_not_take_the_launchers_signals(ray_double: type[NodesThatTakeSignals]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        nodes = cluster._LocalNodes(2)
        nodes.add()
        assert signal.getsignal(signal.SIGTERM) is before
        nodes.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_local_cluster_that_cannot_start_says_why_and_leaves_nothing(
    ray_double: type[NodesThatTakeSignals], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_double, "breaks", True)
    with pytest.raises(SettingsError, match=r"larger than /dev/shm; .* lower --hosts"):
        cluster._LocalNodes(2)
    assert not (tmp_path / "ray").exists()


@pytest.mark.slow
def test_a_launch_told_to_stop_while_its_raylets_start_ends_in_order(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(*LOCAL, *OPTIONS, "--out", str(out), cwd=tmp_path)
    found: list[str] = []

    def starting() -> bool:
        """A process of Ray's is there, and says in which directory."""
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                found.extend(re.findall(r"--log_dir=(/tmp/ray-\w+)/", Path(f"/proc/{pid}/cmdline").read_text()))
        return bool(found)

    wait_until(process, starting)
    process.send_signal(signal.SIGTERM)
    directory = found[0]
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700, "others could reach the sockets of the raylets"
    code, _, errors = finish(process)
    assert code == 130, errors
    assert not os.path.exists(directory)
    assert "stopped by SIGTERM" in errors

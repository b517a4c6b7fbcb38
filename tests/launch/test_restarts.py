"""kill -9 with real processes: what died is started again, and the outcome is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    finish,
    is_running,
    kill_role,
    living_pid,
    run_json,
    start,
    wait_for_step,
    wait_until,
    wait_until_gone,
)

from shmstage.operate.run_status import status_of

pytestmark = pytest.mark.slow

EQUAL = (
    "param_digest", "initial_param_digest", "first_step", "steps", "digests", "denominators", "losses", "trajectories",
)  # fmt: skip
SMALL = ("--rows", "2", "--microbatches-per-step", "2", "--weight-sync", "async", "--restart-backoff-s", "0.05")
DIES = "import os, signal\ndef make(settings): os.kill(os.getpid(), signal.SIGKILL)\n"


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("boundary", ["staged_before_update", "serial"])
def test_kills_of_both_change_nothing_of_the_outcome(boundary: str, tmp_path: Path) -> None:
    common = ("run", *SMALL, "--steps", "9", "--checkpoint-every", "2", "--boundary", boundary)
    whole = run_json(*common, "--out", "whole", cwd=tmp_path)
    out = tmp_path / "killed"
    process = start(*common, "--out", "killed", "--json", cwd=tmp_path)
    kill_role(process, out, "trainer")  # before it has answered
    wait_for_step(process, 3)
    kill_role(process, out, "trainer")
    wait_for_step(process, 5)
    kill_role(process, out, "orchestrator")
    code, stdout, err = finish(process)
    assert code == 0, err
    summary = json.loads(stdout)
    for key in EQUAL:
        assert summary[key] == whole[key], key
    assert summary["restarts"] == {"trainer": 2, "orchestrator": 1}
    assert summary["leaked_pools"] == 0
    assert [line["step"] for line in lines_of(out)] == list(range(1, 10))
    attempts = [line["attempt"] for line in lines_of(out)]
    assert attempts == sorted(attempts)
    assert attempts[-1] == 3  # the first kill came before anything was begun
    record = json.loads((out / "run.json").read_text())
    assert (record["epoch"], record["restarts"]) == (2, summary["restarts"])


def test_both_killed_at_once_before_anything_is_durable_begin_again(tmp_path: Path) -> None:
    common = ("run", *SMALL, "--steps", "2", "--boundary", "staged_before_update")
    whole = run_json(*common, "--out", "whole", cwd=tmp_path)
    process = start(*common, "--out", "killed", "--json", cwd=tmp_path)
    for role in ("trainer", "orchestrator"):
        os.kill(living_pid(tmp_path / "killed", role), signal.SIGKILL)
    code, stdout, err = finish(process)
    assert code == 0, err
    summary = json.loads(stdout)
    for key in EQUAL:
        assert summary[key] == whole[key], key
    assert summary["restarts"] == {"trainer": 1, "orchestrator": 1}


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_restarts_are_bounded_and_the_last_death_is_told_in_one_line(role: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("run", *SMALL, "--steps", "10000", "--max-restarts", "1", "--out", "out", "--json", cwd=tmp_path)
    wait_for_step(process, 2)
    kill_role(process, out, role)
    other = living_pid(out, "orchestrator" if role == "trainer" else "trainer")
    wait_for_step(process, 3)
    last = living_pid(out, role)
    os.kill(last, signal.SIGKILL)
    code, stdout, err = finish(process)
    assert code == 6
    said = err.strip().splitlines()[-1]
    assert said == (
        f"PeerLostError: the {role} (pid {last}) was killed by signal 9, by hand or by the kernel because memory ran "
        f"out; see {out}/{role}.log; restarted 1 time in vain; raise max_restarts if another try could help"
    )
    assert json.loads(stdout)["error"] == {
        "kind": "PeerLostError", "text": said.removeprefix("PeerLostError: "), "exit_code": 6,
    }  # fmt: skip
    verdict = status_of(str(out)).verdict
    assert (verdict.state, said in verdict.text) == ("failed", True)
    wait_until_gone(other)


@pytest.mark.parametrize(("role", "plugin"), [("trainer", "--engine"), ("orchestrator", "--source")])
def test_a_child_that_dies_at_every_start_ends_the_run(role: str, plugin: str, tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DIES)
    code, _, err = finish(start("run", *SMALL, plugin, "dying:make", "--out", "out", cwd=tmp_path))
    assert code == 6, err
    told = [line for line in err.splitlines() if line.startswith(f"{role} (pid ")]
    assert [line.partition("; ")[2] for line in told] == [f"restarting, {number} of 3" for number in (1, 2, 3)]
    assert "restarted 3 times in vain" in err.splitlines()[-1]
    assert f"{role}.log" in err.splitlines()[-1]


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_a_signal_during_the_back_off_stops_cleanly(role: str, tmp_path: Path) -> None:
    arguments = ("run", *SMALL, "--steps", "10000", "--restart-backoff-s", "600", "--out", "out")
    process = start(*arguments, cwd=tmp_path)
    wait_for_step(process, 2)
    other = living_pid(tmp_path / "out", "orchestrator" if role == "trainer" else "trainer")
    kill_role(process, tmp_path / "out", role)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert err.strip().splitlines()[-1].startswith("StoppedError: stopped by SIGINT")
    assert not is_running(other)


def test_a_signal_while_a_child_is_started_again_stops_cleanly(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("run", *SMALL, "--steps", "10000", "--out", "out", cwd=tmp_path)
    wait_for_step(process, 2)
    kill_role(process, out, "trainer")
    again = living_pid(out, "trainer")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert not is_running(again)


def test_a_run_that_is_stopped_after_a_restart_can_be_resumed(tmp_path: Path) -> None:
    common = ("run", *SMALL, "--checkpoint-every", "2", "--boundary", "staged_before_update")
    whole = run_json(*common, "--steps", "30", "--out", "whole", cwd=tmp_path)
    process = start(*common, "--steps", "30", "--out", "parts", cwd=tmp_path)
    wait_for_step(process, 2)
    kill_role(process, tmp_path / "parts", "trainer")
    wait_for_step(process, 4)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 130
    parts = run_json("run", "--resume", "parts", cwd=tmp_path)
    for key in ("param_digest", "steps", "digests", "denominators", "losses", "trajectories"):
        assert parts[key] == whole[key], key
    assert parts["restarts"] == {"trainer": 0, "orchestrator": 0}


def test_a_failure_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text("def make(settings): raise RuntimeError('no devices')\n")
    code, _, err = finish(start("run", *SMALL, "--engine", "raising:make", "--out", "out", cwd=tmp_path))
    assert code in (2, 5)
    assert "no devices" in err
    assert "restarting" not in err


def test_settings_longer_than_one_argument_may_be_reach_the_children(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "from shmstage.demo.source import make_source\n"
        "def make(settings):\n    assert len(settings['text']) == 300_000\n    return make_source({})\n"
    )
    (tmp_path / "run.toml").write_text(f'steps = 1\n[source]\nfactory = "long:make"\ntext = "{"x" * 300_000}"\n')
    assert run_json("run", *SMALL, "--config", "run.toml", "--out", "out", cwd=tmp_path)["steps"] == 1
    assert (tmp_path / "out" / "run.json").stat().st_mode & 0o777 == 0o600


KILLS_ITS_PEER = '''
import json, os, pathlib, signal
from shmstage.demo.engine import make_engine

class Engine:
    def __init__(self, settings):
        self.inner = make_engine(settings)
        self.run_file = pathlib.Path(settings["checkpoint_dir"]).parent / "run.json"

    def save(self, step, metadata):
        if step == 2 and not pathlib.Path("killed-once").exists():
            pathlib.Path("killed-once").touch()
            os.kill(json.loads(self.run_file.read_text())["pids"]["orchestrator"], signal.SIGKILL)
        return self.inner.save(step, metadata)

    def __getattr__(self, name):
        return getattr(self.inner, name)

def make(settings):
    return Engine(settings)
'''


def test_a_step_whose_checkpoint_is_durable_and_whose_line_is_not_written_is_trained_again(tmp_path: Path) -> None:
    (tmp_path / "killing.py").write_text(KILLS_ITS_PEER)
    common = ("run", *SMALL, "--steps", "4", "--checkpoint-every", "1", "--boundary", "staged_before_update")
    whole = run_json(*common, "--out", "whole", cwd=tmp_path)
    # the orchestrator dies when it has asked for checkpoint 2; the trainer goes on and writes it
    summary = run_json(*common, "--engine", "killing:make", "--out", "killed", cwd=tmp_path)
    assert summary["restarts"] == {"trainer": 0, "orchestrator": 1}
    for key in EQUAL:
        assert summary[key] == whole[key], key
    attempts = [(line["step"], line["attempt"]) for line in lines_of(tmp_path / "killed")]
    assert attempts[1:] == [(2, 2), (3, 2), (4, 2)]


LIVE = '''
"""Gives the demo's groups, each once for good: what was given is gone, as from a queue. Waits at the gate."""
import pathlib, time
from shmstage.demo.source import make_source

AT_THE_GATE = 40

class Live:
    replayable = False

    def __init__(self, where):
        self.where = pathlib.Path(where)

    def groups(self, cursor):
        given = self.where / "given"
        for group in make_source({}).groups(len(given.read_text().split()) if given.exists() else 0):
            with given.open("a") as file:
                file.write(group.group_id.replace(" ", "_") + "\\n")
            yield group
            if len(given.read_text().split()) == AT_THE_GATE:
                (self.where / "waiting").touch()
                while not (self.where / "gate").exists():
                    time.sleep(0.02)

def make(settings):
    return Live(settings["where"])
'''


def test_a_live_source_gives_each_group_once_whoever_is_killed(tmp_path: Path) -> None:
    """P4"""
    (tmp_path / "live.py").write_text(LIVE)
    for name in ("whole", "killed"):
        (tmp_path / f"for-{name}").mkdir()
        (tmp_path / f"{name}.toml").write_text(f'[source]\nfactory = "live:make"\nwhere = "for-{name}"\n')
    common = ("run", *SMALL, "--checkpoint-every", "3", "--boundary", "staged_before_update")
    (tmp_path / "for-whole" / "gate").touch()
    whole = run_json(*common, "--config", "whole.toml", "--out", "whole", cwd=tmp_path)
    out = tmp_path / "killed"
    process = start(*common, "--config", "killed.toml", "--out", "killed", "--json", cwd=tmp_path)
    wait_for_step(process, 2)
    kill_role(process, out, "trainer")
    wait_until(lambda: (tmp_path / "for-killed" / "waiting").exists())
    kill_role(process, out, "orchestrator")
    (tmp_path / "for-killed" / "gate").touch()
    kill_role(process, out, "trainer")
    code, stdout, err = finish(process)
    assert code == 0, err
    summary = json.loads(stdout)
    for key in EQUAL:
        assert summary[key] == whole[key], key
    given = (tmp_path / "for-killed" / "given").read_text().split()
    assert len(given) == len(set(given)) > 40
    assert summary["restarts"] == {"trainer": 2, "orchestrator": 1}

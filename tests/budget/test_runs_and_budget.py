"""The budget and real runs: refused before anything is allocated, and forecast beside use."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from command_line import finish, pids, run_json, start, wait_for_step, wait_until_gone
from test_budget_command import run_real

from shmstage.budget import check
from shmstage.memory.usage import process_use
from shmstage.settings import Settings

pytestmark = pytest.mark.slow



def test_a_run_far_beyond_the_machine_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """S6: one clear failure, exit 2; no OUT, no runs directory, no pool, no child."""
    code, out, err = finish(start("run", "--rows", "65536", "--tokens", "65536", cwd=tmp_path))
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if "Error" in line]
    assert line.startswith("BudgetError: slots = 3 + aux_slots = 1 of rows = 65536 x tokens = 65536 take 103079215104")
    assert " leaves " in line
    assert "; use rows = " in line
    assert not list(tmp_path.iterdir())


def test_the_refusal_is_one_object_for_who_reads_json(tmp_path: Path) -> None:
    code, out, _ = finish(start("run", "--rows", "65536", "--tokens", "65536", "--json", cwd=tmp_path))
    assert code == 2
    assert json.loads(out)["error"]["kind"] == "BudgetError"


def test_an_existing_out_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, _, _ = finish(start("run", "--rows", "65536", "--tokens", "65536", "--out", "out", cwd=tmp_path))
    assert code == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".lock"}


SOURCE = """
    import numpy as np
    from shmstage.packing.trajectory import Group, Trajectory

    class Source:
        replayable = True
        def groups(self, cursor):
            ones = np.ones(8, np.float32)
            yield Group("g", 0, (Trajectory(
                trajectory_id="t", group_id="g", tokens=np.arange(8, dtype=np.int32), loss_mask=ones, advantages=ones,
                old_logprobs=ones, returns=ones, old_values=ones,
            ),))

    def make(settings):
        return Source()
"""


def test_fields_that_only_the_source_knows_are_checked_by_the_orchestrator(tmp_path: Path) -> None:
    """S20: between what is certain and what turns out, still before the pool, with the exact layout."""
    (tmp_path / "wide.py").write_text(textwrap.dedent(SOURCE))
    # 4 slots of 64 x 4096: six words are 25.2 MB, eight are 33.6 MB
    done = run_real(
        "run", "--rows", "64", "--tokens", "4096", "--source", "wide:make", "--out", "out", cwd=tmp_path,
        prelude="mount -t tmpfs -o size=28m none /dev/shm",
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "Error" in line]
    assert "take 8388608 bytes (8.39 MB) each, in all 33562624 bytes (33.6 MB) of shm memory" in line
    assert not (tmp_path / "out").exists()


def test_the_gate_counts_a_bundle_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_bundle_facts import make_bundle

    seen = []
    monkeypatch.setattr(check, "check_run", seen.append)
    path = make_bundle(tmp_path / "b")
    check.check_before_start(Settings(bundle=path, eval_bundle=path, reference_logps=True))
    shards = sum(file.stat().st_size for file in path.glob("shard-*"))
    assert seen[0].held_input_nbytes == seen[0].evaluation_nbytes == shards
    assert (seen[0].fields.layers, seen[0].fields.top_k, seen[0].evaluation.layers) == (5, 3, 5)
    assert seen[0].fields.late == ("ref_per_token_logps",)
    # who cannot read it says so later, in full
    check.check_before_start(Settings(bundle=tmp_path / "nowhere"))
    assert seen[1].held_input_nbytes == 0


def test_live_puts_forecast_and_use_of_a_run_side_by_side(tmp_path: Path) -> None:
    process = start("run", "--steps", "100000", "--weight-sync", "async", "--out", "out", cwd=tmp_path)
    try:
        wait_for_step(process, 2)
        found = run_json("budget", "--live", "out", "--param-bytes", "1MB", cwd=tmp_path)
        rows = {row["what"]: row for row in found["compare"]}
        assert rows["pool"]["used"] == rows["pool"]["forecast"] > 0
        assert rows["weights pool"]["used"] > 0
        # parameters, and the writer of the checkpoint, are private memory here
        assert rows["private memory"]["checkpoint"] - rows["private memory"]["forecast"] == (1 + 2) * 3 * 10**6
        assert rows["pool"]["checkpoint"] == rows["pool"]["forecast"]
        untold = {row["what"]: row for row in run_json("budget", "--live", "out", cwd=tmp_path)["compare"]}
        assert untold["weights pool"]["forecast"] == untold["weights pool"]["used"] == rows["weights pool"]["used"]
        roles = {each["role"]: each for each in found["processes"]}
        assert roles.keys() == {"launcher", "orchestrator", "trainer"}
        assert all(each["alive"] for each in roles.values())
        assert {role: each["pid"] for role, each in roles.items()} == pids(tmp_path / "out")
        # the trainer has imported jax, the launcher has not
        assert roles["trainer"]["private"] > 100 << 20 > roles["launcher"]["private"] > 1 << 20
        assert roles["trainer"]["pools"] > 0 == roles["launcher"]["pools"]
        assert rows["all of it"]["used"] == (
            rows["pool"]["used"] + rows["weights pool"]["used"] + rows["private memory"]["used"]
        )
        assert {pool["owner"] for pool in found["pools"]} == {"orchestrator", "trainer"}
        people = run_real("budget", "--live", "out", cwd=tmp_path)
        assert people.returncode == 0
        assert "forecast" in people.stdout
        assert "at a checkpoint" in people.stdout
        assert "trainer, without pools" in people.stdout
        who = pids(tmp_path / "out")
        for pid in who.values():
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(*(pid for role, pid in who.items() if role != "launcher"))
        process.wait(60)
        dead = run_json("budget", "--live", "out", cwd=tmp_path)
        assert not any(each["alive"] for each in dead["processes"])
        assert {row["what"]: row["used"] for row in dead["compare"]}["private memory"] == 0
        assert {pool["owner"] for pool in dead["pools"]} == {"orchestrator", "trainer"}  # they are still there
        assert finish(start("gc", cwd=tmp_path))[0] == 0
        gone = run_json("budget", "--live", "out", cwd=tmp_path)
        assert gone["pools"] == []
        rows = {row["what"]: row for row in gone["compare"]}
        assert rows["weights pool"]["forecast"] is None is rows["all of it"]["forecast"]  # nobody knows, so no 0
        assert "unknown" in run_real("budget", "--live", "out", cwd=tmp_path).stdout
    finally:
        process.kill()
        finish(process)


def test_live_of_a_run_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    code, _, err = finish(start("budget", "--live", "nobody", cwd=tmp_path))
    assert code == 2
    assert "no run 'nobody'" in err


@pytest.mark.parametrize("text", ["{", '{"run": "r", "pids": {}}', '{"run": "r", "pids": {}, "settings": [1]}'])
def test_live_of_a_corrupt_record_has_a_remedy_for_who_reads(text: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(text)
    code, _, err = finish(start("budget", "--live", "out", cwd=tmp_path))
    assert code == 2
    assert "restore it, or name another run" in err
    assert "--out" not in err


def test_live_calls_a_source_journaled_only_where_there_is_a_journal(tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    record = {"run": f"live-{os.getpid()}", "pids": {}, "settings": {"source": "mine:make", "out": str(out)}}
    (out / "run.json").write_text(json.dumps(record))

    def found() -> tuple[bool, bool]:
        live = run_json("budget", "--live", "out", cwd=tmp_path)
        return "journal" in live["amounts"], any("cannot be replayed" in text for text in live["assumed"])

    assert found() == (True, True)  # before the first step it is not known
    (out / "steps.jsonl").touch()
    assert found() == (False, False)
    (out / "journal").mkdir()
    assert found() == (True, False)


def test_a_reused_pid_is_nobody_of_the_run() -> None:
    """S44: a process that started after the run's file was written is another one under the same number."""
    began = Path(f"/proc/{os.getpid()}").stat().st_mtime
    use = process_use(os.getpid(), started_before_s=began + 10)
    assert use is not None
    assert use.private_nbytes == use.pss_nbytes > 1 << 20
    assert process_use(os.getpid(), started_before_s=began - 3600) is None

"""One run from one command: real processes, real shared memory, real sockets, real JAX."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from command_line import finish, is_running, pids, run_json, start, wait_for_step, wait_until_gone

from shmstage.launch.run_directory import newest_checkpoint

pytestmark = pytest.mark.slow
STAGED = ("--pipeline-step-boundary", "--stage-next-microbatch")


def shm_of_ours() -> list[str]:
    return [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith("shmstage.")]


def test_a_staged_run_trains_every_step_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """S5"""
    summary = run_json("run", "--steps", "4", *STAGED, "--out", "out", cwd=tmp_path)
    assert (summary["steps"], summary["mode"], summary["staged_boundaries"]) == (4, "staged_before_update", 3)
    assert summary["leaked_pools"] == 0
    assert summary["param_digest"] != summary["initial_param_digest"]
    assert len(summary["digests"]) == 4
    assert all(len(step) == 3 for step in summary["digests"])
    assert all(denominator > 0 for denominator in summary["denominators"])
    assert summary["boundary_idle_s"]["max"] >= summary["boundary_idle_s"]["median"] >= 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["staged"] for line in lines] == [False, True, True, True]
    assert set(pids(tmp_path / "out")) == {"launcher", "orchestrator", "trainer"}


def write_questions(path: Path, count: int) -> None:
    """Texts tokenised by bytes with made-up advantages: a JSONL file that is not ours."""
    with path.open("w") as file:
        for i in range(count):
            text = f"What is {i} times {i + 3}?" + " Think first." * (i % 5) + f" {i * (i + 3)}"
            tokens = list(text.encode())
            record = {
                "tokens": tokens, "loss_mask": [0] * 12 + [1] * (len(tokens) - 12), "advantages": (-1.0) ** i,
                "old_logprobs": [-2.0] * len(tokens),
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def test_one_pass_over_an_imported_bundle_trains_every_trajectory_exactly_once(tmp_path: Path) -> None:
    """P4"""
    write_questions(tmp_path / "q.jsonl", 150)
    imported = run_json("bundle", "import", "q.jsonl", "bundle", cwd=tmp_path)
    assert imported["trajectories"] == 150
    for mode in ("serial", "staged_before_update"):
        options = ("--passes", "1", "--bundle", "bundle", "--boundary", mode, "--out", mode)
        summary = run_json("run", *options, cwd=tmp_path)
        counted: Counter[str] = Counter()
        for line in (tmp_path / mode / "steps.jsonl").read_text().splitlines():
            counted.update(json.loads(line)["trajectory_ids"])
        assert len(counted) == 150
        assert set(counted.values()) == {1}
        assert summary["trajectories"] == {"distinct": 150, "trained": 150, "min_times": 1, "max_times": 1}


def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    common = ("--checkpoint-every", "2", *STAGED)
    whole = run_json("run", "--steps", "5", *common, "--out", "whole", cwd=tmp_path)
    run_json("run", "--steps", "3", *common, "--out", "parts", cwd=tmp_path)
    code, _, err = finish(start("run", "--steps", "5", *common, "--out", "parts", cwd=tmp_path))
    assert code == 2
    assert "add --resume" in err
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "3")  # as if it had been killed after step 3
    parts = run_json("run", "--steps", "5", "--resume", "parts", cwd=tmp_path)
    for key in ("param_digest", "digests", "denominators", "losses", "steps"):
        assert parts[key] == whole[key], key
    attempts = [json.loads(line)["attempt"] for line in (tmp_path / "parts" / "steps.jsonl").read_text().splitlines()]
    assert attempts == [1, 1, 2, 2, 2]


def test_a_run_whose_launcher_was_killed_can_be_resumed_at_once(tmp_path: Path) -> None:
    common = ("--checkpoint-every", "1", *STAGED)
    whole = run_json("run", "--steps", "40", *common, "--out", "whole", cwd=tmp_path)
    process = start("run", "--steps", "40", *common, "--out", "parts", cwd=tmp_path)
    wait_for_step(process, 2)
    process.kill()
    finish(process)
    parts = run_json("run", "--resume", "parts", cwd=tmp_path)  # its children are still at it
    for key in ("param_digest", "digests", "denominators", "losses", "steps"):
        assert parts[key] == whole[key], key


def test_children_of_a_killed_launcher_stop_by_themselves(tmp_path: Path) -> None:
    process = start("run", "--steps", "10000", *STAGED, "--out", "out", cwd=tmp_path)
    wait_for_step(process, 2)
    who = pids(tmp_path / "out")
    process.kill()
    finish(process)
    wait_until_gone(who["orchestrator"], who["trainer"])
    calls = [json.loads(line) for line in (tmp_path / "out" / "trainer_calls.jsonl").read_text().splitlines()]
    assert calls[-1]["command"] == "shutdown"  # they stopped as on Ctrl-C, a deferred update was applied
    deferred = sum(bool(call.get("defer_update")) for call in calls)
    assert sum(call["command"] == "apply_deferred_update" for call in calls) == deferred
    assert finish(start("gc", cwd=tmp_path))[0] == 0  # the launcher's own lock


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_in_good_order(number: signal.Signals, tmp_path: Path) -> None:
    process = start("run", "--steps", "10000", *STAGED, "--out", "out", "--json", cwd=tmp_path)
    wait_for_step(process, 2)
    who = pids(tmp_path / "out")
    process.send_signal(number)
    code, printed, err = finish(process)
    assert code == 130, err
    assert not any(is_running(pid) for pid in who.values())
    out = tmp_path / "out"
    again = f"saved up to step {newest_checkpoint(out)}; `shmstage run --resume {out}` goes on"
    assert err.splitlines()[-1] == f"StoppedError: stopped by {number.name}; {again}"
    error = json.loads(printed)["error"]
    assert (error["kind"], error["text"]) == ("StoppedError", f"stopped by {number.name}; {again}")


def test_a_second_run_of_the_same_id_is_refused_and_the_first_is_unharmed(tmp_path: Path) -> None:
    """S54"""
    first = start("run", "--run", "same", "--steps", "100000", "--out", "one", cwd=tmp_path)
    wait_for_step(first, 1)
    code, _, err = finish(start("run", "--run", "same", "--out", "two", cwd=tmp_path))
    assert code == 2
    assert "EndpointBusyError" in err
    assert "choose another run id" in err
    reached = len((tmp_path / "one" / "steps.jsonl").read_text().splitlines())
    wait_for_step(first, reached + 1)
    first.send_signal(signal.SIGINT)
    assert finish(first)[0] == 130


def test_a_plugin_that_exits_is_a_failed_run_not_a_success(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\ndef make(settings): sys.exit(0)\n")
    code, out, err = finish(start("run", "--source", "leaving:make", "--out", "out", "--json", cwd=tmp_path))
    assert code == 5
    assert "RunFailedError: SystemExit: 0; traceback in" in err
    assert "Traceback" not in err
    assert len(out.splitlines()) == 1
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("RunFailedError", 5)
    assert error["text"].startswith("SystemExit: 0; traceback in")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bundle", "nowhere"), "BundleError: "),
        (("--engine", "no_such_module:make"), "PluginError: "),
        (("--source", "json:nothing"), "PluginError: "),
        (("--rows", "65536", "--tokens", "65536"), "BudgetError: "),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_left(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    code, out, err = finish(start("run", *arguments, "--out", "out", cwd=tmp_path))
    assert code == 2, err
    assert out == ""
    errors = [line for line in err.splitlines() if "Error" in line]
    assert len(errors) == 1
    assert errors[0].startswith(said)
    assert "Traceback" not in err

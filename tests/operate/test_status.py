"""status reads a run from outside: one that works, hangs, was killed or is over, and OUT directories of rubbish."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from command_line import finish, pids, run_json, start, wait_for_step, wait_until
from rich.console import Console

from shmstage.errors import SettingsError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.inspect import PoolSnapshot, ProcessSnapshot, process_state
from shmstage.memory.layout import Layout
from shmstage.memory.names import SHM_DIR, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.operate import gc_command, run_status, run_verdict
from shmstage.operate.run_status import RunStatus, all_statuses, launcher_lives, locate, processes_of, status_of
from shmstage.operate.run_verdict import judge
from shmstage.operate.status_command import as_json, main
from shmstage.operate.status_view import MAX_ROWS, format_seconds, run_view, runs_view, show
from shmstage.operate.step_tail import progress_of, read_progress
from shmstage.settings import DEFAULT_STEPS, Settings

RUN = f"status-test-{os.getpid()}"
LAYOUT = Layout.of({"tokens": ("int32", (2, 8))})
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def process(role: str, pid: int, alive: bool | None = True, state: str = "running", lock: str = "x") -> ProcessSnapshot:
    return ProcessSnapshot(role, pid, alive, state if alive else "", lock)


def three(launcher: bool | None, orchestrator: bool | None, trainer: bool | None) -> list[ProcessSnapshot]:
    return [
        process("launcher", 1, launcher, lock=""), process("orchestrator", 2, orchestrator),
        process("trainer", 3, trainer),
    ]  # fmt: skip


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "attempt": 1, "mode": "staged_before_update", "loss": 0.5, "tokens": 1000, "bytes": 4000,
        "step_s": 0.5, "boundary_idle_s": 0.002, "upload_s": 0.01, "exposed_s": None, "slot_wait_s": 0.0,
        "data_wait_s": 0.0, "staged": False, "not_staged_because": "late", "latch": {"level": "off", "reason": "why"},
        **more,
    }  # fmt: skip


def rendered(view: Any, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(view, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def pool() -> Iterator[Pool]:
    identity = ProcessIdentity.create(RUN, "producer")
    made = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, aux_slots=1, identity=identity)
    yield made
    made.close()
    identity.close()


# --- the verdict ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "more", "state"),
    [
        (three(True, True, True), {"has_steps": True}, "running"),
        (three(True, True, True), {}, "starting"),
        (three(None, True, True), {"has_steps": True}, "running"),
        (three(True, True, False), {"has_steps": True}, "restarting"),
        (three(True, False, False), {}, "starting"),
        (three(False, True, False), {}, "orphaned"),
        (three(False, False, False), {"finished": True}, "finished"),
        (three(False, False, False), {"failures": {"trainer": "EngineError: no"}}, "failed"),
        (three(False, False, False), {"failures": {"trainer": "StoppedError: by SIGINT"}}, "killed"),
        (three(False, False, False), {}, "killed"),
        ([process("launcher", 1, False, lock=""), process("trainer", 0, False, lock="")], {}, "ended"),
        ([process("producer", 5)], {}, "alive"),
        ([process("producer", 5, False)], {}, "killed"),
        ([process("producer", 5, None)], {}, "unclear"),
    ],
)
def test_the_first_word_says_how_the_run_is(known: list[ProcessSnapshot], more: dict[str, Any], state: str) -> None:
    assert judge(known, [], **more).state == state


def test_a_stopped_process_comes_before_everything_else_with_the_command_that_wakes_it() -> None:
    known = [*three(True, True, True)[:2], process("trainer", 3, state="stopped")]
    verdict = judge(known, [], has_steps=True)
    assert verdict.state == "stopped" and "the trainer (pid 3) is stopped" in verdict.text
    assert verdict.remedies == ("`kill -CONT 3` lets it go on",)


def test_a_stopped_child_of_a_dead_launcher_is_not_said_to_lose_nothing() -> None:
    known = [process("launcher", 1, alive=False), process("trainer", 3, state="stopped")]
    verdict = judge(known, [], checkpoint=0)
    assert verdict.state == "orphaned"
    assert verdict.text.endswith("the run will not go on, and what was trained after checkpoint 0 may be lost")


@pytest.mark.parametrize("record", ["", "{}", '{"settings": {"run"'])
def test_nothing_is_said_of_what_a_damaged_run_json_does_not_name(record: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(record)
    assert status_of(str(tmp_path)).verdict.state == "unclear"
    with pytest.raises(SettingsError, match="does not say which run it is; without RUN"):
        gc_command.main([str(tmp_path), "--dry-run"])


def test_a_pool_that_cannot_be_read_is_not_taken_for_a_run_that_ended() -> None:
    foreign = PoolSnapshot("shmstage.0.x.y", problem="belongs to user 7")
    assert judge([], [foreign]).text == "shmstage.0.x.y: belongs to user 7"
    assert judge([], [foreign]).state == "unclear"


def test_a_dead_run_names_what_is_left_and_how_to_go_on() -> None:
    dead = ProcessSnapshot("orchestrator", 2, False, "", "x")
    left = PoolSnapshot("shmstage.0.x.y", allocated_nbytes=5_000_000_000, owner=dead)
    verdict = judge(three(False, False, False), [left], out="/o", checkpoint=7)
    assert verdict.text == "the launcher and its children are dead; 1 pool of 5 GB and 2 locks left behind"
    assert verdict.remedies == (
        "`shmstage run --resume /o` goes on from checkpoint 7", "`shmstage gc` frees what is left",
    )  # fmt: skip


def test_a_child_without_a_lock_is_looked_for_by_its_command_line() -> None:
    found = {p.role: p for p in processes_of({"launcher": 1, "trainer": os.getpid(), "orchestrator": None}, [], False)}
    assert (found["trainer"].pid, found["trainer"].alive) == (os.getpid(), False)  # this is no trainer
    reader = process("weights reader", 9)
    known = processes_of({"launcher": 1, "trainer": 3}, [process("trainer", 3), reader], True)
    assert [(p.role, p.alive) for p in known] == [
        ("launcher", True), ("orchestrator", False), ("trainer", True), ("weights reader", True),
    ]  # fmt: skip


def test_children_in_another_pid_namespace_are_not_taken_for_dead() -> None:
    """S43: a launcher that lives and has no pid here is in another container."""
    known = processes_of({"launcher": 0x7FFFFFFF, "trainer": 0x7FFFFFFE, "orchestrator": None}, [], True)
    assert [p.alive for p in known] == [True, False, None]
    verdict = judge([known[0], process("orchestrator", 2), known[2]], [], has_steps=True)
    assert verdict.state == "running" and "another container" in verdict.text


def test_the_launcher_lives_as_long_as_it_holds_the_lock_in_out(tmp_path: Path) -> None:
    assert launcher_lives(tmp_path) is False
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert launcher_lives(tmp_path) is True
    assert launcher_lives(tmp_path) is False


# --- the last lines ---------------------------------------------------------------------------------------


def test_rates_are_of_the_last_lines_of_one_attempt() -> None:
    lines = [step_line(k, step_s=100.0) for k in (1, 2)] + [step_line(k, attempt=2) for k in (2, 3)]
    found = progress_of(lines, 3.0)
    assert found is not None and found.steps_measured == 2
    assert (found.steps_per_s, found.tokens_per_s, found.bytes_per_s) == (2.0, 2000.0, 8000.0)
    assert found.last["step"] == 3 and found.seconds_ago == 3.0
    assert progress_of([], 1.0) is None
    still = progress_of([step_line(1, step_s=0.0)], -1.0)
    assert still is not None and still.steps_per_s == 0.0 and still.seconds_ago is None


@pytest.mark.parametrize("long", [1, 50_000])
def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, long: int) -> None:
    path = tmp_path / "steps.jsonl"
    with path.open("w") as file:
        for k in range(1, 31):
            file.write(json.dumps(step_line(k, trajectory_ids="x" * long)) + "\n")
        file.write('{"step": 31, "att')
    found = read_progress(path)
    assert found is not None and (found.last["step"], found.steps_measured) == (30, 20)
    assert "trajectory_ids" not in found.last


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "[1]\n", "nonsense\n", '{"step": 1}\n', "\x00" * 100 + "\n"])
def test_a_file_that_holds_no_step_lines_gives_no_progress(tmp_path: Path, text: str) -> None:
    (tmp_path / "steps.jsonl").write_text(text)
    assert read_progress(tmp_path / "steps.jsonl") is None
    assert read_progress(tmp_path / "none") is None


# --- OUT directories --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"run.json": "nonsense"},
        {"run.json": "[]"},
        {"run.json": '{"settings": 3}'},
        {"run.json": '{"settings": {"run": 7, "steps": "x"}, "pids": [1], "epoch": "e", "restarts": 3}'},
        {"run.json": "\x00\xff"},
        {"run.json": '{"settings": {}}', "trainer.failure.json": "{", "steps.jsonl": "?"},
        {"run.json": '{"settings": {}}', "trainer.failure.json": "[]", "checkpoints": "a file"},
    ],
)
def test_rubbish_in_out_is_noted_not_raised(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    status = status_of(str(tmp_path))
    json.dumps(as_json(status))
    assert rendered(run_view(status))


def test_a_run_is_named_by_directory_id_or_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("alpha-1", "alpha-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps({"settings": {"run": name}}))
    assert locate("alpha-1") == ("alpha-1", Path("runs/alpha-1"))
    with pytest.raises(SettingsError, match="alpha-1, alpha-2"):
        locate("alpha")
    assert locate(RUN) == locate(RUN[:-1]) == (RUN, None)  # only shared memory knows it
    os.rename(Path(SHM_DIR, pool.name[1:]), spare := Path(SHM_DIR, new_name("elsewhere")))
    try:
        assert locate(RUN) == (RUN, None)  # only its lock is left
    finally:
        os.rename(spare, Path(SHM_DIR, pool.name[1:]))
    for nobody in ("", "nobody"):
        with pytest.raises(SettingsError, match="nor is it one in shared memory"):
            locate(nobody)


def test_what_run_json_does_not_say_is_what_a_run_would_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One default each, that of the settings; a bundle read n times has no number of steps of its own."""
    seen: list[float] = []

    def noting(*known: Any, grace_s: float, **more: Any) -> run_verdict.Verdict:
        seen.append(grace_s)
        return judge(*known, grace_s=grace_s, **more)

    monkeypatch.setattr(run_status, "judge", noting)
    for settings, steps in (({}, DEFAULT_STEPS), ({"passes": 2}, None), ({"passes": 2, "steps": 3}, 3)):
        (tmp_path / "run.json").write_text(json.dumps({"settings": {"run": "r", **settings}}))
        assert status_of(str(tmp_path)).steps == steps
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"run": "r", "stop_grace_s": 3}}))
    status_of(str(tmp_path))
    assert seen == [Settings().stop_grace_s] * 3 + [3.0]


def test_a_run_of_another_program_is_found_by_its_pool(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    (mine,) = [status for status in all_statuses() if status.run == RUN]
    assert mine.out is None and mine.verdict.state == "alive"
    assert mine.verdict.text == f"the producer (pid {os.getpid()}) is alive"
    assert main([RUN]) == 0
    assert f"producer  {os.getpid()}  alive" in capsys.readouterr().out


# --- the picture ------------------------------------------------------------------------------------------


def full_status(pool: Pool, tmp_path: Path) -> RunStatus:
    reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
    pool.acquire(LAYOUT, timeout_s=1).publish(step=4, index=1)
    pool.acquire(LAYOUT, timeout_s=1)
    pool.record_error("PeerLostError: the trainer is dead")
    pool.heartbeat(time.monotonic_ns())
    out = tmp_path / "a rather long directory name" / "that wraps on narrow terminals"
    out.mkdir(parents=True)
    settings = {"run": RUN, "steps": 40}
    (out / "run.json").write_text(json.dumps({"settings": settings, "epoch": 1, "restarts": {"trainer": 2}}))
    (out / "steps.jsonl").write_text(json.dumps(step_line(3)) + "\n")
    status = status_of(str(out))
    reader.close()
    return status


@pytest.mark.parametrize("width", [40, 60, 80, 130])
def test_everything_that_matters_is_on_any_terminal(pool: Pool, tmp_path: Path, width: int) -> None:
    status = full_status(pool, tmp_path)
    text = rendered(run_view(status), width)
    packed = "".join(text.split())
    for part in (
        f"run {RUN}", "step", "3 of 40", "2 steps/s", "idle 2 ms", "not staged: late", "off: why",
        "restarted 2 times", "writing", "published", "4.1", "2 aux", f"producer {os.getpid()} (alive)",
        "last error: PeerLostError: the trainer is dead", "heartbeat", "normal pages, NUMA first touch", pool.name[1:],
    ):  # fmt: skip
        assert "".join(part.split()) in packed, part
    unbroken = [f"  OUT {status.out}", *(f"  → {remedy}" for remedy in status.verdict.remedies)]
    for line in text.splitlines():
        assert len(line) <= width or line in unbroken  # what is copied is not broken
    assert set(unbroken) <= set(text.splitlines())


def test_slots_beyond_what_fits_are_counted_not_listed() -> None:
    identity = ProcessIdentity.create(RUN, "producer")
    many = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=100, identity=identity)
    try:
        held = [many.acquire(LAYOUT, timeout_s=1) for _ in range(40)]
        text = rendered(run_view(status_of(RUN)))
        assert text.count("writing") == MAX_ROWS == 32
        assert "not shown: 68 slots, of them 8 in use" in text
        assert len(held) == 40
    finally:
        many.close()
        identity.close()


@pytest.mark.parametrize("width", [40, 80])
def test_several_runs_get_a_paragraph_each(pool: Pool, tmp_path: Path, width: int) -> None:
    one = full_status(pool, tmp_path)
    text = rendered(runs_view([one, one]), width)
    assert "".join(text.split()).count("step3·2of3slotsinuse·20.5kBofsharedmemory") == 2
    assert text.count("· ended ·") == 2 and text.endswith("`shmstage status RUN` shows one of them in full\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.00364, "3.64 ms"), (0.0999, "0.0999 s"), (3.21, "3.21 s"), (99.4, "99.4 s"),
        (100, "1 min 40 s"), (3700, "61 min 40 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_times_have_two_units_at_most(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_loss_that_is_no_number_is_still_json(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"run": "nan"}}))
    (tmp_path / "steps.jsonl").write_text(json.dumps(step_line(1, loss=float("nan"))) + "\n")
    text = json.dumps(as_json(status_of(str(tmp_path))), allow_nan=False)
    assert json.loads(text)["progress"]["last"]["loss"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--watch", "0"], "0 is not between"), (["--watch", "x"], "is no number of seconds"),
        (["--json", "--watch"], "one of them"),
        (["nobody"], "no run 'nobody': there is no such directory, and no run in runs/ .*; nor is it one in shared"),
        (["--bogus"], "--help"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_error(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        main(arguments)


# --- real runs --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_works_and_one_that_hangs_are_seen_without_their_help(tmp_path: Path) -> None:
    """S50: who is stopped, who holds which slot and for how long can be read of a run that hangs."""
    out, run = tmp_path / "o", f"{RUN}-live"
    process = start("run", "--run", run, "--out", "o", "--steps", "500", "--boundary", "pipelined", cwd=tmp_path)
    try:
        wait_for_step(process, 2)
        check_working(tmp_path, run)
        check_hanging(out, pids(out)["trainer"])
        watch_once(tmp_path)
    finally:
        process.send_signal(signal.SIGINT)
        code, _, _ = finish(process)
    assert code == 130
    (over,) = run_json("status", "o", cwd=tmp_path)["runs"]
    assert (over["verdict"]["state"], over["pools"]) == ("ended", []), over["verdict"]


def check_working(cwd: Path, run: str) -> None:
    (works,) = run_json("status", "o", cwd=cwd)["runs"]
    assert works["verdict"]["state"] == "running"
    assert [p["alive"] for p in works["processes"]] == [True, True, True]
    assert works["progress"]["steps_per_s"] > 0 and works["steps"] == 500
    (pool,) = works["pools"]
    assert pool["owner"]["pid"] == works["processes"][1]["pid"] and pool["heartbeat_s"] is not None
    elsewhere = run_json("status", cwd=cwd.parent)["runs"]
    assert {found["run"]: found["out"] for found in elsewhere}[run] == str(cwd / "o")  # a living child says where


def check_hanging(out: Path, trainer: int) -> None:
    os.kill(trainer, signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(trainer) == "stopped")
        # the feeder goes on until every slot it may use waits for the trainer
        wait_until(lambda: any(slot.state == "published" for slot in status_of(str(out)).pools[0].slots))
        (hangs,) = run_json("status", "o", cwd=out.parent)["runs"]
    finally:
        os.kill(trainer, signal.SIGCONT)
    assert hangs["verdict"]["state"] == "stopped"
    assert hangs["verdict"]["remedies"] == [f"`kill -CONT {trainer}` lets it go on"]
    held = [slot for slot in hangs["pools"][0]["slots"] if slot["state"] == "published"]
    assert {holder["pid"] for slot in held for holder in slot["holders"]} == {trainer}
    assert all(slot["seconds"] > 0 for slot in held)


def watch_once(cwd: Path) -> None:
    """--watch on a real terminal: at least two pictures, then Ctrl-C is a normal end that leaves the last one."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "shmstage.cli", "status", "o", "--watch", "0.1"]
    env = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    with contextlib.ExitStack() as stack:
        watcher = subprocess.Popen(command, cwd=cwd, stdin=end, stdout=end, stderr=end, env=env)
        stack.callback(os.close, terminal)
        os.close(end)
        read_until(terminal, lambda text: text.count("· running ·") >= 2)
        watcher.send_signal(signal.SIGINT)
        last = read_until(terminal, None)
        assert watcher.wait(60) == 0
    assert "\x1b[?1049l" in last and "· running ·" in last.partition("\x1b[?1049l")[2]


def read_until(terminal: int, is_so: Callable[[str], bool] | None) -> str:
    """What a terminal shows until ``is_so``, or to its end."""
    seen = ""
    deadline = time.monotonic() + 60
    with selectors.DefaultSelector() as selector:
        selector.register(terminal, selectors.EVENT_READ)
        while is_so is None or not is_so(seen):
            assert selector.select(deadline - time.monotonic()), seen
            try:
                seen += COLOUR.sub("", os.read(terminal, 65536).decode(errors="replace"))
            except OSError:  # the other end is closed
                assert is_so is None, seen
                return seen
    return seen


@pytest.mark.slow
def test_watching_into_a_pipe_prints_one_picture_after_the_other_also_when_the_run_is_gone(tmp_path: Path) -> None:
    identity = ProcessIdentity.create(RUN, "producer")
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    watcher = start("status", RUN, "--watch", "0.05", cwd=tmp_path)
    try:
        assert watcher.stdout is not None
        for _ in range(2):
            skip_to(watcher.stdout, f"run {RUN}")
    finally:
        pool.close()
        identity.close()
    skip_to(watcher.stdout, "gone: no run")
    watcher.send_signal(signal.SIGINT)
    code, _, err = finish(watcher)
    assert (code, err) == (0, "")


def skip_to(lines: IO[str], beginning: str) -> None:
    for line in lines:
        if line.startswith(beginning):
            return
    raise AssertionError(f"ended before {beginning!r}")


@pytest.mark.slow
def test_watching_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    watcher = start("status", "--watch", "0.05", cwd=tmp_path)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    watcher.stdout.close()
    assert watcher.wait(60) == 0

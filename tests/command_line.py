"""Runs the real command in a process of its own, as a user would."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0


def start(*arguments: str, cwd: Path, script: Path | None = None) -> subprocess.Popen[str]:
    """``script``: a Python file that is run in the command's place."""
    return subprocess.Popen(
        [sys.executable, *(["-m", "shmstage.cli"] if script is None else [str(script)]), *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ, "PJRT_NPROC": "2", "JAX_PLATFORMS": "cpu",
            # beside the tests' directories, for all of them: most of a run's time would go into compiling the same
            "JAX_COMPILATION_CACHE_DIR": str(cwd.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def run_json(*arguments: str, cwd: Path, script: Path | None = None) -> dict[str, Any]:
    code, out, err = finish(start(*arguments, "--json", cwd=cwd, script=script))
    assert code == 0, f"exit {code}\n{out}\n{err}"
    assert len(out.splitlines()) == 1, out
    result: dict[str, Any] = json.loads(out)
    return result


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Until the launcher has reported ``step`` on stderr (one line per step when it is no terminal)."""
    wait_for_line(process, f"step {step}", lambda line: line.startswith("step") and int(line.split()[1]) >= step)


def wait_for_line(process: subprocess.Popen[str], what: str, is_it: Callable[[str], bool]) -> str:
    """Until a line on stderr is the one; returns it."""
    assert process.stderr is not None
    deadline = time.monotonic() + DEADLINE_S
    seen: list[str] = []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            assert selector.select(deadline - time.monotonic()), f"no {what}: {seen}"
            line = process.stderr.readline()
            assert line, f"ended before {what}: {seen}"
            seen.append(line)
            if is_it(line):
                return line
    raise AssertionError(f"no {what}: {seen}")


def kill_role(process: subprocess.Popen[str], out: Path, role: str) -> None:
    """SIGKILL, then wait until the launcher says that it starts another one."""
    os.kill(living_pid(out, role), signal.SIGKILL)
    wait_for_line(process, f"restart of the {role}", lambda line: line.startswith(f"{role} (pid "))


def living_pid(out: Path, role: str) -> int:
    """Of the process that has this role now; waits until there is one."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            pid: int | None = json.loads((out / "run.json").read_text())["pids"].get(role)
            if pid is not None:
                return pid
        os.sched_yield()
    raise AssertionError(f"no {role} was started")


def pids(out: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((out / "run.json").read_text())["pids"]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        os.sched_yield()


def wait_until_gone(*who: int) -> None:
    deadline = time.monotonic() + 60
    for pid in who:
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            os.sched_yield()

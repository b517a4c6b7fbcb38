"""Runs the real command in a process of its own, as a user would."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shmstage.cli", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PJRT_NPROC": "2", "JAX_PLATFORMS": "cpu"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


def run_json(*arguments: str, cwd: Path) -> dict[str, Any]:
    code, out, err = finish(start(*arguments, "--json", cwd=cwd))
    assert code == 0, f"exit {code}\n{out}\n{err}"
    assert len(out.splitlines()) == 1, out
    result: dict[str, Any] = json.loads(out)
    return result


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Until the launcher has reported ``step`` on stderr (one line per step when it is no terminal)."""
    assert process.stderr is not None
    deadline = time.monotonic() + DEADLINE_S
    seen: list[str] = []
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            assert selector.select(deadline - time.monotonic()), f"no step {step}: {seen}"
            line = process.stderr.readline()
            assert line, f"ended before step {step}: {seen}"
            seen.append(line)
            if line.startswith("step") and int(line.split()[1]) >= step:
                return
    raise AssertionError(f"no step {step}: {seen}")


def pids(out: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((out / "run.json").read_text())["pids"]
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until_gone(*who: int) -> None:
    deadline = time.monotonic() + 60
    for pid in who:
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} is still there"
            os.sched_yield()

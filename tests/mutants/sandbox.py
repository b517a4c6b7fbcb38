"""Runs tests in a copy of the repository, as a process group that is gone afterwards, and says how each test ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import psutil

from shmstage.memory.facts import read_facts
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, list_objects
from shmstage.memory.sweep import sweep

COPIED = ("shmstage", "tests", "examples", "native", "pyproject.toml", "setup.py")

_running: dict[subprocess.Popen[bytes], set[str]] = {}
_stopped = threading.Event()


@dataclass
class Outcome:
    """Of one run of pytest, by test id: seconds that the test itself took, and what it or its set-up failed with.

    What is found behind a test when it is over is not its own failure, and not judged here.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    killed: bool = False
    output: str = ""


def stop_all() -> None:
    """From now on ``run_tests`` raises ``InterruptedError``; what runs is ended."""
    _stopped.set()
    for process, known in list(_running.items()):
        _end(process, known)


def copy_repository(root: Path, to: Path) -> None:
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        else:
            shutil.copy(source, to / name)


def run_tests(where: Path, tests: list[str], *, each_s: float, all_s: float, stop_at_first: bool) -> Outcome:
    """A test that hangs fails after ``each_s``; if even that does not end it, everything is killed after ``all_s``."""
    report = where / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly",
        f"--timeout={each_s}", f"--junitxml={report}", "-o", "junit_family=xunit1", "-o", "junit_duration_report=call",
        *(["-x"] if stop_at_first else []), *tests,
    ]  # fmt: skip
    # the copy's package comes first on the path; no example is found again that a run before this one found
    environment = {
        **os.environ, "PYTHONPATH": str(where), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(where / ".hypothesis"),
    }  # fmt: skip
    shutil.rmtree(where / ".hypothesis", ignore_errors=True)
    known = set(list_objects())
    with open(where / "output.txt", "w+") as output:
        process = subprocess.Popen(
            command, cwd=where, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running[process] = known
        killed = False
        try:
            process.wait(0.0 if _stopped.is_set() else all_s)
        except subprocess.TimeoutExpired:
            killed = True
        finally:
            _end(process, known)
            del _running[process]
        if _stopped.is_set():
            raise InterruptedError("told to stop")
        output.seek(0)
        outcome = Outcome(killed=killed, output=output.read())
    if report.exists():
        _read(report, outcome)
    return outcome


def _end(process: subprocess.Popen[bytes], known: set[str]) -> None:
    """Kills what is left of its tree and of its group, and removes what the dead of it left new in /dev/shm."""
    tree = []
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        tree = [parent, *parent.children(recursive=True)]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in tree:
        with suppress(psutil.Error):
            member.kill()
    process.wait()
    psutil.wait_procs(tree, timeout=10)
    pids = {process.pid, *(member.pid for member in tree)}
    for dead in sweep(dry_run=True):
        path = Path(SHM_DIR, dead.name)
        with suppress(FileNotFoundError):
            if dead.name not in known and _owner_pid(path) in pids:
                path.unlink()


def _owner_pid(path: Path) -> int:
    if path.name.endswith(LOCK_SUFFIX):
        found = re.search(r"^pid=([0-9]+)$", path.read_text(errors="replace"), re.MULTILINE)
        return int(found[1]) if found else 0
    with path.open("rb") as file:
        facts = read_facts(file.fileno())
    return int(facts["owner_pid"]) if facts and facts["magic"] else 0


def _read(report: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('file')}::{case.get('name')}"
        outcome.seconds[test] = outcome.seconds.get(test, 0.0) + float(case.get("time") or 0)
        for failure in case.iter("failure"):
            outcome.failed[test] = failure.get("message") or ""
        for error in case.iter("error"):
            message = error.get("message") or ""
            if not message.startswith("failed on teardown"):
                outcome.errors[test] = message
        if case.find("skipped") is not None:
            outcome.errors[test] = "skipped"

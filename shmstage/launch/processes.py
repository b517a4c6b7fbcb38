"""Child processes: started as ``python -m shmstage.<role>``, logged to a file, ended in good order."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

from shmstage.memory.identity import read_start_ticks

#: less than this is free: a log may be empty because nothing could be written
DISK_FULL_NBYTES = 64 << 10
#: a process that is killed for memory gets no word of it
OUT_OF_MEMORY_HINT = ", by hand or by the kernel because memory ran out"


@final
class Child:
    """One child. Its standard input is a pipe that only the launcher holds open: the child's lifeline."""

    def __init__(
        self, role: str, arguments: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment``: instead of this process's own."""
        self.role = role
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"shmstage.{role}", "--lifeline", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # its own session: Ctrl-C reaches the launcher alone, which then stops the children in order
                start_new_session=True,
                env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """``None`` while it runs, negative if a signal ended it."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Ask it to stop as on Ctrl-C."""
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or ``None`` if it still runs after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_s: float) -> None:
        """Interrupt, wait ``grace_s``, then kill; returns when it is gone and reaped."""
        self.interrupt()
        if self._process.stdin is not None:
            self._process.stdin.close()  # says the same to a child whose imports swallowed the signal
        if self.wait(grace_s) is None:
            self._process.kill()
            self._process.wait()

    def describe_end(self) -> str:
        """How it ended, in words, with the log to look at."""
        hint = OUT_OF_MEMORY_HINT if self.exit_code() == -signal.SIGKILL else ""
        out = self.log.parent
        try:
            if shutil.disk_usage(out).free < DISK_FULL_NBYTES:
                hint += f"; the disk of {out} is full: free space, then --resume"
        except OSError:
            hint += f"; {out} is not there any more: do not move or remove OUT while a run writes into it"
        return f"{self.how_it_ended()}{hint}; see {self.log}"

    def how_it_ended(self) -> str:
        """The same, short."""
        code = self.exit_code()
        if code is None:
            return "is still running"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def end_processes(processes: Iterable[tuple[int, int]], timeout_s: float = 5.0) -> None:
    """Kill those that are still there, by pid and start time, and wait until they have let go of what they held."""
    alive = [(pid, start_ticks) for pid, start_ticks in processes if _is_alive(pid, start_ticks)]
    for pid, _ in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while any(_is_alive(*each) for each in alive) and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def _is_alive(pid: int, start_ticks: int) -> bool:
    """A zombie, which nobody may have reaped yet, holds nothing any more."""
    if not start_ticks or read_start_ticks(pid) != start_ticks:
        return False
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False

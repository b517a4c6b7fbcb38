"""What the memory tests share: one small layout, one run id, and children that are real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader

# One per pytest process, shared with its children: a sweep of this run sees nobody else's.
RUN = os.environ.setdefault("MEMORY_TESTS_RUN", f"memory-tests-{os.getpid()}")
LAYOUT = Layout.of(
    {"tokens": ("int32", (2, 8)), "mask": ("float32", (2, 8)), "logps": ("float32", (2, 8))}, late=["logps"]
)


@dataclass
class Ends:
    pool: Pool
    reader: PoolReader


class Child:
    """A child process running ``code``; it speaks in lines and is told to go on in lines."""

    def __init__(self, code: str, *arguments: object) -> None:
        prelude = "import sys, os, signal\nfrom pool_making import *\narguments = sys.argv[1:]\n"
        here = os.path.dirname(__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-c", prelude + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])},
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line it prints, "" at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def go_on(self, text: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code

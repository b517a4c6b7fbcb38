"""``examples/transport.py`` does what it says, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shmstage.memory.sweep import list_objects

EXAMPLE = Path(__file__).parents[2] / "examples" / "transport.py"


@pytest.mark.slow
def test_example_moves_its_arrays_without_a_copy_and_leaves_nothing_behind() -> None:
    before = list_objects()
    found = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "16 hashes right" in found.stdout
    assert found.stdout.count("more anonymous memory after 768 MB") == 2
    assert found.stderr == ""
    left = [name for name in list_objects() if name not in before and "transport-example" in _run_of(name)]
    assert left == []


def _run_of(name: str) -> str:
    try:
        return Path("/dev/shm", name).read_bytes()[:4096].decode(errors="ignore")
    except OSError:
        return ""

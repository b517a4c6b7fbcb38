"""What a run's pool is made of is said in its summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run_json

from shmstage.memory.mounts import huge_pages_of


@pytest.mark.slow
def test_the_summary_says_what_the_pool_is_made_of(tmp_path: Path) -> None:
    """S24, S33"""
    arguments = ("run", "--steps", "1", "--rows", "2", "--microbatches-per-step", "1", "--numa", "interleave")
    backing = run_json(*arguments, "--out", "out", cwd=tmp_path)["backing"]
    assert backing["directory"] == "/dev/shm"
    assert backing["huge_pages"] == (huge_pages_of() != "never")
    assert (backing["huge_nbytes"] > 0) <= backing["huge_pages"]
    assert backing["numa"] == "interleave" and backing["numa_nodes"] >= 1

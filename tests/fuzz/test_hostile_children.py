"""What could crash or eat up the process that reads it, tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import EXAMPLES, SEED

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
#: examples, in multiples of the other tests': starting the process is what takes time here
MANY = {"pool": 10, "frame": 1, "shard": 10}


@pytest.mark.parametrize("target", MANY)
def test_a_hostile_input_kills_no_reader(target: str) -> None:
    """S75, S88: pool headers, slot headers, frames and shards of any content, with little memory to waste."""
    arguments = [target, str(SEED), "0", str(EXAMPLES * MANY[target])]
    command = [sys.executable, str(HERE / "hostile_child.py"), *arguments]
    environment_path = ":".join([str(HERE), str(HERE.parent / "packing"), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**_environment(), "PYTHONPATH": environment_path}
    )
    cases = done.stdout.split()
    again = f"{target} {SEED} {cases[-1] if cases else 0} 1"
    assert done.returncode == 0, f"exit code {done.returncode}; again: hostile_child.py {again}\n{done.stderr[-3000:]}"
    assert len(cases) == EXAMPLES * MANY[target]


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)

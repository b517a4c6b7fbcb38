"""A short soak: the bench itself works, and a leak makes it say so."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shmstage.memory.sweep import sweep

SOAK = Path(__file__).parents[1] / "bench" / "soak.py"


def _soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SOAK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_thousand_hand_offs_leave_no_descriptor_and_no_shared_memory_behind() -> None:
    """S62, S63: mappings and descriptors are per pool, not per hand-off; nothing is left in /dev/shm."""
    done = subprocess.run(
        [sys.executable, str(SOAK), "--handoffs", "1000", "--json"], capture_output=True, text=True, timeout=180
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert (found["fd_growth"], found["shm_growth"]) == (0, 0)
    assert [arm["handoffs"] for arm in found["arms"]] == [1000, 25]
    for arm in found["arms"]:
        assert arm["left_in_shm"] == 0 and arm["shm_nbytes"][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leak", "figure"), [("memory", "rss_growth_bytes"), ("fd", "fd_growth"), ("shm", "shm_growth")]
)
def test_what_a_process_really_leaks_is_measured(leak: str, figure: str) -> None:
    """S62, S63: a producer that keeps a little at every hand-off is found, and by the right figure."""
    soak = _soak()
    try:
        found = soak.summarise([soak.run_arm("consumer", 200, 4096, leak=leak)])
    finally:
        sweep(soak.run_name("consumer"))
    over = [key for key, limit in soak.LIMITS.items() if found[key] > limit]
    assert not found["flat"] and over == [figure]
    assert found[figure] >= {"memory": 200 * soak.LEAK_NBYTES, "fd": 200, "shm": 200 * 4096}[leak]


def test_growth_beyond_its_limit_is_no_flat_soak() -> None:
    soak = _soak()

    def arm(**growth: int) -> dict[str, object]:
        grown = {"rss": 0, "pss": 0, "fds": 0, **growth}
        nothing = {"rss": 0, "pss": 0, "fds": 0}
        return {"arm": "a", "growth": {"producer": nothing, "a": grown}, "shm_nbytes": [4096, 4096], "left_in_shm": 0}

    assert soak.summarise([arm()])["flat"]
    assert not soak.summarise([arm(), arm(fds=1)])["flat"]
    assert not soak.summarise([arm(rss=soak.LIMITS["rss_growth_bytes"] + 1)])["flat"]
    assert not soak.summarise([{**arm(), "shm_nbytes": [4096, 8192]}])["flat"]
    assert not soak.summarise([{**arm(), "left_in_shm": 1}])["flat"]

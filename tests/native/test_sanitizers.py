"""``make native-sanitize`` as a test: the drivers are clean, and every seeded fault is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from skipping import skip_unless_ci

RUN = Path(__file__).parents[2] / "native" / "sanitize" / "run.py"
NOT_HERE = 2

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", ["slots", "cells", "bytes"])
def test_the_native_core_is_clean_and_seeded_faults_are_reported(driver: str) -> None:
    """S60, S75: races, overruns, use after free and undefined behaviour in the native core."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--json", "--jobs", "2", "--only", driver], capture_output=True, text=True,
        timeout=560,
    )  # fmt: skip
    if done.returncode == NOT_HERE:
        skip_unless_ci(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert all(check["want"] == check["got"] for check in checks)
    assert {bool(check["fault"]) for check in checks} == {True, False}


def test_a_driver_that_fails_makes_the_run_fail(tmp_path: Path) -> None:
    """The runner itself: with a compiler whose programs say nothing, seeded faults count as missed."""
    silent = tmp_path / "silent"
    silent.write_text(
        "#!/bin/sh\n"
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        'printf "#!/bin/sh\\nexit 0\\n" > "$out"; chmod +x "$out"\n'
    )
    silent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(RUN), "--json", "--only", "cells"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "CXX": str(silent)},
    )  # fmt: skip
    assert done.returncode == 1
    found = {(bool(check["fault"]), check["got"]) for check in json.loads(done.stdout)["checks"]}
    assert found == {(False, "clean"), (True, "missed")}


def test_an_unknown_sanitizer_is_refused_by_the_build() -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext"], capture_output=True, text=True, timeout=60,
        cwd=RUN.parents[2], env={**os.environ, "SHMSTAGE_SANITIZE": "memory"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "SHMSTAGE_SANITIZE=memory: expected one of address, thread, undefined" in done.stderr


@pytest.mark.timeout(600)
def test_the_extension_can_be_built_with_a_sanitizer(tmp_path: Path) -> None:
    """The one that is built soonest; to load it Python would have to be started with its runtime."""
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "o")]
    done = subprocess.run(
        [sys.executable, *build], capture_output=True, text=True, timeout=560, cwd=RUN.parents[2],
        env={**os.environ, "SHMSTAGE_SANITIZE": "thread"},
    )  # fmt: skip
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        skip_unless_ci(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "lib" / "shmstage").glob("_native*.so")
    assert b"__tsan_write" in built.read_bytes()

"""A virtual environment with the packages that the adapters are for: ``.venv-adapters`` at the root of the tree.

``python tests/ecosystem/adapters_venv.py`` makes it, or does nothing where it is as it should be. Every package is
pinned in ``requirements-*.txt`` beside this file, all its dependencies included: they are installed with ``--no-deps``,
so that one resolver's mood cannot change what is tested. Two files may name the same package, with the same version.
Shmstage itself is installed editable. Without a Python 3.12 there is nothing to make: one line says so, exit 0.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreters

VERSION = "3.12"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-adapters"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
REMEDY = "python tests/ecosystem/adapters_venv.py"


def wanted_stamp() -> str:
    """Hash of all that the environment is made from."""
    sources = [*sorted(HERE.glob("requirements-*.txt")), Path(__file__), ROOT / "setup.py", ROOT / "pyproject.toml"]
    sources += sorted(p for p in (ROOT / "native").iterdir() if p.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_ready() -> bool:
    return STAMP.is_file() and STAMP.read_text() == wanted_stamp() and PYTHON.exists()


def need() -> Path:
    """The environment's interpreter; the test that asks is skipped on a desk without it, and fails in CI."""
    if not is_ready():
        from skipping import skip_unless_ci

        skip_unless_ci(f"{VENV.name} is missing or out of date: {REMEDY} makes it (Python {VERSION})")
    return PYTHON


def run(script: Path, *arguments: object, timeout_s: float = 240.0, devices: int = 1) -> Any:
    """Runs ``script`` in the environment, on ``devices`` CPU devices, and returns the JSON of its last line of output.

    A script that fails raises ``AssertionError`` with the end of what it wrote to stderr.
    """
    command = [str(need()), str(script), *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{script.name}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def make() -> int:
    base = interpreters.find(VERSION)
    if base is None:
        print(f"no Python {VERSION} here: the tests of the adapters are skipped, or fail where CI is set")
        return 0
    VENV.mkdir(exist_ok=True)
    with (VENV / ".lock").open("w") as lock:
        # two that make it at once would install into one another's half-made environment
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready():
            print(PYTHON)
            return 0
        STAMP.unlink(missing_ok=True)
        subprocess.run([base, "-m", "venv", VENV], check=True)
        requirements = [part for path in sorted(HERE.glob("requirements-*.txt")) for part in ("-r", str(path))]
        _pip("install", "--upgrade", "pip")
        # not compiled: half of it is never imported
        _pip("install", "--no-compile", "--no-deps", "--only-binary", ":all:", *requirements)
        _pip("install", "--no-deps", "--editable", str(ROOT))
        STAMP.write_text(wanted_stamp())
    print(PYTHON)
    return 0


def _pip(*arguments: str) -> None:
    subprocess.run([PYTHON, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(make())

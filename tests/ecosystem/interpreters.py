"""Python interpreters other than the one that runs the tests: on PATH, or where pyenv keeps them."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

PYENV_VERSIONS = Path.home() / ".pyenv" / "versions"
ASK_VERSION = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2], sep='\\n')"


@functools.cache
def find(version: str) -> Path | None:
    """The executable of Python ``version`` ("3.12"), or None. Each candidate is asked: a shim may lead nowhere."""
    on_path = shutil.which(f"python{version}")
    kept = sorted(PYENV_VERSIONS.glob(f"{version}.*/bin/python"), key=_patch_level, reverse=True)
    for candidate in ([Path(on_path)] if on_path else []) + kept:
        executable = _ask(candidate, version)
        if executable is not None:
            return executable
    return None


def need(version: str) -> Path:
    """The executable of Python ``version``; the test that asks is skipped on a desk without it, and fails in CI."""
    executable = find(version)
    if executable is None:
        from skipping import skip_unless_ci

        skip_unless_ci(f"no Python {version}: neither python{version} on PATH nor {PYENV_VERSIONS}/{version}.*")
    return executable


def _patch_level(executable: Path) -> int:
    patch = executable.parents[1].name.split(".")[2]
    return int(patch) if patch.isdigit() else -1


def _ask(candidate: Path, version: str) -> Path | None:
    try:
        answer = subprocess.run([candidate, "-c", ASK_VERSION], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    executable, found = answer.stdout.split()
    return Path(executable) if found == version else None

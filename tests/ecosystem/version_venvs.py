"""Virtual environments for the other Pythons that the package is for: ``.venv-3.12`` and so on, in the tree's root.

``python tests/ecosystem/version_venvs.py`` makes those whose interpreter is here, or does nothing where they are as
they should be. They hold the newest releases of what the package and its tests need, JAX among them, and not the
package: the tests build and install that themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

import distributions
import interpreters

ROOT = distributions.ROOT
EXTRAS = ("train", "metrics")
TESTS = ("pytest", "pytest-timeout", "hypothesis")
REMEDY = "python tests/ecosystem/version_venvs.py"


def python_of(version: str) -> Path:
    return ROOT / f".venv-{version}" / "bin" / "python"


def requirements() -> list[str]:
    """Of the package, of the extras that training needs, and of the tests, as pyproject.toml bounds them."""
    project = distributions.project()["project"]
    extras = project["optional-dependencies"]
    tests = [entry for entry in extras["dev"] if entry.split(">=")[0] in TESTS]
    return [*project["dependencies"], *(entry for name in EXTRAS for entry in extras[name]), *tests]


def wanted_stamp() -> str:
    return hashlib.sha256("\n".join([*requirements(), Path(__file__).read_text()]).encode()).hexdigest()


def is_ready(version: str) -> bool:
    stamp = ROOT / f".venv-{version}" / ".installed"
    return stamp.is_file() and stamp.read_text() == wanted_stamp() and python_of(version).exists()


def need(version: str) -> Path:
    """The interpreter of the environment; the test that asks is skipped on a desk without it, and fails in CI."""
    interpreters.need(version)
    if not is_ready(version):
        from skipping import skip_unless_ci

        skip_unless_ci(f".venv-{version} is missing or out of date: {REMEDY} makes it")
    return python_of(version)


def make(version: str, base: Path) -> None:
    venv = ROOT / f".venv-{version}"
    venv.mkdir(exist_ok=True)
    with (venv / ".lock").open("w") as lock:
        # two that make it at once would install into one another's half-made environment
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready(version):
            return
        (venv / ".installed").unlink(missing_ok=True)
        subprocess.run([base, "-m", "venv", venv], check=True)
        pip = [python_of(version), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        install = [*pip, "install", "--no-compile", "--upgrade"]  # a few of all the modules will ever be imported
        subprocess.run([*install, "pip"], check=True)
        subprocess.run([*install, *requirements()], check=True)
        (venv / ".installed").write_text(wanted_stamp())


def main() -> int:
    for version in distributions.versions():
        if version == distributions.OWN:
            continue
        base = interpreters.find(version)
        if base is None:
            print(f"no Python {version} here: its tests are skipped, or fail where CI is set")
            continue
        make(version, base)
        print(python_of(version))
    return 0


if __name__ == "__main__":
    sys.exit(main())

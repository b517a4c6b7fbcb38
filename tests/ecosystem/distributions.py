"""Makes the sdist and, from it, a wheel for every Python here that the package is for: ``make dist``.

    python tests/ecosystem/distributions.py [OUT]       # default: dist/ at the root of the tree
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreters

ROOT = Path(__file__).resolve().parents[2]
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


def project() -> dict[str, Any]:
    """``pyproject.toml`` as it is."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def versions() -> list[str]:
    """Of Python, for which there is a wheel: those that the classifiers name."""
    classifiers = "\n".join(project()["project"]["classifiers"])
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, re.MULTILINE)


def source_files() -> list[str]:
    """What the tree consists of: all that git does not ignore; where there is no git, as in an sdist, all there is."""
    if not (ROOT / ".git").exists():
        return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in listed if (ROOT / name).is_file())


def make_sdist(out: Path) -> Path:
    """Made from a copy: in the tree itself, what an earlier build listed would get into it, and binaries with it."""
    with tempfile.TemporaryDirectory() as directory:
        for name in source_files():
            copy = Path(directory, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)
        _run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), directory])
    return _newest(out, "shmstage-*.tar.gz")


def make_wheel(python: Path, version: str, sdist: Path, out: Path) -> Path:
    """As pip does it for somebody who installs the sdist: unpacked elsewhere, with build requirements of its own."""
    _run([str(python), "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(out), str(sdist)])
    return _newest(out, f"shmstage-*-cp{version.replace('.', '')}-*.whl")


def pythons() -> Iterator[tuple[str, Path]]:
    """Version and executable of each that is here; this one first."""
    for version in sorted(versions(), key=lambda version: version != OWN):
        python = Path(sys.executable) if version == OWN else interpreters.find(version)
        if python is not None:
            yield version, python


def _newest(out: Path, pattern: str) -> Path:
    return max(out.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sdist = make_sdist(out)
    made = [sdist, *(make_wheel(python, version, sdist, out) for version, python in pythons())]
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    missing = sorted(set(versions()) - {version for version, _ in pythons()})
    if missing:
        print(f"no wheel for Python {', '.join(missing)}: not here; cibuildwheel builds them in containers")
    return 0


if __name__ == "__main__":
    sys.exit(main())

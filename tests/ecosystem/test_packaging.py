"""The package as it is handed out: the sdist has the tree, the wheels have the package, and on every Python it is for,
installed away from the tree, it does what it does here.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path

import distributions
import jsonschema
import pytest
import version_venvs
from skipping import skip_unless_ci

import shmstage
from shmstage.cli import main

ROOT = distributions.ROOT
VERSIONS = ("3.11", "3.12", "3.13")
#: what the releases of Python, JAX and NumPy may break, apart from what trains: bytes, sockets, arrays, engines
QUICK_TESTS = ("tests/wire", "tests/native", "tests/transport", "tests/demo", "tests/trainer")
SLOW_TESTS = ("tests/trainer/test_double_buffer.py",)


def heading_faults(heading: str, version: str) -> list[str]:
    """The newest heading of the CHANGELOG is the version; while it is ``Unreleased``, that is a development version."""
    if heading == "Unreleased":
        return [] if re.search(r"\.dev\d+$", version) else [f"{version} needs a heading of its own"]
    return [] if heading.split(" ")[0] == version else [f"CHANGELOG is of {heading}, the package of {version}"]


def test_the_version_is_written_once_and_the_changelog_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (.*)$", text, re.MULTILINE)
    assert newest is not None
    assert not heading_faults(newest[1], shmstage.__version__)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shmstage {shmstage.__version__}\n"
    assert "version" not in distributions.project()["project"]


@pytest.mark.parametrize(
    ("heading", "version"), [("Unreleased", "0.2.0"), ("0.2.0 (2027-01-01)", "0.2.0.dev0"), ("0.1.0", "0.2.0")]
)
def test_a_version_that_the_changelog_does_not_know_is_found(heading: str, version: str) -> None:
    assert heading_faults(heading, version)


def test_cibuildwheel_takes_its_configuration_and_builds_for_the_pythons_of_the_classifiers() -> None:
    if importlib.util.find_spec("cibuildwheel") is None:
        skip_unless_ci("cibuildwheel is not installed: it is in the extra dev")
    schema = importlib.resources.files("cibuildwheel") / "resources" / "cibuildwheel.schema.json"
    jsonschema.validate(distributions.project()["tool"]["cibuildwheel"], json.loads(schema.read_text()))
    asked = [
        sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--archs", "x86_64,aarch64",
        "--print-build-identifiers", str(ROOT),
    ]  # fmt: skip
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)
    assert distributions.versions() == list(VERSIONS)
    assert sorted(done.stdout.split()) == sorted(
        f"cp{version.replace('.', '')}-manylinux_{machine}" for version in VERSIONS for machine in ("x86_64", "aarch64")
    )
    assert distributions.project()["project"]["requires-python"] == f">={VERSIONS[0]}"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def sdist(out: Path) -> Path:
    return distributions.make_sdist(out)


@pytest.fixture(scope="module")
def wheel_for(sdist: Path, out: Path) -> Callable[[str], Path]:
    @cache
    def made(version: str) -> Path:
        return distributions.make_wheel(python_for(version), version, sdist, out)

    return made


def python_for(version: str) -> Path:
    """With all that the package needs and without the package, or, if it is this one, with an editable one."""
    return Path(sys.executable) if version == distributions.OWN else version_venvs.need(version)


@pytest.mark.slow
def test_the_sdist_has_all_that_the_tree_has(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    made = {name for name in names if name.startswith("shmstage.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == set(distributions.source_files())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_wheel_has_the_package_and_its_data_and_nothing_else(wheel_for: Callable[[str], Path]) -> None:
    wheel = wheel_for(distributions.OWN)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = parsed(archive, "METADATA")
        entry_points = read(archive, "entry_points.txt")
        native = [info for info in archive.infolist() if info.filename.endswith(".so")]
    package = {name for name in names if ".dist-info/" not in name}
    tracked = {name for name in distributions.source_files() if name.startswith("shmstage/")}
    assert package - tracked == {f"shmstage/_native{sysconfig.get_config_var('EXT_SUFFIX')}"}
    assert tracked <= package
    # the sources above are what there is, and these are what a run, a report and a type checker open by name
    for name in ("demo/bundle/manifest.json", "demo/bundle/COMPLETE", "timeline/page.html", "py.typed", "_native.pyi"):
        assert f"shmstage/{name}" in package
    assert native[0].file_size < 4e6, "with debug information"
    assert metadata["Version"] == shmstage.__version__
    assert metadata["Requires-Python"] == f">={VERSIONS[0]}"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert set(metadata.get_all("Provides-Extra")) == set(distributions.project()["project"]["optional-dependencies"])
    assert entry_points.split() == ["[console_scripts]", "shmstage", "=", "shmstage.cli:main"]


def parsed(archive: zipfile.ZipFile, name: str) -> Message:
    return Parser().parsestr(read(archive, name))


def read(archive: zipfile.ZipFile, name: str) -> str:
    (path,) = [found for found in archive.namelist() if found.endswith(f".dist-info/{name}")]
    return archive.read(path).decode()


class Installed:
    """A wheel in a virtual environment of its own, that borrows what the package needs from another one."""

    def __init__(self, base: Path, wheel: Path, directory: Path) -> None:
        self.directory = directory
        self.environment = directory / "venv"
        self._run([str(base), "-m", "venv", "--without-pip", str(self.environment)])
        (site,) = (self.environment / "lib").glob("python3.*/site-packages")
        borrowed = self._run([str(base), "-c", "import sys; print(*(p for p in sys.path if p.endswith('-packages')))"])
        # a path that a .pth file adds has its own .pth files left unread, so an editable install there is not seen
        (site / "borrowed.pth").write_text(borrowed.replace(" ", "\n"))
        self.python = self.environment / "bin" / "python"
        pip = [str(base), "-m", "pip", "--quiet", "--python", str(self.python)]
        self._run([*pip, "install", "--no-deps", "--ignore-installed", "--no-index", str(wheel)])
        self._check = [*pip, "check"]

    def check(self) -> None:
        """Fails unless all that the wheel says it needs is there, in a version it takes."""
        self._run(self._check)

    def run(self, *command: str, timeout_s: float = 600.0) -> str:
        """As somebody would who has activated the environment, in a folder that has nothing of ours."""
        program = self.environment / "bin" / command[0]
        return self._run([str(program), *command[1:]], timeout_s=timeout_s)

    def _run(self, command: list[str], timeout_s: float = 600.0) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        environment |= {"JAX_PLATFORMS": "cpu"}
        # most of the time would go into compiling the same
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(self.directory / "compiled")}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        done = subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_installed_away_from_the_tree_it_trains_and_its_tests_pass(
    version: str, wheel_for: Callable[[str], Path], tmp_path: Path
) -> None:
    installed = Installed(python_for(version), wheel_for(version), tmp_path)
    where, found = installed.run(
        "python", "-c",
        "import sys, shmstage, shmstage._native as native\n"
        "print(native.__file__)\nprint('%d.%d' % sys.version_info[:2], shmstage.__version__)",
    ).splitlines()  # fmt: skip
    assert Path(where).is_relative_to(installed.environment)
    assert found == f"{version} {shmstage.__version__}"
    if version != distributions.OWN:  # the environment that runs this is for more than the package
        installed.check()
    # what cibuildwheel would run in its containers
    for command in distributions.project()["tool"]["cibuildwheel"]["test-command"]:
        installed.run(*shlex.split(command))
    summary = json.loads(installed.run("shmstage", "run", "--steps", "2", "--out", "out", "--json"))
    assert summary["steps"] == 2 and summary["trajectories"]["trained"] > 0
    installed.run("shmstage", "report", "out")
    if version != distributions.OWN:
        for mark, tests in (("not slow", QUICK_TESTS), ("slow", SLOW_TESTS)):
            options = ["-q", "-m", mark, "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
            said = installed.run("python", "-m", "pytest", *options, *(str(ROOT / name) for name in tests))
            assert " passed" in said and "FAILED" not in said, said

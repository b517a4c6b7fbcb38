"""Other interpreters, and the environment that the adapters are tested in."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import adapters_venv
import interpreters
import pytest

ABSENT = "3.99"


@pytest.fixture(autouse=True)
def asked_anew() -> None:
    interpreters.find.cache_clear()


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_version_that_nobody_has_is_not_found() -> None:
    assert interpreters.find(ABSENT) is None


def test_a_shim_that_leads_nowhere_or_to_another_version_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path, kept = tmp_path / "bin", tmp_path / "versions"
    for directory in (on_path, kept / "3.99.2" / "bin", kept / "3.99.10" / "bin"):
        directory.mkdir(parents=True)
    executable(on_path / f"python{ABSENT}", "exit 127")
    executable(kept / "3.99.10" / "bin" / "python", f"echo {sys.executable}; echo 3.98")
    executable(kept / "3.99.2" / "bin" / "python", f"echo {sys.executable}; echo {ABSENT}")
    monkeypatch.setenv("PATH", str(on_path), prepend=":")
    monkeypatch.setattr(interpreters, "PYENV_VERSIONS", kept)
    assert interpreters.find(ABSENT) == Path(sys.executable)


def test_an_absent_interpreter_skips_on_a_desk_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no Python 3\.99"):
        interpreters.need(ABSENT)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"no Python 3\.99"):
        interpreters.need(ABSENT)


def test_another_pin_makes_the_environment_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "requirements-one.txt"
    pins.write_text("one==1\n")
    monkeypatch.setattr(adapters_venv, "HERE", tmp_path)
    monkeypatch.setattr(adapters_venv, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(adapters_venv, "PYTHON", Path(sys.executable))
    assert not adapters_venv.is_ready()
    (tmp_path / "stamp").write_text(adapters_venv.wanted_stamp())
    assert adapters_venv.is_ready()
    pins.write_text("one==2\n")
    assert not adapters_venv.is_ready()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"adapters_venv\.py makes it"):
        adapters_venv.need()


def test_every_pin_is_exact_and_no_package_has_two() -> None:
    pins: dict[str, str] = {}
    for path in sorted(Path(adapters_venv.HERE).glob("requirements-*.txt")):
        for line in path.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            name, version = line.split("==")
            assert name == name.lower().replace("_", "-"), f"{path.name}: {line}"
            assert pins.setdefault(name, version) == version, f"{path.name}: {line}, and elsewhere {pins[name]}"
    assert pins["maxtext"] == "0.2.5"


@pytest.mark.slow
def test_a_script_is_answered_for_by_its_last_line_or_its_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_venv, "need", lambda: Path(sys.executable))
    script = tmp_path / "script.py"
    said = "json.dumps([sys.argv[1], os.environ['XLA_FLAGS']])"
    script.write_text(f"import json, os, sys\nprint('noise')\nprint({said})\n")
    assert adapters_venv.run(script, 5, devices=3) == ["5", "--xla_force_host_platform_device_count=3"]
    script.write_text("import sys\nsys.exit('what went wrong')\n")
    with pytest.raises(AssertionError, match="what went wrong"):
        adapters_venv.run(script)
    script.write_text("print('no json')\n")
    with pytest.raises(json.JSONDecodeError):
        adapters_venv.run(script)

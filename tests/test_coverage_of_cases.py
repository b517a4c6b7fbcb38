"""Every line of the project's list of faults has a test, or a reason why none can apply: the script that says so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import coverage_of_cases
import pytest
from coverage_of_cases import numbers_of, read, report

CASES = '[cases]\nS1 = "one"\nS2 = "two"\nP10 = "ten"\n'


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    (tmp_path / "cases.toml").write_text(CASES)
    return tmp_path


def write(tests: Path, *functions: str, file: str = "memory/test_it.py") -> None:
    (tests / file).write_text("import pytest\n" + "\n".join(functions))


@pytest.mark.slow
def test_every_line_is_covered_or_cannot_apply() -> None:
    done = subprocess.run([sys.executable, coverage_of_cases.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) lines: (\d+) covered, (\d+) cannot apply, 0 without a test", done.stdout)
    assert counted is not None
    whole, covered, reasoned = map(int, counted.groups())
    assert whole == covered + reasoned
    assert reasoned <= 3, "a line that cannot apply is an exception"


@pytest.mark.parametrize(
    ("docstring", "numbers"),
    [
        ("S1", ["S1"]),
        ("S1, P10: both.", ["S1", "P10"]),
        ("S1. And why.", ["S1"]),
        ("S1, from the other side: a fit.", ["S1"]),
        ("S1 (object), S2 (2**40 + 7).", ["S1", "S2"]),
        ("S1 over a resume.", ["S1"]),
        ("As S1 says.", []),
        ("S1_old is gone.", []),
        ("", []),
    ],
)
def test_a_docstring_claims_the_numbers_it_starts_with(docstring: str, numbers: list[str]) -> None:
    assert numbers_of(docstring) == numbers


def test_tests_are_found_in_classes_and_folders_and_helpers_do_not_count(tests: Path) -> None:
    write(
        tests,
        'def test_a():\n    """S1: a."""\n    def test_inner():\n        """S2"""',
        'class TestB:\n    async def test_b(self):\n        """P10"""',
        'def helper():\n    """S2"""',
    )
    write(tests, 'def test_c():\n    """S2"""', file="memory/making.py")
    found = read(tests)
    assert found.tests == {"S1": ["memory/test_it.py::test_a"], "P10": ["memory/test_it.py::test_b"]}
    write(tests, 'def test_a():\n    """S1: a."""')
    assert read(tests).uncovered() == ["S2", "P10"]
    assert "NOT COVERED   P10  ten" in report(read(tests), everything=False)


@pytest.mark.parametrize(
    ("function", "more", "fault"),
    [
        ('def test_a():\n    """S3"""', "", "names S3, which is no line"),
        ('@pytest.mark.skip(reason="later")\ndef test_a():\n    """S1"""', "", "names S1 and never runs"),
        ('@pytest.mark.xfail\ndef test_a():\n    """S1"""', "", "names S1 and never runs"),
        ('def test_a():\n    """S1"""', '[cannot_apply]\nS1 = "why"\n', "S1 is said not to apply and is covered by"),
        ("", '[cannot_apply]\nS4 = "why"\n', "S4 cannot apply, but is no line"),
        ("", '[cannot_apply]\nS1 = " "\n', "S1 is said not to apply, but not why"),
    ],
)
def test_a_contradiction_is_a_fault(tests: Path, function: str, more: str, fault: str) -> None:
    (tests / "cases.toml").write_text(CASES + more)
    write(tests, function)
    found = read(tests)
    assert [f for f in found.faults if fault in f] == found.faults != []


def test_a_list_that_is_not_the_projects_is_a_fault(tests: Path, tmp_path: Path) -> None:
    listed = tmp_path / "LIST.md"
    listed.write_text("# Faults\n\n- **S1** one\n- **S2** two, see M10\n- **S7** seven\n  - **S8** no line\n")
    assert read(tests, listed).faults == [
        "S7 is in the project's list and not in cases.toml", "P10 is in cases.toml and not in the project's list",
    ]  # fmt: skip


def test_the_exit_code_says_whether_all_is_covered(
    tests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coverage_of_cases, "TESTS", tests)
    monkeypatch.setattr(coverage_of_cases, "LISTS", ())
    write(tests, 'def test_a():\n    """S1, P10: a."""')
    assert coverage_of_cases.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 lines: 2 covered, 0 cannot apply, 1 without a test"
    (tests / "cases.toml").write_text(CASES + '[cannot_apply]\nS2 = "there are no such things here"\n')
    assert coverage_of_cases.main(["--all"]) == 0
    out = capsys.readouterr().out
    assert "S2  two: there are no such things here" in out and "S1  one\n      memory/test_it.py::test_a" in out
    write(tests, 'def test_a():\n    """S1, P10, S9: a."""')
    assert coverage_of_cases.main([]) == 1

"""Which lines of ``cases.toml`` are covered by a test: ``python tests/coverage_of_cases.py [--all]``.

A test covers the lines whose numbers its docstring starts with, as in "S42, S44: why.". Prints the lines without a
test, the few that cannot apply with their reason, and last one line of counts. Exit 1 if a line is not covered or
something contradicts itself: an unknown number, a covered line that is said not to apply, a list other than the
project's. Docstrings are read from the source; no test is imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
#: where a checkout may have the project's list, which this repository does not contain
LISTS = (TESTS.parent / "shared" / "CASES.md", TESTS.parent.parent / "shared" / "CASES.md")
NUMBER = r"[A-Z][0-9]+"
#: numbers first, each perhaps with a remark: "S71 (object), S73 (2**40 + 7)."
CLAIM = re.compile(rf"{NUMBER}(?: \([^()]*\))?(?:, {NUMBER}(?: \([^()]*\))?)*(?![A-Za-z0-9_])")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Coverage:
    """Titles and reasons by number, tests by the number they cover, and what contradicts itself."""

    titles: dict[str, str]
    reasons: dict[str, str]
    tests: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def uncovered(self) -> list[str]:
        return [number for number in self.titles if number not in self.tests and number not in self.reasons]


def numbers_of(docstring: str) -> list[str]:
    """The numbers a docstring starts with. One further on is only mentioned, not claimed."""
    claim = CLAIM.match(docstring)
    return re.findall(rf"(?:^|, )({NUMBER})", claim[0]) if claim else []


def never_runs(test: Function) -> bool:
    """Whether it is marked to be skipped always, or to fail."""
    marks = [ast.unparse(d).split("(")[0] for d in test.decorator_list]
    return any(mark.endswith(("mark.skip", "mark.xfail")) for mark in marks)


def tests_of(tests: Path) -> Iterator[tuple[str, Function]]:
    """Every test function that pytest collects, with ``file::name``: in files, and in their test classes."""
    for path in sorted(tests.rglob("test_*.py")):
        for function in _collected(ast.parse(path.read_text()).body):
            yield f"{path.relative_to(tests)}::{function.name}", function


def _collected(body: list[ast.stmt]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _collected(node.body)
        elif isinstance(node, Function) and node.name.startswith("test_"):
            yield node


def numbers_of_list(path: Path) -> list[str]:
    """The numbers of the project's list, in its order; its lines begin ``- **S1**``."""
    return re.findall(rf"^- \*\*({NUMBER})\*\*", path.read_text(), re.MULTILINE)


def read(tests: Path, listed: Path | None = None) -> Coverage:
    """What the tests below ``tests`` cover of ``tests/cases.toml``, held against ``listed`` if there is such a file."""
    with open(tests / "cases.toml", "rb") as file:
        tables = tomllib.load(file)
    found = Coverage(tables["cases"], tables.get("cannot_apply", {}))
    for name, test in tests_of(tests):
        for number in numbers_of(ast.get_docstring(test) or ""):
            if number not in found.titles:
                found.faults.append(f"{name} names {number}, which is no line of cases.toml")
            elif never_runs(test):
                found.faults.append(f"{name} names {number} and never runs")
            else:
                found.tests.setdefault(number, []).append(name)
    for number, reason in found.reasons.items():
        if number not in found.titles:
            found.faults.append(f"{number} cannot apply, but is no line of cases.toml")
        elif number in found.tests:
            found.faults.append(f"{number} is said not to apply and is covered by {found.tests[number][0]}")
        if not reason.strip():
            found.faults.append(f"{number} is said not to apply, but not why")
    if listed is not None:
        found.faults += disagreements(set(found.titles), set(numbers_of_list(listed)))
    return found


def disagreements(ours: set[str], theirs: set[str]) -> list[str]:
    missing = [f"{number} is in the project's list and not in cases.toml" for number in sorted(theirs - ours)]
    return missing + [f"{number} is in cases.toml and not in the project's list" for number in sorted(ours - theirs)]


def report(found: Coverage, *, everything: bool) -> str:
    lines = []
    if everything:
        lines += [
            f"{number}  {found.titles[number]}\n" + "".join(f"      {test}\n" for test in found.tests[number]).rstrip()
            for number in found.titles
            if number in found.tests
        ]
    lines += [f"cannot apply  {number}  {found.titles.get(number, '')}: {why}" for number, why in found.reasons.items()]
    lines += [f"NOT COVERED   {number}  {found.titles[number]}" for number in found.uncovered()]
    lines += [f"CONTRADICTION {fault}" for fault in found.faults]
    covered = sum(number in found.tests for number in found.titles)
    lines.append(
        f"{len(found.titles)} lines: {covered} covered, {len(found.reasons)} cannot apply, "
        f"{len(found.uncovered())} without a test"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="also print each covered line with its tests")
    args = parser.parse_args(arguments)
    found = read(TESTS, next((path for path in LISTS if path.is_file()), None))
    print(report(found, everything=args.all))
    return 1 if found.uncovered() or found.faults else 0


if __name__ == "__main__":
    sys.exit(main())

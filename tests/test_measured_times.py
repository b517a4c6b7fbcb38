"""Tests that compare what two clocks' readings measured fail on a loaded machine alone: none of ours does.

Order and counts are asserted; how long things take is what ``bench/`` is for. A bound that is a constant number of
seconds, far from what is usual, and a deadline are fine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns", "process_time")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults_of(source: str) -> list[str]:
    """What in ``source`` sleeps, or compares or divides two measured durations."""
    tree = ast.parse(source)
    found = [f"line {n.lineno}: {ast.unparse(n)[:80]}" for n in ast.walk(tree) if _sleeps(n)]
    for function in ast.walk(tree):
        if isinstance(function, Function) and any(_reads_clock(node) for node in ast.walk(function)):
            found += [f"line {n.lineno}: {ast.unparse(n)[:80]}" for n in _Measured(function).compared()]
    return sorted(set(found))


def _sleeps(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep")


class _Measured:
    """The names of one function that hold an instant or a duration, by what is assigned or appended to them."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._instants: set[str] = set()
        self._durations: set[str] = set()
        known = -1
        while known != len(self._instants) + len(self._durations):
            known = len(self._instants) + len(self._durations)
            for target, value in _kept(function):
                names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
                if self._is_duration(value):
                    self._durations |= names
                elif self._is_instant(value):
                    self._instants |= names

    def compared(self) -> Iterator[ast.AST]:
        for node in ast.walk(self._function):
            operands: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                operands = [node.left, node.right]
            if sum(self._is_duration(each) for each in operands) > 1:
                yield node

    def _is_instant(self, value: ast.expr) -> bool:
        return any(_reads_clock(n) or (isinstance(n, ast.Name) and n.id in self._instants) for n in ast.walk(value))

    def _is_duration(self, value: ast.expr) -> bool:
        return any(
            (isinstance(n, ast.Name) and n.id in self._durations)
            or (isinstance(n, ast.BinOp) and isinstance(n.op, ast.Sub) and self._is_instant(n))
            for n in ast.walk(value)
        )


def _kept(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            yield node.func.value, node.args[0]


def _reads_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or node.args:
        return False
    called = ast.unparse(node.func)
    return called.rpartition(".")[2] in CLOCKS and called.startswith(("time.", *CLOCKS))


@pytest.mark.slow
def test_no_test_sleeps_or_compares_measured_times() -> None:
    """B2"""
    faults = [f"{p.relative_to(TESTS)} {f}" for p in sorted(TESTS.rglob("*.py")) for f in faults_of(p.read_text())]
    assert not faults, "\n".join(faults)


BEGIN = "    begin = time.perf_counter()\n    work()\n    one = time.perf_counter() - begin\n"


@pytest.mark.parametrize(
    "body",
    [
        BEGIN + "    begin = time.perf_counter()\n    other = time.perf_counter() - begin\n    assert one < other",
        BEGIN + "    assert (other := time.perf_counter() - begin) < 2 * one",
        BEGIN + "    took = [one]\n    took.append(time.perf_counter() - begin)\n    assert took[1] / one < 1.5",
        "    a = monotonic_ns()\n    b = monotonic_ns() - a\n    c = float(b)\n    assert max(b, 1) >= c",
        "    time.sleep(0.1)",
    ],
)
def test_a_comparison_of_measured_times_is_found(body: str) -> None:
    assert len(faults_of(f"def f():\n{body}")) == 1


@pytest.mark.parametrize(
    "body",
    [
        BEGIN + "    assert one < 20.0",
        "    deadline = time.monotonic() + 30\n    while time.monotonic() < deadline: work()",
        "    deadline = time.monotonic() + 30\n    event.wait(max(0.0, deadline - time.monotonic()))",
        "    first = stamp()\n    second = stamp()\n    assert first < second",
        "    clock.sleep(3)",
    ],
)
def test_a_deadline_a_constant_and_an_order_are_not(body: str) -> None:
    assert faults_of(f"def f():\n{body}") == []

"""Nothing in the package turns foreign bytes into code: every way to do so by accident is looked for in its source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmstage"

#: modules whose loaders run what they load, or hand out others that do
MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing")
#: functions that evaluate text, and methods that pickle behind one's back
CALLS = ("eval", "exec", "recv_pyobj", "send_pyobj", "read_pickle", "to_pickle")
#: ``numpy.load`` of an object array unpickles it unless it is told not to
LOADERS = ("np.load", "numpy.load")


def faults_of(source: str) -> list[str]:
    """Line and text of everything in ``source`` that could run foreign bytes."""
    return [f"line {node.lineno}: {ast.unparse(node)[:80]}" for node in ast.walk(ast.parse(source)) if _is_fault(node)]


def _is_fault(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in MODULES
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    safe = any(k.arg == "allow_pickle" and ast.unparse(k.value) == "False" for k in node.keywords)
    unsafe = any(k.arg == "allow_pickle" and ast.unparse(k.value) != "False" for k in node.keywords)
    return called.rpartition(".")[2] in CALLS or unsafe or (called in LOADERS and not safe)


@pytest.mark.slow
def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    """S71, S86: no pickle on any path, not even a lazy one."""
    faults = [f"{path.name} {f}" for path in sorted(PACKAGE.rglob("*.py")) for f in faults_of(path.read_text())]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import pickle",
        "from cloudpickle import loads",
        "import multiprocessing.shared_memory",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "np.savez(path, allow_pickle=wanted, a=a)",
        "socket.recv_pyobj()",
        "eval(text)",
    ],
)
def test_what_could_run_foreign_bytes_is_found(source: str) -> None:
    assert len(faults_of(source)) == 1


@pytest.mark.parametrize("source", ["import json", "np.load(path, allow_pickle=False)", "model.evaluate(x)", "load(x)"])
def test_what_cannot_is_not(source: str) -> None:
    assert faults_of(source) == []

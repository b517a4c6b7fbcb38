"""Layers are folders, doors are single: this test reads every import of the package, lazy ones too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "shmstage"

#: a module imports from its own layer and the ones above it in this list
LAYERS = [
    "base",
    "memory",
    "wire",
    "transport",
    "packing",
    "budget",
    "trainer",
    "adapters",
    "timeline",
    "orchestrator",
    "launch",
    "operate",
    "demo",
    "testing",
    "cli",
]
BASE = (
    "errors", "frozen", "tables", "settings", "settings_origins", "records", "events", "plugins", "child", "_native",
    "__init__",
)  # fmt: skip
#: package → the only folders (or files) that may import it
DOORS = {
    "msgpack": ("wire/",),
    "zmq": ("transport/",),
    "psutil": ("memory/",),
    "ray": ("launch/",),
    "prometheus_client": ("launch/",),
    "jax": ("trainer/", "adapters/", "demo/", "testing/engines"),
    "jaxlib": ("trainer/", "adapters/", "demo/", "testing/engines"),
    "optax": ("trainer/", "adapters/", "demo/", "testing/engines"),
    "orbax": ("trainer/", "adapters/"),
    "maxtext": (),
    "pickle": (),
    "cloudpickle": (),
    "multiprocessing": (),
}


def layer_of(relative: str) -> str:
    top = relative.split("/", maxsplit=1)[0].removesuffix(".py")
    return "base" if top in BASE else top


def imports_of(source: str) -> list[str]:
    """Dotted names of everything imported anywhere in ``source``, apart from ``if TYPE_CHECKING`` blocks."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.extend(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def faults_of(relative: str, source: str) -> list[str]:
    faults = []
    own = LAYERS.index(layer_of(relative))
    for name in imports_of(source):
        parts = name.split(".")
        if parts[0] in DOORS and not relative.startswith(DOORS[parts[0]]):
            faults.append(f"{relative} imports {name}: only {' '.join(DOORS[parts[0]]) or 'nobody'} may")
        if parts[0] == "shmstage" and len(parts) > 1:
            other = layer_of(parts[1])
            if other not in LAYERS:
                continue
            if LAYERS.index(other) > own:
                faults.append(f"{relative} imports {name}: {other} comes after {LAYERS[own]}")
            if layer_of(relative) == "orchestrator" and other in ("trainer", "adapters"):
                faults.append(f"{relative} imports {name}: the orchestrator knows no trainer")
    return faults


def test_every_folder_is_a_layer() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(LAYERS)


def test_modules_import_only_from_their_own_layer_and_those_above_and_through_the_one_door() -> None:
    faults = [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in faults_of(str(path.relative_to(PACKAGE)), path.read_text())
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("wire/codec.py", "from shmstage.transport.channel import Channel"),
        ("orchestrator/program.py", "def f():\n    import jax"),
        ("orchestrator/program.py", "from shmstage.trainer.worker import Worker"),
        ("transport/zmq.py", "import msgpack"),
        ("packing/plan.py", "import psutil.x"),
        ("wire/codec.py", "import pickle"),
    ],
)
def test_a_forbidden_import_is_found(relative: str, source: str) -> None:
    assert faults_of(relative, source)


def test_modules_stay_small() -> None:
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long

"""A runtime directory of each test's own, short enough that sockets really live in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_runtime_directory(nothing_survives: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fails a test that leaves a socket or a lock file behind."""
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base)
        left = [path for path in Path(base).rglob("*") if not path.is_dir()]
        assert not left, f"left behind: {left}"

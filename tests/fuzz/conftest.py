"""How many examples, and which: known before the test modules are imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "packing"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, help="examples per fuzz test; more than CI tries")
    parser.addoption("--fuzz-seed", type=int, help="other examples than those that are always the same")


def pytest_configure(config: pytest.Config) -> None:
    for option in ("fuzz-examples", "fuzz-seed"):
        value = config.getoption(f"--{option}", None)
        if value is not None:
            os.environ["SHMSTAGE_" + option.upper().replace("-", "_")] = str(value)

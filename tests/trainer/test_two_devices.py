from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "trainer.two_devices"],
        cwd=TESTS,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout)
    assert output["devices"] == 2
    return output


@pytest.mark.parametrize("split", ["rows", "tokens"])
def test_split_micro_batches_survive_poison_and_give_the_serial_bits(found: dict[str, Any], split: str) -> None:
    assert found[f"{split}.staged"] == found[f"{split}.serial"]


@pytest.mark.parametrize("order", ["serial", "staged"])
def test_no_later_step_compiles_again(found: dict[str, Any], order: str) -> None:
    assert found[f"rows.{order}.compiled"] == [1, 1]

"""What ``OptaxEngine(mesh, batch_spec)`` promises, on eight virtual devices: fsdp x tensor, and other axes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "ecosystem.models_on_eight_devices"],
        cwd=TESTS,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    output: dict[str, Any] = json.loads(result.stdout)
    assert output["devices"] == 8
    return output


@pytest.mark.parametrize("what", ["params", "mu", "nu", "sums"])
def test_parameters_moments_and_gradients_are_cut_alike_over_the_mesh(found: dict[str, Any], what: str) -> None:
    """No device holds more than its share, before and after a checkpoint is restored."""
    assert found["shares"][what] == found["wanted"]
    assert found["restored_shares"][what] == found["wanted"]


def test_micro_batches_are_cut_along_their_rows(found: dict[str, Any]) -> None:
    assert found["batch"] == ["P('fsdp',)"]


def test_what_a_mesh_trains_is_what_one_device_trains(found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["losses"], found["losses_on_one_device"], rtol=1e-4)


def test_a_checkpoint_of_a_sharded_model_is_restored_and_trained_on(found: dict[str, Any]) -> None:
    assert found["restored"] == [{"step": 3}, True]
    assert found["goes_on"] == [True, True]


def test_nothing_is_compiled_twice(found: dict[str, Any]) -> None:
    assert found["compiled"] == [[1, 1], [1, 1]]


def test_explicit_axes_train_if_the_loss_says_where_its_results_lie(found: dict[str, Any]) -> None:
    """Adam's first step is the learning rate, for the eight weights that were read."""
    np.testing.assert_allclose(found["clear"], [0.5] * 8 + [1.0] * 8, rtol=1e-4)


def test_explicit_axes_and_a_loss_that_does_not_say_are_an_error_with_both_remedies(found: dict[str, Any]) -> None:
    assert "have loss_fn say where such a result lies" in found["unclear"]
    assert "axis_types=(AxisType.Auto,) * n" in found["unclear"]


@pytest.mark.parametrize(
    ("optimizer", "shares"),
    [
        ("adafactor", {"(160,)": 1.0, "(128,)": 1.0}),  # factored moments have no parameter's shape: on every device
        ("schedule_free", {"(160, 128)": 1 / 8, "(128,)": 1.0}),
    ],
)
def test_the_state_of_other_optimizers_is_cut_where_it_has_a_parameters_shape(
    found: dict[str, Any], optimizer: str, shares: dict[str, float]
) -> None:
    assert found[optimizer] == shares


def test_state_that_begins_as_the_parameters_themselves_is_its_own_and_restored(found: dict[str, Any]) -> None:
    """Else the parameters would be given away twice in one update."""
    assert found["schedule_free_restored"]

"""The adapter for MaxText around the training engine of the package itself, on Python 3.12 (``adapters_venv.py``)."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import adapters_venv
import pytest
from maxtext_double import MaxTextDouble

HERE = Path(__file__).parent
#: a fourth of it on a core that nothing else wants
BUSY_S = 600.0
RUN = """
rows = 2
tokens = 256
microbatches_per_step = 2
steps = 2
start_timeout_s = 400
[engine]
factory = "maxtext_small:make_engine"
rows = 2
tokens = 256
"""


@pytest.fixture(scope="module")
def report() -> Any:
    """What the package does with two micro-batches, on two devices with the rows cut over them."""
    return adapters_venv.run(HERE / "maxtext_step.py", timeout_s=BUSY_S, devices=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_maxtext_computes_on_the_bits_that_lay_in_the_slot_as_our_own_engine_does(report: Any) -> None:
    step = report["step"]
    assert step["devices"] == 2
    assert step["cut"]
    assert len(set(step["slot"])) == 2
    assert step["seen"] == {"maxtext": step["slot"], "own": step["slot"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_step_of_maxtext_is_one_step_of_our_own_engine(report: Any) -> None:
    step = report["step"]
    assert step["parameters_moved"]
    assert step["maxtext"]["denominator"] == step["own"]["denominator"] > 0
    for name in ("loss", "grad_norm"):
        assert step["maxtext"][name] == pytest.approx(step["own"][name], rel=1e-5), name
    assert step["parameters_apart"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_maxtexts_checkpoints_resume_bit_for_bit_and_half_steps_are_dropped(report: Any) -> None:
    found = report["checkpoints"]
    assert found["none"] is None
    assert found["where"] == "small/checkpoints/1"
    assert found["found"] == [{"said": [1, "two"], "step": 1}] * 2
    assert found["equal"] == [True, True]
    assert found["kept"] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_double_has_the_signatures_of_the_package(report: Any) -> None:
    of_package = report["signatures"]
    assert {"fwd_bwd", "update", "get_metrics", "save_checkpoint", "prepare_weight_sync"} <= of_package.keys()
    for name, parameters in of_package.items():
        if name in ("__init__", "with_loss_fn", "with_gen_model_input_fn"):
            continue  # whoever makes the engine calls these, not the adapter
        assert [*inspect.signature(getattr(MaxTextDouble, name)).parameters] == parameters, name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_boundary_modes_train_the_same_with_maxtext(tmp_path: Path) -> None:
    python = adapters_venv.need()
    (tmp_path / "run.toml").write_text(RUN)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{adapters_venv.ROOT}:{HERE}"}
    command = [str(python), "-m", "shmstage.cli", "compare", "--config", "run.toml", "--out", "out", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    verdict = json.loads(done.stdout)
    assert verdict["equal"]
    assert verdict["problems"] == []
    assert len(verdict["modes"]) == 4

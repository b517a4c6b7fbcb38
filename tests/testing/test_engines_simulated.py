"""The simulated engine in the real worker: what it trains tells whether it was given the right things in order."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmstage.errors import EngineError, SettingsError
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import Settings
from shmstage.testing.engines_simulated import SimulatedEngine, SimulatedSettings, make_engine
from shmstage.testing.simulated_device import SimulatedDevice
from shmstage.testing.simulated_input import InputSettings, SimulatedSource, make_hooks, make_source
from tests.trainer.rig import rigged


def trained(batches: Iterable[int], per_step: int = 2) -> np.ndarray[Any, Any]:
    """The parameters after micro-batches with these contents."""
    engine = SimulatedEngine(SimulatedSettings())
    for number, content in enumerate(batches, 1):
        engine.fwd_bwd(engine.put({"x": np.full(4096, content, np.int32)}, {}))
        if number % per_step == 0:
            engine.update()
    params = np.array(engine.weights()["w"])
    engine.close()
    return params


def test_the_same_micro_batches_give_the_same_parameters_and_any_other_gives_others() -> None:
    plain = trained([1, 2, 3, 4])
    assert (trained([1, 2, 3, 4]) == plain).all()
    for changed in ([2, 1, 3, 4], [1, 2, 3, 5], [1, 2, 3, 3], [3, 4, 1, 2]):
        assert not (trained(changed) == plain).all()
    assert not (trained([1, 2, 3, 4], per_step=1) == plain).all()


def test_the_metrics_are_those_of_the_last_update_that_was_dispatched() -> None:
    engine = SimulatedEngine(SimulatedSettings())
    engine.fwd_bwd(engine.put({"completion_mask": np.ones((2, 8), np.float32)}, {}))
    engine.update()
    assert float(np.asarray(engine.metrics()["denominator"])) == 16.0
    engine.close()


def test_what_is_read_late_is_of_the_update_it_was_taken_from(tmp_path: Path) -> None:
    engine = SimulatedEngine(SimulatedSettings(checkpoint_dir=str(tmp_path)))

    def one_step(content: int) -> None:
        engine.fwd_bwd(engine.put({"completion_mask": np.full((2, 8), content, np.float32)}, {}))
        engine.update()

    one_step(1)
    metrics, weights, snapshot = engine.metrics(), engine.weights(), engine.save(1, {})
    params = np.array(weights["w"])
    one_step(2)
    later = np.array(engine.weights()["w"])
    assert [float(np.asarray(told["denominator"])) for told in (metrics, engine.metrics())] == [16.0, 32.0]
    assert (np.array(weights["w"]) == params).all() and not (later == params).all()
    snapshot.copy_to_host()
    snapshot.write()
    engine.restore()
    assert (np.array(engine.weights()["w"]) == params).all()
    engine.close()


def test_unknown_and_impossible_settings_are_refused() -> None:
    with pytest.raises(SettingsError, match="speed"):
        make_engine({"speed": 3})
    with pytest.raises(SettingsError, match="two deep"):
        make_engine({"blocks": "sometimes"})
    with pytest.raises(SettingsError, match="keeps = 'nothing'.*hashes"):
        make_engine({"keeps": "nothing"})
    with pytest.raises(SettingsError, match="routings = -1"):
        make_source({"rows": 1, "tokens": 4, "routings": -1})
    with pytest.raises(SettingsError, match="update_s = -1"):
        make_engine({"update_s": -1})
    with pytest.raises(SettingsError, match="top_k"):
        make_source({"rows": 1, "tokens": 4, "layers": 1, "top_k": 9, "experts": 16})
    with pytest.raises(SettingsError, match="rowz"):
        make_source({"rowz": 1})


def test_the_input_fills_every_row_and_is_the_same_in_any_process() -> None:
    settings = InputSettings(rows=8, tokens=32, microbatches=2, layers=3, top_k=4, experts=64)
    first, second = (list(SimulatedSource(settings).groups(0)) for _ in range(2))
    digests = [[t.digest for group in groups for t in group.trajectories] for groups in (first, second)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 16
    assert all(t.length == 32 for group in first for t in group.trajectories)


def test_trajectories_may_share_routing_and_are_still_told_apart() -> None:
    settings = InputSettings(rows=8, tokens=32, microbatches=2, layers=3, top_k=4, experts=64, routings=2)
    made = [t for group in SimulatedSource(settings).groups(0) for t in group.trajectories]
    assert len({t.digest for t in made}) == 16
    assert made[0].routing is not None and made[2].routing is not None and made[1].routing is not None
    assert np.shares_memory(made[0].routing, made[2].routing) and (made[0].routing != made[1].routing).any()


def test_a_device_that_keeps_hashes_trains_the_same_and_has_no_bytes_to_show() -> None:
    views = {"x": np.arange(100_003, dtype=np.int8), "completion_mask": np.ones((2, 8), np.float32)}
    params = []
    for keeps in ("copies", "hashes"):
        engine = make_engine({"keeps": keeps})
        batch = engine.put(views, {})
        engine.fwd_bwd(batch)
        engine.update()
        assert float(np.asarray(engine.metrics()["denominator"])) == 16.0
        params.append(np.array(engine.weights()["w"]).tobytes())
        engine.close()
    assert params[0] == params[1]
    with pytest.raises(EngineError, match="x are not kept"):
        np.asarray(batch["x"])


def test_a_slot_is_kept_until_the_paced_upload_has_read_it() -> None:
    """S44: a lease ends when the copy is proven over, not when the call returns."""
    going_on = threading.Event()

    def gated() -> SimulatedEngine:
        device = SimulatedDevice(upload_gbps=1.0, sleep_until=lambda ns: going_on.wait(30.0) and None)
        return SimulatedEngine(SimulatedSettings(), device)

    with rigged(gated, slots=2) as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("fwd_bwd", handle=handle)
        kept = rig.pool.free_slot_count() == 1
        going_on.set()
        assert kept
        rig.token("staged", handle.request_id)
        assert rig.pool.free_slot_count() == 2
        rig.token("update", "update.1")


def test_a_checkpoint_is_restored_with_its_parameters(tmp_path: Path) -> None:
    settings = SimulatedSettings(checkpoint_dir=str(tmp_path))
    with rigged(lambda: SimulatedEngine(settings)) as rig:
        rig.train_step(1)
        rig.ticket(rig.call("save_checkpoint", step=1, metadata={"note": "kept"}))
        digest = rig.digest()
        rig.train_step(2)
        restored = rig.call("restore_checkpoint", at_most=1)
        assert (restored["step"], restored["metadata"]["note"]) == (1, "kept")
        assert rig.digest() == digest


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_order_trains_the_same_through_the_real_launcher(tmp_path: Path) -> None:
    """The rig's own check: real orchestrator, real shared memory, real worker, and the device's record beside them."""
    digests = set()
    for mode, blocks in (
        ("serial", "never"),
        ("staged_before_update", "never"),
        ("staged_after_update", "two deep"),
        ("staged_before_update", "until last done"),
    ):
        out = tmp_path / f"{mode} {blocks}"
        engine = {"microbatch_s": 0.004, "update_s": 0.001, "blocks": blocks, "settles": blocks != "never"}
        settings = Settings(
            run=f"sim-{os.getpid()}", out=out, boundary=mode, rows=8, tokens=32, steps=4,  # type: ignore[arg-type]
            microbatches_per_step=2, checkpoint_every=1, weight_sync="async",
            engine="shmstage.testing.engines_simulated:make_engine",
            engine_settings={**engine, "record": str(out / "device.json")},
            source="shmstage.testing.simulated_input:make_source",
            source_settings={"rows": 8, "tokens": 32, "layers": 2, "top_k": 2, "experts": 16},
            hooks="shmstage.testing.simulated_input:make_hooks", hooks_settings={"bookkeeping_s": 0.001},
        )  # fmt: skip
        summary = run(completed(settings), Quiet())
        digests.add((summary["param_digest"], tuple(summary["denominators"]), tuple(summary["losses"])))
        device = json.loads((out / "device.json").read_text())
        assert [b["step"] for b in device["boundaries"]] == [1, 2, 3]
        assert len(device["uploads"]) == 8 and not any(op["error"] for op in device["compute"])
    assert len(digests) == 1


class Quiet:
    def poll(self) -> None:
        return


def test_the_hook_takes_its_time() -> None:
    assert make_hooks({}).on_step_end({}) is None

"""Runs inside the adapters' environment: the same micro-batches through MaxText's engine and through ``OptaxEngine``,
and the adapter's checkpoints; prints what it found as one line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import maxtext_small as small
import numpy as np
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.training_engine.abstract_engine import AbstractTrainingEngine

import shmstage
from shmstage.memory.layout import Layout
from shmstage.testing.engines_placing import place_private_copies
from shmstage.trainer.digests import param_digest, payload_digest

ROWS, TOKENS = 4, 32
FIELDS = {
    "segment_ids": "int32",
    "segment_positions": "int32",
    "completion_ids": "int32",
    "completion_mask": "float32",
    "advantages": "float32",
    "old_per_token_logps": "float32",
}
SPECS = {name: (dtype, (ROWS, TOKENS)) for name, dtype in FIELDS.items()}


def packed(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shape = (ROWS, TOKENS)
    arrays = {
        "segment_ids": np.repeat([[1] * 17 + [2] * 11 + [0] * 4], ROWS, axis=0),
        "segment_positions": np.repeat([[*range(17), *range(11), 0, 0, 0, 0]], ROWS, axis=0),
        "completion_ids": random.integers(0, small.VOCABULARY, shape),
        "completion_mask": random.integers(0, 2, shape),
        "advantages": random.normal(size=shape),
        "old_per_token_logps": -4 + random.random(shape),
    }
    return {name: array.astype(FIELDS[name]) for name, array in arrays.items()}


def through_shared_memory(seeds: list[int]) -> list[dict[str, np.ndarray]]:
    """Each micro-batch as a reader of a slot sees it."""
    found = []
    with shmstage.Producer("maxtext-step", SPECS, slots=2) as producer, shmstage.Consumer("maxtext-step") as consumer:
        leases = iter(consumer)
        for seed in seeds:
            slot = producer.acquire(timeout_s=60)
            for name, array in packed(seed).items():
                slot.views[name][:] = array
            slot.publish(step=seed)
            lease = next(leases)
            found.append({name: np.array(view) for name, view in lease.views.items()})
            lease.end()
    return found


def digest(arrays: Mapping[str, Any]) -> str:
    return payload_digest({name: np.asarray(arrays[name]) for name in FIELDS})


def told(engine: Any) -> dict[str, float]:
    return {name: float(value) for name, value in engine.metrics().items()}


def both(microbatches: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """One step of each engine, from the same parameters; what their losses were called with, seen from inside."""
    seen: dict[str, list[str]] = {"maxtext": [], "own": []}

    def note(which: str, batch: Mapping[str, Any]) -> None:
        seen[which].append(digest(batch))

    def maxtext_loss(model: Any, **batch: jax.Array) -> Any:
        jax.debug.callback(functools.partial(note, "maxtext"), batch)
        return small.policy_loss(model, **batch)

    config = small.configuration(ROWS, TOKENS, None)
    adapter, engine, mesh = small.adapted(config, maxtext_loss)
    graph, params, rest = nnx.split(engine.model, nnx.Param, ...)

    def own_loss(params: Any, batch: Mapping[str, jax.Array]) -> Any:
        jax.debug.callback(functools.partial(note, "own"), dict(batch))
        return *small.policy_sums(nnx.merge(graph, params, rest, copy=True), batch), {}

    from maxtext.utils.train_utils import create_training_optimizer

    optimizer = create_training_optimizer(config, engine.model, mesh=mesh)[1]
    spec = small.get_input_data_sharding(config, mesh).spec
    layout = Layout.of(SPECS)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        own = shmstage.OptaxEngine(own_loss, params, optimizer, mesh=mesh, batch_spec=spec)
        seen["own"].clear()
    before = param_digest(adapter)
    shardings = adapter.shardings(layout)
    assert shardings == own.shardings(layout)
    for arrays in microbatches:
        token = adapter.fwd_bwd(place_private_copies(arrays, shardings))
        assert isinstance(token, jax.Array)
        token.block_until_ready()
        jax.effects_barrier()  # one after the other: on several devices these notes have no order
    adapter.update().block_until_ready()
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        for arrays in microbatches:
            own.fwd_bwd(place_private_copies(arrays, shardings)).block_until_ready()
            jax.effects_barrier()
        own.update().block_until_ready()
    apart = [
        float(np.max(np.abs(np.asarray(one) - np.asarray(other))))
        for one, other in zip(adapter.weights().values(), own.weights().values(), strict=True)
    ]
    return {
        "slot": [digest(arrays) for arrays in microbatches],
        "seen": seen,
        "maxtext": told(adapter),
        "own": told(own),
        "parameters_apart": max(apart),
        "parameters_moved": before != param_digest(adapter),
        "devices": len(next(iter(shardings.values())).device_set),
        "cut": not next(iter(shardings.values())).is_fully_replicated,
    }


def checkpoints(microbatches: list[dict[str, np.ndarray]], directory: Path) -> dict[str, Any]:
    """Two steps; and again from the first one's checkpoint, in a new engine, and after half a step in the same."""

    def made() -> Any:
        return small.make_engine({"rows": ROWS, "tokens": TOKENS, "checkpoint_dir": directory})

    def step(engine: Any) -> dict[str, Any]:
        shardings = engine.shardings(Layout.of(SPECS))
        for arrays in microbatches:
            engine.fwd_bwd(place_private_copies(arrays, shardings))
        engine.update().block_until_ready()
        return {**told(engine), "parameters": param_digest(engine)}

    def save(engine: Any, number: int) -> Any:
        snapshot = engine.save(number, {"said": [1, "two"]})
        snapshot.copy_to_host()
        return snapshot.write()

    first = made()
    none = first.restore()
    save(first, 0)
    step(first)
    where = save(first, 1)
    wanted = step(first)
    second = made()
    found = second.restore()
    after_restart = step(second)
    shardings = second.shardings(Layout.of(SPECS))
    second.fwd_bwd(place_private_copies(microbatches[0], shardings))
    again = second.restore()
    after_half_a_step = step(second)
    save(second, 2)
    second.close()
    kept = sorted(int(entry.name) for entry in Path(where["path"]).parent.iterdir() if entry.name.isdecimal())
    return {
        "none": none,
        "where": str(Path(where["path"]).relative_to(directory)),
        "found": [found, again],
        "equal": [wanted == after_restart, wanted == after_half_a_step],
        "kept": kept,
    }


def signatures() -> dict[str, list[str]]:
    """Parameters of what the package's abstract engine asks for, as its real engine has them."""
    asked = sorted(AbstractTrainingEngine.__abstractmethods__ - {"train_step"})
    return {name: [*inspect.signature(getattr(small.MaxTextTrainingEngine, name)).parameters] for name in asked}


def main() -> None:
    microbatches = through_shared_memory([1, 2])
    with contextlib.redirect_stdout(sys.stderr):  # MaxText prints
        report = {"signatures": signatures(), "step": both(microbatches)}
        with tempfile.TemporaryDirectory() as directory:
            report["checkpoints"] = checkpoints(microbatches, Path(directory))
    print(json.dumps(report))


if __name__ == "__main__":
    main()

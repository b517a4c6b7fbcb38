"""Run by ``test_distributed.py``, once per host: one JSON object in the file named last.

    python -m trainer.one_of_several RANK HOSTS PORT WHAT DIRECTORY... OUTPUT

``WHAT`` is train or restore. Loopback stands for the network; every process has two virtual devices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from trainer.packed_by_seed import packed_layout, packed_microbatch
from trainer.rig import Rig, microbatch, rigged
from trainer.test_poison import poison

from shmstage.demo.engine import make_engine
from shmstage.errors import EngineError
from shmstage.memory.layout import Layout
from shmstage.testing.engines import toy_layout, toy_logps, toy_loss
from shmstage.trainer.distributed import join, said_by_first
from shmstage.trainer.host_copy import host_copy
from shmstage.trainer.optax_engine import OptaxEngine
from shmstage.trainer.ranges import ranges_of

MODEL = {"policy": "fresh", "d_model": 16, "layers": 1, "heads": 2, "d_ff": 32}
#: of the demo's fields, the one that is recomputed
LATE = ("old_per_token_logps",)


def demo(directory: Path) -> OptaxEngine:
    return make_engine({**MODEL, "checkpoint_dir": str(directory / "demo")})


def toy(spread: bool) -> Callable[[Path], OptaxEngine]:
    """A mesh of rows x tokens. ``spread``: each host has half the tokens of all rows, else half the rows."""

    def make(directory: Path) -> OptaxEngine:
        mesh = None
        if jax.process_count() > 1:
            devices = np.array(jax.devices()).reshape(2, 2)
            mesh = jax.sharding.Mesh(devices.T if spread else devices, ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
        params = {"b": jnp.zeros(()), "w": jnp.linspace(-1, 1, 32)}
        spec = PartitionSpec("data", "seq")
        at = directory / ("spread" if spread else "rows")
        return OptaxEngine(toy_loss, params, optax.adam(1e-2), mesh, spec, at, logps_fn=toy_logps)

    return make


PACKED = Layout.of({f.name: (f.dtype, f.shape) for f in packed_layout(8, 24).fields}, LATE)
CASES: dict[str, tuple[Callable[[Path], OptaxEngine], Layout, Any]] = {
    "demo": (demo, PACKED, packed_microbatch),
    "rows": (toy(False), toy_layout(late=True), microbatch),
    "spread": (toy(True), toy_layout(late=True), microbatch),
}


class Host:
    """A case as this process sees it: its engine, the whole micro-batches, and its part of them."""

    def __init__(self, case: str, directory: Path) -> None:
        make, self.whole, self.content = CASES[case]
        self.engine = make(directory)
        self.told: Any = ranges_of(self.whole, self.engine.shardings(self.whole)).as_facts()

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        ranges = self.told["ranges"]
        specs = {f.name: (f.dtype, tuple(end - begin for begin, end in ranges[f.name])) for f in self.whole.fields}
        several = self.whole if jax.process_count() > 1 else None
        local = Layout.of(specs, self.whole.late_names)
        with rigged(
            lambda: self.engine, opened=False, aux_slots=1, layout=local, whole=several, content=self.part,
            verify="full",
        ) as rig:  # fmt: skip
            assert rig.call("ranges", layout=self.whole.to_wire()) == self.told
            yield rig

    def part(self, layout: Layout, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        whole = self.content(self.whole, seed)
        return {name: array[self.here(name)] for name, array in whole.items()}

    def here(self, name: str) -> tuple[slice, ...]:
        return tuple(slice(*pair) for pair in self.told["ranges"][name])


def trained(rig: Rig, host: Host) -> dict[str, Any]:
    """Three steps, staged before the update; slots and buffers are overwritten as soon as they are free."""
    steps, scores = [], []
    late = host.whole.late_names[0]
    rectangle = tuple((begin, end) for begin, end in host.told["ranges"][late])
    rig.call("compile", layout_id=rig.layout.layout_id, uses=["train", "evaluate", "score"])
    for step in (1, 2, 3):
        for index in (0, 1, 2):
            handle = rig.publish(step, index, final=index == 2)
            rig.call("stage_fwd_bwd", handle=handle)
            poison(rig)
            if index == 0 and step > 1:
                steps.append(updated(rig, step - 1))
            told = rig.ticket(rig.call("per_token_logps", request_id=handle.request_id, role="actor"))
            assert told.ok, told.error
            assert told.value["written"]
            rig.call("patch_staged", request_id=handle.request_id, fields=[late], loss_tokens=1)
            stage = rig.worker._stepper.stage
            assert stage is not None
            assert stage.lease is None or late in stage.patched
            scores.append(np.asarray(host_copy(stage.batch.arrays[late], rectangle)).tolist())
            del stage
            poison(rig)
            rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=index == 2)
            poison(rig)
    steps.append(updated(rig, 3))
    saved = rig.ticket(rig.call("save_checkpoint", step=3, metadata={"note": 7}))
    assert saved.ok, saved.error
    evaluated = rig.ticket(rig.call("eval_step", handle=rig.publish(3, 9, aux=True)))
    assert evaluated.ok, evaluated.error
    published = rig.ticket(rig.call("prepare_weight_sync", version=3))
    assert published.ok, published.error
    return {
        "steps": steps,
        "scores": scores,
        "evaluated": evaluated.value,
        "digest": rig.digest(),
        "weights": {name: host_copy(array).tolist() for name, array in rig.engine.weights().items()},
        "wrote": saved.value["path"] != "",
        "ranges": host.told["ranges"],
        "tiles": host.told["tiles"],
    }


def updated(rig: Rig, step: int) -> dict[str, Any]:
    rig.call("apply_deferred_update")
    return dict(rig.ticket(rig.call("get_metrics", step=step)).value)


def restored(rig: Rig) -> dict[str, Any]:
    told = rig.call("restore_checkpoint")
    return {"step": told["step"], "note": told["metadata"]["note"], "digest": rig.digest()}


def begun(rig: Rig) -> None:
    assert rig.call("restore_checkpoint")["step"] is None
    first = rig.ticket(rig.call("save_checkpoint", step=0, metadata={}))
    assert first.ok, first.error


def refused() -> list[str]:
    """What is said about parameters of which each host has a part, and about an engine that does not span the hosts."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    weights = jax.make_array_from_callback(
        (32,), NamedSharding(mesh, PartitionSpec("data")), lambda index: np.zeros(32, np.float32)[index]
    )
    said = []
    for params, over in (({"b": jnp.zeros(()), "w": weights}, mesh), ({"b": jnp.zeros(()), "w": jnp.zeros(32)}, None)):
        try:
            OptaxEngine(toy_loss, params, optax.sgd(1e-2), over, PartitionSpec("data"))
        except EngineError as error:
            said.append(str(error))
    return said


def main() -> None:
    rank, hosts, port = map(int, sys.argv[1:4])
    what, *directories, output = sys.argv[4:]
    if hosts > 1:
        join(f"127.0.0.1:{port}", rank=rank, hosts=hosts, bind="127.0.0.1", timeout_s=60.0)
    found: dict[str, Any] = {"devices": [len(jax.local_devices()), len(jax.devices())]}
    for directory in map(Path, directories):
        for case in CASES:
            host = Host(case, directory)
            with host.rig() as rig:
                if what == "restore":
                    found[f"{directory.name}.{case}"] = restored(rig)
                else:
                    begun(rig)
                    found[case] = trained(rig, host)
    if hosts > 1:
        found["refused"] = refused()
        found["agreed"] = [said_by_first("test", [3, 9][rank]), said_by_first("test", [None, 1][rank])]
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

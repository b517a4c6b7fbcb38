"""What ``memory.py`` measures: plug-ins that wait until a baseline has been read, and the same over gRPC.

Both children of a run build what they need before any payload moves (the trajectories, the engine with its programs
compiled), say so by a file in the gate's directory and go no further until there is one named ``go``: the orchestrator
makes its pool only after that, and the trainer is attached to it.

    engine = "memory_rig:make_engine", source = "memory_rig:make_source"
    python bench/memory_rig.py SETTINGS_AS_JSON     (the orchestrator's role over gRPC)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shmstage.errors import WaitTimeoutError
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.source import Source
from shmstage.packing.trajectory import Group
from shmstage.records import write_json
from shmstage.testing.simulated_input import InputSettings, SimulatedSource

GO = "go"
ROLES = ("orchestrator", "trainer")
POLL_S = 0.002
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Gate:
    """A directory: a file per role that is ready, and one that lets them go on."""

    directory: Path

    def ready(self, role: str) -> None:
        (self.directory / role).touch()

    def wait(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not (self.directory / GO).exists():
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"nobody wrote {self.directory / GO} within {DEADLINE_S:g} s")
            time.sleep(POLL_S)

    def everybody_is_ready(self) -> bool:
        return all((self.directory / role).exists() for role in ROLES)

    def open(self) -> None:
        (self.directory / GO).touch()


# --- plug-ins -------------------------------------------------------------------------------------------------


def make_source(settings: Mapping[str, Any]) -> Source:
    """``gate``, ``hold_nbytes`` (kept on purpose: what a leak would look like), the rest is ``InputSettings``'s."""
    own = dict(settings)
    gate, hold_nbytes = Gate(Path(own.pop("gate"))), own.pop("hold_nbytes", 0)
    source = SimulatedSource(InputSettings(**own))
    gate.ready("orchestrator")
    gate.wait()
    return Holding(source, hold_nbytes)


class Holding:
    """Another source, and so many bytes that nobody needs."""

    replayable = True

    def __init__(self, source: Source, nbytes: int) -> None:
        self._source = source
        self._kept = np.ones(nbytes, np.uint8)  # ones: pages of zeros would not be there until they are written

    def groups(self, cursor: int) -> Iterator[Group]:
        return iter(self._source.groups(cursor))


def make_engine(settings: Mapping[str, Any]) -> Any:
    """``gate``, ``kind`` and ``input`` (as ``InputSettings``); the rest is the simulated engine's."""
    own = dict(settings)
    gate, kind, given = Gate(Path(own.pop("gate"))), own.pop("kind"), InputSettings(**own.pop("input"))
    if kind == "simulated":
        from shmstage.testing.engines_simulated import make_engine as make_simulated

        engine = make_simulated(own)
    else:
        engine = _compiled_optax_engine(given, own["checkpoint_dir"])
    gate.ready("trainer")
    return engine


def _compiled_optax_engine(given: InputSettings, checkpoint_dir: str | None) -> Any:
    """The engine that ships, with a loss that reads every byte of a micro-batch and needs no memory for it."""
    import jax
    import jax.numpy as jnp
    import optax

    from shmstage.trainer.jax_seam import struct
    from shmstage.trainer.optax_engine import OptaxEngine

    layout = layout_of(given)
    order = [field.name for field in layout.fields]

    def loss_fn(params: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, Any, Any]:
        # each in its own dtype, wrapping around: XLA would write a converted copy of a field down, twice its size
        sums = jnp.stack([jnp.sum(batch[name], dtype=batch[name].dtype).astype(jnp.float32) for name in order])
        return jnp.sum(params["w"] * sums), jnp.sum(batch["completion_mask"]), {}

    params = {"w": np.ones(len(order), np.float32)}
    engine = OptaxEngine(loss_fn, params, optax.sgd(1e-3), checkpoint_dir=checkpoint_dir)
    shardings = engine.shardings(layout)
    engine.compile({field.name: struct(field.shape, field.dtype, shardings[field.name]) for field in layout.fields})
    return engine


def layout_of(given: InputSettings) -> Any:
    """The slot's, as the orchestrator derives it from the first trajectory."""
    optional = frozenset({"routing"}) if given.layers else frozenset()
    return microbatch_layout(given.rows, given.tokens, optional=optional, layers=given.layers, top_k=given.top_k)


# --- over gRPC ------------------------------------------------------------------------------------------------


def orchestrate_over_grpc(said: Mapping[str, Any]) -> None:
    """The orchestrator of ``grpc_path`` in a process of its own, as ours is; ``OUT/run.json`` names both.

    Its loop is left as it is: it starts its trainer, then makes its source, which waits here as ours does, then buffers
    and channel. The trajectories are in the baseline, the buffers are not.
    """
    import grpc_path

    gate, out, given = Gate(Path(said["gate"])), Path(said["out"]), InputSettings(**said["input"])
    trainers: list[int] = []

    class Popen(subprocess.Popen[Any]):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            trainers.append(self.pid)

    def make(self: SimulatedSource, settings: InputSettings) -> None:
        make_ungated(self, settings)
        _wait_until_listening(trainers[0])
        write_json(out / "run.json", {"pids": {"orchestrator": os.getpid(), "trainer": trainers[0]}})
        gate.ready("trainer")
        gate.ready("orchestrator")
        gate.wait()

    threading.Thread(target=_end_with_the_bench, args=(trainers,), daemon=True).start()
    make_ungated = SimulatedSource.__init__
    subprocess.Popen = Popen  # type: ignore[misc]
    SimulatedSource.__init__ = make  # type: ignore[method-assign]
    plan = grpc_path.Plan(said["mode"], said["steps"], said["microbatches"], False, 0.0)
    found = grpc_path.run(plan, given, said["engine"], unary=said["unary"])
    write_json(out / "summary.json", {"param_digest": found["param_digest"]})


def _end_with_the_bench(trainers: list[int]) -> None:
    sys.stdin.read()
    for pid in trainers:
        os.kill(pid, signal.SIGKILL)
    os._exit(1)


def _wait_until_listening(pid: int) -> None:
    """A server listens when its engine is there."""
    process, deadline = psutil.Process(pid), time.monotonic() + DEADLINE_S
    while not any(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp")):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"the trainer {pid} did not listen within {DEADLINE_S:g} s")
        time.sleep(POLL_S)


if __name__ == "__main__":
    orchestrate_over_grpc(json.loads(sys.argv[1]))

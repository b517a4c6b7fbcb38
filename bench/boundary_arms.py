"""The arms of ``boundary.py``: one run of each, and what it said of itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boundary_checks import estimate_errors_s, event_errors_s

from shmstage.events import FOLDER
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import Settings
from shmstage.testing.engines_simulated import PLATFORM
from shmstage.testing.simulated_input import InputSettings
from shmstage.timeline.boundaries import boundaries_of
from shmstage.timeline.microbatches import attempts_of
from shmstage.timeline.reading import read_events

#: arm → (how payloads travel, order of the commands); STRONGER becomes the stronger of "grpc" and "unary"
STRONGER = "stronger"
ARMS = {
    "A0": (STRONGER, "serial"),
    "A0'": (STRONGER, "serial"),
    "A0s": ("grpc", "serial"),
    "U0": ("unary", "serial"),
    "S0": ("shm", "serial"),
    "A1": ("shm", "pipelined"),
    "A2": ("shm", "staged_after_update"),
    "A3": ("shm", "staged_before_update"),
    "G1": ("grpc", "pipelined"),
    "G2": ("grpc", "staged_after_update"),
    "G3": ("grpc", "staged_before_update"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "saved": {},
    "settling": {"settles": True},
    "blocking": {"settles": True, "blocks": "until last done"},
    "two-deep": {"blocks": "two deep"},
}
ROWS, LAYERS, TOP_K, EXPERTS = 64, 60, 10, 512
#: four fields of a trajectory, segment ids and positions, in 4 bytes each; routing in int16
WORDS_NBYTES, ROUTING_NBYTES = 4 * 4, 2 * LAYERS * TOP_K
TOKEN_NBYTES = WORDS_NBYTES + 2 * 4 + ROUTING_NBYTES
#: the reference's, in seconds and bytes per second
MICROBATCH_S, UPDATE_S, BOOKKEEPING_S, UPLOAD_NBYTES_PER_S = 13.38, 1.5, 5.75, 5.15e9 / 3.7
#: it also says how long a payload takes to the trainer's host, and then onto the device
ARRIVAL_S, PLACING_S = (4.0, 7.6), 3.7
CHECKPOINT_S = 5.0
#: beyond this an uploaded payload is not kept, there are two of them, and most trajectories share routing
LARGE_NBYTES = 1_000_000_000
LARGE_ROUTINGS = 16
#: boundaries of a run that are left out: everything is touched for the first time there
WARM_UP = 1


@dataclass(frozen=True)
class Rig:
    """One scale: what the device takes, what it is given, and how many places there are for it."""

    scale: float
    source: InputSettings
    slots: int = 3
    device_buffers: int = 2

    @classmethod
    def of(cls, scale: float, payload_nbytes: float, *, slots: int = 3, device_buffers: int = 2) -> Rig:
        tokens = max(2, round(payload_nbytes / scale / (ROWS * TOKEN_NBYTES)))
        large = ROWS * tokens * TOKEN_NBYTES > LARGE_NBYTES
        routing = {"layers": LAYERS, "top_k": TOP_K, "experts": EXPERTS, "routings": LARGE_ROUTINGS if large else 0}
        source = InputSettings(ROWS, tokens, microbatches=2 if large else 3, **routing)
        return cls(scale, source, slots, device_buffers)

    @property
    def payload_nbytes(self) -> int:
        return self.source.rows * self.source.tokens * TOKEN_NBYTES

    @property
    def keeps(self) -> str:
        """What the device keeps of an upload in this machine's memory."""
        return "hashes" if self.payload_nbytes > LARGE_NBYTES else "copies"

    def engine(self, variant: str, record: Path) -> dict[str, Any]:
        return {
            "microbatch_s": MICROBATCH_S / self.scale,
            "update_s": UPDATE_S / self.scale,
            "upload_gbps": UPLOAD_NBYTES_PER_S / 1e9,
            "checkpoint_s": CHECKPOINT_S / self.scale,
            "keeps": self.keeps,
            "record": str(record),
            **VARIANTS[variant],
        }


def measured(
    rig: Rig, path: str, mode: str, variant: str, microbatches: int, steps: int, out: Path, events: Path | None = None
) -> dict[str, Any]:
    """One run: what the device says of its boundaries, in seconds, and what was trained.

    ``events``: where what ``shmstage report`` reads is kept, with the device's record.
    """
    if path == "shm":
        result = _over_shared_memory(rig, mode, variant, microbatches, steps, out)
    else:
        result = _over_grpc(rig, mode, variant, microbatches, steps, out, unary=path == "unary")
    device = json.loads((out / "device.json").read_text())
    if path == "shm":
        found = [b for attempt in attempts_of(read_events(out)) for b in boundaries_of(attempt)]
        result["event_errors_s"] = event_errors_s({b.before.step: b.idle for b in found}, device["boundaries"])
        if events is not None:
            _keep_events(out, events / out.name)
    shutil.rmtree(out)
    lines = result.pop("lines", None)
    if lines is not None:
        result["estimate_error_s"] = estimate_errors_s(lines, device["boundaries"])
    kept = device["boundaries"][WARM_UP:]
    return {
        **result,
        "device": device,
        "idle_s": [b["idle_ns"] / 1e9 for b in kept],
        "step_s": [b["step_ns"] / 1e9 for b in kept],
        "placed_s": [(op["end_ns"] - op["begin_ns"]) / 1e9 for op in device["uploads"]],
        "told_late_s": max(op["late_ns"] for op in device["compute"]) / 1e9,
    }


def _over_shared_memory(
    rig: Rig, mode: str, variant: str, microbatches: int, steps: int, out: Path
) -> dict[str, Any]:
    saved = variant == "saved"
    settings = Settings(
        run=f"bench-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=rig.source.rows, tokens=rig.source.tokens, steps=steps, microbatches_per_step=microbatches,
        slots=rig.slots, aux_slots=0, device_buffers=rig.device_buffers,
        checkpoint_every=int(saved), weight_sync="async" if saved else "off",
        engine="shmstage.testing.engines_simulated:make_engine",
        engine_settings=rig.engine(variant, out / "device.json"),
        source="shmstage.testing.simulated_input:make_source", source_settings=asdict(rig.source),
        hooks="shmstage.testing.simulated_input:make_hooks",
        hooks_settings={"bookkeeping_s": BOOKKEEPING_S / rig.scale},
    )  # fmt: skip
    with _platform(PLATFORM if rig.keeps == "hashes" else "cpu"):
        summary = run(completed(settings), _Quiet())
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return {
        "param_digest": summary["param_digest"],
        "denominators": summary["denominators"],
        "losses": summary["losses"],
        "reported_idle_s": summary["boundary_idle_s"],
        "staged": summary["staged_boundaries"],
        "pack_s": [line["pack_s"] / microbatches for line in lines],
        "lines": lines,
    }


def _keep_events(out: Path, kept: Path) -> None:
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(out / FOLDER, kept / FOLDER)
    for name in ("run.json", "steps.jsonl", "summary.json", "device.json"):
        shutil.copy(out / name, kept / name)


def _over_grpc(
    rig: Rig, mode: str, variant: str, microbatches: int, steps: int, out: Path, *, unary: bool
) -> dict[str, Any]:
    from grpc_path import Plan
    from grpc_path import run as run_over_grpc

    out.mkdir(parents=True)
    plan = Plan(mode, steps, microbatches, variant == "saved", BOOKKEEPING_S / rig.scale, rig.device_buffers)
    return run_over_grpc(plan, rig.source, rig.engine(variant, out / "device.json"), unary=unary)


@contextmanager
def _platform(name: str) -> Iterator[None]:
    """For the budget of a run: on ``cpu`` what the device holds is memory of this machine."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = name
    try:
        yield
    finally:
        del os.environ["JAX_PLATFORMS"]
        if before is not None:
            os.environ["JAX_PLATFORMS"] = before


class _Quiet:
    def poll(self) -> None:
        return

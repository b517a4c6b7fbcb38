"""What is packed in ``pack.py``: length lists, trajectories, warm shared memory, and arms that alternate."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmstage import _native
from shmstage.packing.fields import SEGMENT_IDS, SEGMENT_POSITIONS, carried_fields
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.trajectory import Trajectory

LENGTHS = Path(__file__).resolve().parents[2] / "shared" / "reference" / "lengths"
#: tokens of a row, as each list is used
ROWS_OF = {"gsm8k": 2048, "humaneval": 1024, "codeio": 8192, "agent_sessions": 131072}
OPTIONAL = frozenset({"ref_logprobs"})
Views = dict[str, npt.NDArray[Any]]


def read_lengths(path: Path, longest: int) -> list[int]:
    pairs = json.loads(path.read_text())["pairs"]
    return [length for prompt, completion in pairs if 0 < (length := prompt + completion) <= longest]


def plan_all(lengths: Sequence[int], tokens: int) -> PlannedMicrobatch:
    """All of them as one micro-batch with no more rows than it takes."""
    rows = len(lengths)
    for _ in range(2):
        planner = Planner(PlanSettings(rows=rows, tokens=tokens))
        for arrival, length in enumerate(lengths):
            planner.add(arrival, length)
        (plan,) = planner.flush()
        rows = sum(bool(row.segments) for row in plan.rows)
    return plan


def trajectory(number: int, length: int, dice: np.random.Generator, **more: Any) -> Trajectory:
    floats = {name: dice.random(length, np.float32) for name in ("advantages", "old_logprobs", *sorted(OPTIONAL))}
    tokens = dice.integers(0, 1 << 17, length, dtype=np.int32)
    mask = np.ones(length, np.float32)
    return Trajectory(trajectory_id=f"t{number}", tokens=tokens, loss_mask=mask, **floats, **more)


class Shared:
    """Warm shared memory, 64-byte aligned arrays in it."""

    def __init__(self, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.ftruncate(file.fileno(), nbytes)
            self.memory = mmap.mmap(file.fileno(), nbytes)
        _native.populate(self.memory, True)

    def views(self, specs: dict[str, tuple[str, tuple[int, ...]]]) -> Views:
        views, at = {}, 0
        for name, (dtype, shape) in specs.items():
            count = int(np.prod(shape))
            views[name] = np.frombuffer(self.memory, dtype, count, at).reshape(shape)
            at += -(-views[name].nbytes // 64) * 64
        return views


def nbytes_of(specs: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(-(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64 for dtype, shape in specs.values())


def word_specs(rows: int, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    words = {SEGMENT_IDS: "int32", SEGMENT_POSITIONS: "int32"}
    words |= {field.packed: field.dtype for field in carried_fields(OPTIONAL)}
    return {name: (dtype, (rows, tokens)) for name, dtype in words.items()}


def numpy_into(plan: PlannedMicrobatch, held: dict[int, Trajectory], views: Views) -> None:
    """The packer one would write first, into arrays that exist already."""
    fields = carried_fields(OPTIONAL)
    for view in views.values():
        view[...] = 0
    for row, planned in enumerate(plan.rows):
        for number, segment in enumerate(planned.segments, start=1):
            end = segment.start + segment.length
            views[SEGMENT_IDS][row, segment.start : end] = number
            views[SEGMENT_POSITIONS][row, segment.start : end] = np.arange(segment.length)
            for field in fields:
                views[field.packed][row, segment.start : end] = getattr(held[segment.arrival], field.source)


def alternating(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm; the first round is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            begin = time.perf_counter()
            arm()
            if number:
                samples[name].append(1e3 * (time.perf_counter() - begin))
    return samples


def memcpy_arms(shared: Shared, nbytes: int, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], object]]:
    source = np.ones(nbytes, np.uint8)
    into = np.frombuffer(shared.memory, np.uint8, nbytes)
    cuts = [nbytes * part // threads // 64 * 64 for part in range(threads)] + [nbytes]
    parts = [(into[a:b], source[a:b]) for a, b in pairwise(cuts)]

    def together() -> None:
        list(pool.map(lambda part: _native.copy_into(*part), parts))

    return {"memcpy_1": lambda: _native.copy_into(into, source), "memcpy_all": together}

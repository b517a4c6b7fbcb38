"""What a run of ``boundary.py`` is held to, whoever carried the payloads. Pure, but for ``expected``, which packs.

Arms that agree with each other could all be wrong alike; so what the device read is also compared with the input, and
its stamps are added up a second time from its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from packed_input import PackedInput

from shmstage.memory.aligned import aligned_buffer
from shmstage.testing.engines_simulated import hashes_of, updated
from shmstage.testing.simulated_input import InputSettings
from shmstage.timeline.idle import BoundaryIdle

Record = Mapping[str, Any]


def contents_of(source: InputSettings) -> list[tuple[int, float]]:
    """Hash and loss denominator of each different micro-batch, packed here into memory of our own."""
    packed = PackedInput(source)
    buffer = aligned_buffer(packed.layout.nbytes)
    found = []
    for _ in range(source.microbatches):
        packed.pack_into(buffer)
        hashes = hashes_of(packed.layout.views(buffer, 0))
        found.append((hashes.digest(), hashes.denominator))
    return found


def expected(contents: Sequence[tuple[int, float]], steps: int, microbatches: int) -> dict[str, list[float]]:
    """Losses and denominators of a run that trains these micro-batches in order, again and again."""
    words = np.zeros(2, np.uint32)
    losses, denominators = [], []
    for step in range(steps):
        trained = [contents[(step * microbatches + index) % len(contents)] for index in range(microbatches)]
        words, loss = updated(words, [digest for digest, _ in trained])
        losses.append(float(np.float32(loss)))
        denominators.append(float(np.float32(sum(denominator for _, denominator in trained))))
    return {"losses": losses, "denominators": denominators}


def faults_of(
    run: Mapping[str, Any], wanted: Mapping[str, list[float]], payload_nbytes: int, microbatches: int
) -> list[str]:
    """What is wrong with a run of ``boundary_arms.measured``, in words; none if it is right."""
    device = run["device"]
    faults = [
        f"{key} of step {number} is {got!r}, of the input {want!r}"
        for key, values in wanted.items()
        for number, (got, want) in enumerate(zip([*run[key], *[None] * len(values)], values, strict=False), 1)
        if got != want
    ][:1]
    faults += order_faults(device["compute"], len(wanted["losses"]), microbatches)
    return faults + stamp_faults(device, payload_nbytes)


def order_faults(compute: Sequence[Record], steps: int, per_step: int) -> list[str]:
    """Every step's micro-batches in order, then its one update, then the next step's."""
    want = [(step, index) for step in range(1, steps + 1) for index in (*range(per_step), -1)]
    got = [(op["step"], op["index"]) for op in compute]
    if got == want:
        return []
    first = next((n for n, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    return [f"operation {first} of the device is {got[first : first + 1]}, wanted {want[first : first + 1]}"]


def stamp_faults(device: Mapping[str, Any], payload_nbytes: int) -> list[str]:
    """Stamps follow from what was enqueued when, and the idle from them; uploads have read everything, at their pace.

    An idle taken from when threads woke up, or an operation that was early, does not add up.
    """
    faults = []
    end = 0
    compute = device["compute"]
    for op in compute:
        name = f"{op['kind']} {op['step']}.{op['index']}"
        begin = max(op["enqueued_ns"], end, op["needed_ns"])
        if op["error"]:
            faults.append(f"{name} failed: {op['error']}")
        if op["begin_ns"] != begin:
            faults.append(f"{name} began {op['begin_ns'] - begin} ns after what it waited for")
        if op["end_ns"] - op["begin_ns"] != op["duration_ns"]:
            faults.append(f"{name} took {op['end_ns'] - op['begin_ns']} ns; the device needs {op['duration_ns']}")
        end = op["end_ns"]
    for number, op in enumerate(device["uploads"]):
        if op["nbytes"] != payload_nbytes:
            faults.append(f"upload {number} read {op['nbytes']} bytes of {payload_nbytes}")
        if op["end_ns"] - op["begin_ns"] < op["duration_ns"]:
            faults.append(f"upload {number} took less than the bandwidth allows")
    idle = [
        after["begin_ns"] - before["end_ns"] - update["duration_ns"]
        for before, update, after in zip(compute, compute[1:], compute[2:], strict=False)
        if update["kind"] == "update"
    ]
    stated = [b["idle_ns"] for b in device["boundaries"]]
    if stated != idle:
        faults.append(f"idle of the boundaries is stated as {stated} ns; the operations' gaps are {idle}")
    return faults


def estimate_errors_s(lines: Sequence[Mapping[str, Any]], boundaries: Sequence[Record]) -> list[float]:
    """Of each boundary: the step line's estimate less the device's truth. A line tells of the boundary before it."""
    truth = {boundary["step"]: boundary["idle_ns"] / 1e9 for boundary in boundaries}
    return [
        line["boundary_idle_s"] - truth[line["step"] - 1]
        for line in lines
        if line["boundary_idle_s"] is not None and line["step"] - 1 in truth
    ]


def event_errors_s(
    told: Mapping[int, BoundaryIdle], boundaries: Sequence[Record]
) -> dict[str, list[float | None]]:
    """What the estimators make of the events less the device's truth, of each boundary in order of its steps.

    ``None``: not told. ``told`` is by the step before the boundary; "reported" is the larger of both estimates.
    """
    estimates: dict[str, Callable[[BoundaryIdle], int | None]] = {
        "reported": lambda idle: idle.idle_ns,
        "by_stamps": lambda idle: idle.by_stamps_ns,
        "by_calibration": lambda idle: idle.by_calibration_ns,
    }
    errors: dict[str, list[float | None]] = {name: [] for name in estimates}
    for boundary in boundaries:
        idle = told.get(boundary["step"])
        for name, estimate in estimates.items():
            ns = None if idle is None else estimate(idle)
            errors[name].append(None if ns is None else (ns - boundary["idle_ns"]) / 1e9)
    return errors

"""The figures of a whole run, from its step lines alone: a resumed run sums up what came before it, too."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any


def summarise(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What ``summary.json`` says of steps, times, digests and trajectories. Pure.

    ``boundary_idle_s`` and ``staged_boundaries`` count the boundaries between two steps of one attempt. A trajectory is
    counted per pass over the input: ``min_times`` and ``max_times`` are 1 when each was trained exactly once in it.
    ``metrics``: what the engine reported beside the loss, name → value per step, ``None`` where it did not.
    """
    idle: list[float] = []
    durations: list[float] = []
    times: Counter[tuple[int, str]] = Counter()
    columns: dict[str, list[Any]] = {"denominators": [], "losses": [], "digests": [], "payload_digests": []}
    metrics: dict[str, list[Any]] = {}
    staged = steps = 0
    numbers: list[int] = []
    mode = None
    for line in lines:
        steps += 1
        numbers.append(line["step"])
        mode = line["mode"]
        if line["boundary_idle_s"] is not None:
            idle.append(line["boundary_idle_s"])
            staged += line["staged"]
        durations.append(line["step_s"])
        times.update(zip(line["trajectory_passes"], line["trajectory_ids"], strict=True))
        for column, key in (("denominators", "denominator"), ("losses", "loss")):
            columns[column].append(line[key])
        for name, value in (line.get("metrics") or {}).items():
            if name not in ("loss", "denominator"):
                metrics.setdefault(name, [None] * (steps - 1)).append(value)
        for values in metrics.values():
            values.extend([None] * (steps - len(values)))
        columns["digests"].append(line["digests"])
        columns["payload_digests"].append(line["payload_digests"])
    return {
        "steps": steps,
        "mode": mode,
        "staged_boundaries": staged,
        "boundary_idle_s": median_max(idle),
        "step_s": median_max(durations),
        **columns,
        "metrics": metrics,
        "payload_digests": columns["payload_digests"] if any(map(any, columns["payload_digests"])) else None,
        "warnings": [*_gaps(numbers), *_warnings(columns)],
        "trajectories": {
            "distinct": len({identity for _, identity in times}),
            "trained": times.total(),
            "min_times": min(times.values(), default=0),
            "max_times": max(times.values(), default=0),
        },
    }


def _gaps(numbers: Sequence[int]) -> list[str]:
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if not missing:
        return []
    first = f"the first is step {missing[0]}"
    return [f"the lines of {len(missing)} steps are missing in steps.jsonl, {first}: the figures here leave them out"]


def _warnings(columns: dict[str, list[Any]]) -> list[str]:
    """What a person should look at although the run went through."""
    odd = [k for k, loss in enumerate(columns["losses"], 1) if loss is not None and not math.isfinite(loss)]
    empty = [k for k, denominator in enumerate(columns["denominators"], 1) if denominator == 0]
    found = []
    if odd:
        found.append(f"the loss of {len(odd)} steps is not finite, the first is step {odd[0]}")
    if empty:
        text = f"the denominator of {len(empty)} steps is 0, nothing trains in them; the first is step {empty[0]}"
        found.append(text)
    return found


def median_max(values: Sequence[float]) -> dict[str, float | None]:
    """Median and maximum, rounded to microseconds; ``None`` without values."""
    if not values:
        return {"median": None, "max": None}
    return {"median": round(median(values), 6), "max": round(max(values), 6)}

"""What every script here shares: the machine it ran on, figures with their spread, verdicts, and where they go."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """``load`` is the one-minute load average when asked: other work on these cores is in the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values), "samples": len(values)}


def verdict(name: str, value: float, target: float, *, at_least: bool = False) -> dict[str, Any]:
    """Met if ``value`` is at most ``target``, or at least."""
    met = value >= target if at_least else value <= target
    return {"name": name, "value": value, "target": target, "met": met}


def keep(name: str, result: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``; returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def print_targets(targets: Sequence[dict[str, Any]]) -> None:
    for each in targets:
        word = "met" if each["met"] else "MISSED"
        print(f"{word:<8}{each['name']}: {each['value']:.6g} (target {each['target']:g})")

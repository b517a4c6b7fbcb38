"""What every script here shares: its machine, figures with their spread, verdicts, plots, and where they go."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
#: whose versions are in the figures
PACKAGES = (
    "shmstage", "jax", "jaxlib", "numpy", "pyzmq", "msgpack", "optax", "grpcio", "ray", "iceoryx2", "grain",
)  # fmt: skip
NO_PLOT = "no plot: matplotlib is missing; pip install 'shmstage[bench]'"


def machine() -> dict[str, Any]:
    """``load`` is the one-minute load average when asked: other work on these cores is in the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "available_gb": round(available_nbytes() / 1e9, 1),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": _versions(),
        "load": round(os.getloadavg()[0], 2),
    }


def machine_line(known: dict[str, Any]) -> str:
    """``machine()`` in a line, for a table."""
    return (
        f"{known['cpu']}, {known['cpus']} cores, {known['memory_gb']:g} GB ({known['available_gb']:g} GB available), "
        f"{known['kernel']}, Python {known['python']}, load {known['load']:g}"
    )


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()  # arm says no name there


def available_nbytes() -> int:
    """What the kernel thinks can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values), "samples": len(values)}


def verdict(name: str, value: float, target: float, *, at_least: bool = False) -> dict[str, Any]:
    """Met if ``value`` is at most ``target``, or at least."""
    met = value >= target if at_least else value <= target
    return {"name": name, "value": value, "target": target, "met": met}


def keep(name: str, result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Write ``NAME.json`` and return its path.

    ``result`` is given what tells it from others: ``script``, ``at`` (UTC), ``command`` and, in a checkout,
    ``revision`` (git's, with ``+`` if files were changed since).
    """
    result.update(script=name, at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), command=_command())
    if revision := _revision():
        result["revision"] = revision
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(dumps(result, indent=1) + "\n")
    return path


def _command() -> str:
    script = Path(sys.argv[0])
    with suppress(ValueError):
        script = script.resolve().relative_to(BENCH.parent)
    return shlex.join(["python", str(script), *sys.argv[1:]])


def _revision() -> str:
    """"" outside a checkout, or without git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(BENCH), *arguments], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    with suppress(OSError, subprocess.TimeoutExpired):
        if revision := git("rev-parse", "--short=12", "HEAD"):
            return revision + "+" * bool(git("status", "--porcelain", "--untracked-files=no"))
    return ""


def plot(path: Path, draw: Callable[[Any], None], *, size: tuple[float, float] = (8.0, 4.0)) -> list[str]:
    """Let ``draw`` fill a matplotlib figure of ``size`` inches and write it to ``path``; notes for the reader."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return [NO_PLOT]
    figure = Figure(figsize=size, layout="tight")
    draw(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none"}):  # letters as text, not as paths: a tenth of the size
        figure.savefig(path, bbox_inches="tight")  # its ending says which format
    return []


def print_targets(targets: Sequence[dict[str, Any]]) -> None:
    for each in targets:
        word = "met" if each["met"] else "MISSED"
        print(f"{word:<8}{each['name']}: {each['value']:.6g} (target {each['target']:g})")

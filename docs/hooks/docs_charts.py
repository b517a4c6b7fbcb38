"""Bar charts from kept results of `bench/`: nothing is drawn that is not in the file; the caption says what made it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

KEPT: Final = Path(__file__).parent.parent / "performance"
WIDTH, LABELS, BAR, GAP, TOP, VALUES = 760, 230, 18, 8, 30, 120

Bar = tuple[str, float, str, str]
"""Label, value, value in words, colour class."""


def chart(name: str) -> str:
    """One of `CHARTS`, as `<figure>`."""
    if name not in CHARTS:
        raise ValueError(f"chart {name!r}: there are {', '.join(CHARTS)}")
    file, title, bars, logarithmic = CHARTS[name]
    result = kept(file)
    machine = result["machine"]
    caption = (
        f"{title} <code>{escape(result['command'])}</code>, {result['at'][:10]}, revision {result['revision']}; "
        f"{escape(machine['cpu'])}, {machine['cpus']} cores, load {machine['load']:g}."
    )
    drawing = _svg(title, list(bars(result)), logarithmic)
    return f'<figure class="drawing">{drawing}<figcaption>{caption}</figcaption></figure>'


def kept(file: str) -> dict[str, Any]:
    """What a script of bench/ wrote, as it was kept."""
    result: dict[str, Any] = json.loads((KEPT / f"{file}.json").read_text())
    return result


def _svg(title: str, bars: list[Bar], logarithmic: bool) -> str:
    height = TOP + len(bars) * (BAR + GAP)
    longest = WIDTH - LABELS - VALUES
    most = max(value for _, value, _, _ in bars)
    least = min((value for _, value, _, _ in bars if value > 0), default=1.0)
    decades = max(1.0, math.log10(most / least) + 0.3) if logarithmic else 1.0

    def length(value: float) -> float:
        if value <= 0:
            return 0.0
        return longest * ((math.log10(value / most) / decades + 1) if logarithmic else value / most)

    words = "; ".join(f"{label}: {said}" for label, _, said, _ in bars)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(f"{title} {words}", quote=True)}">']
    scale = "logarithmic scale" if logarithmic else "linear scale, from 0"
    parts.append(f'<text class="d-small" x="{LABELS}" y="14">{scale}</text>')
    for number, (label, value, said, colour) in enumerate(bars):
        y, long = TOP + number * (BAR + GAP), max(length(value), 1)
        parts.append(f'<text class="d-label" x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<rect class="d-{colour}" x="{LABELS}" y="{y}" width="{long:.1f}" height="{BAR}" rx="2"/>')
        parts.append(f'<text class="d-value" x="{LABELS + long + 6:.1f}" y="{y + 13}">{escape(said)}</text>')
    return "".join(parts) + "</svg>"


def _time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    unit, factor = next((u for u in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * u[1] >= 1), ("ns", 1e9))
    return f"{seconds * factor:.3g} {unit}"


# --- one function per chart ---------------------------------------------------------------------------------------

_ARMS: Final = {"A0": "serial, gRPC", "A0'": "serial, gRPC, again", "A2": "staged after the update",
                "A3": "staged before the update"}
_PATHS: Final = {
    "ours": "shmstage", "grpc_stream": "gRPC, stream", "grpc_unary": "gRPC, unary", "queue": "multiprocessing.Queue",
    "zmq": "ZeroMQ with payload", "ray": "Ray put and get", "grain": "Grain SharedMemoryArray", "iceoryx2": "iceoryx2",
}


def _boundary(result: dict[str, Any]) -> Iterator[Bar]:
    for variant in ("plain", "saved", "settling"):
        for figure in result["figures"].values():
            if figure["variant"] == variant and figure["arm"] in _ARMS:
                idle = figure["idle_s"]["median"]
                ours = "after" if figure["path"] == "shm" else "update"
                yield f"{variant}: {_ARMS[figure['arm']]}", idle, _time(idle), "two" if ours == "after" else "three"


def _handoff(result: dict[str, Any]) -> Iterator[Bar]:
    for name in _PATHS:
        figure = next(f for f in result["figures"].values() if f["path"] == name and f["nbytes"] == 10**9)
        seconds = figure["hand_off_s"]["median"]
        yield _PATHS[name], seconds, _time(seconds), "two" if name == "ours" else "three"


def _whole_path(result: dict[str, Any]) -> Iterator[Bar]:
    for name in _PATHS:
        figure = next(f for f in result["figures"].values() if f["path"] == name and f["nbytes"] == 10**9)
        seconds = figure["whole_path_s"]["median"]
        yield _PATHS[name], seconds, _time(seconds), "two" if name == "ours" else "three"


def _memory(result: dict[str, Any]) -> Iterator[Bar]:
    names = {"optax": "OptaxEngine, shared memory", "simulated": "simulated engine, shared memory",
             "streamed": "simulated engine, gRPC"}
    for figure in result["figures"].values():
        peak = figure["of_payload"]["median"]
        yield names[figure["arm"]], peak, f"{peak:.2f} payloads", "two" if figure["path"] == "shm" else "three"


def _multihost(result: dict[str, Any]) -> Iterator[Bar]:
    for hosts, figure in result["figures"].items():
        rates = figure["rate"]["nbytes_per_s_per_host"]
        plural = "s" if hosts != "1" else ""
        for name, words, colour in (("ours", "shmstage", "two"), ("plain", "plain Ray objects", "three")):
            rate = rates[name]["median"]
            yield f"{hosts} host{plural}: {words}", rate, f"{rate / 1e6:.0f} MB/s", colour


def _routing(result: dict[str, Any]) -> Iterator[Bar]:
    for name, nbytes in result["figures"]["routing"]["nbytes"].items():
        yield name, nbytes, f"{nbytes / 1e9:.2f} GB", "two"


def _overhead(result: dict[str, Any]) -> Iterator[Bar]:
    for order, figure in result["figures"]["control"].items():
        seconds = figure["per_microbatch_s"]
        yield order.replace("_", " "), seconds, _time(seconds), "two"


CHARTS: Final[dict[str, tuple[str, str, Callable[[dict[str, Any]], Iterator[Bar]], bool]]] = {
    "boundary": ("boundary", "Boundary idle per step, median.", _boundary, False),
    "handoff": ("handoff", "Hand-off of 1 GB, median.", _handoff, True),
    "whole-path": ("handoff", "1 GB from trajectories to readable arrays, median.", _whole_path, False),
    "memory": ("memory", "Peak of both processes over the baseline, in payloads of 256 MB.", _memory, False),
    "multihost": ("multihost", "Trajectories landed per second and host, median.", _multihost, False),
    "routing": ("pack", "Bytes of a micro-batch of 64 × 65,536 tokens by routing encoding.", _routing, False),
    "overhead": (
        "overhead", "Wall time of control and Python per micro-batch, the engine's own not taken off.", _overhead, False
    ),
}

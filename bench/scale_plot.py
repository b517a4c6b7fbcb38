"""The plot of ``scale.py``: boundary idle, the orchestrator's memory and its network over the number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from results import plot
from scale_inputs import FUNNEL_CHIPS, FUNNEL_GB, FUNNEL_LIMIT_GB

STYLES = {"rows": "-", "batch": "--"}
LEAST_IDLE_S = 1e-3
TOLD = "staged_before_update"


def draw_scale(result: dict[str, Any], path: Path) -> list[str]:
    """Write ``PATH.svg``; notes for the reader."""
    return plot(path.with_suffix(".svg"), lambda drawing: _draw(drawing, result), size=(15.0, 5.0))


def _draw(drawing: Any, result: dict[str, Any]) -> None:
    idle, memory, network = drawing.subplots(1, 3)
    count = min(p["microbatches_per_step"] for p in result["predictions"])
    engine = result["predictions"][0]["engine"]
    chosen = [p for p in result["predictions"] if p["microbatches_per_step"] == count and p["engine"] == engine]
    chips_per_host = chosen[0]["chips"] / chosen[0]["hosts"]
    for law in dict.fromkeys(p["law"] for p in chosen):
        rows, style = [p for p in chosen if p["law"] == law], STYLES[law]
        hosts = [p["hosts"] for p in rows]
        for side, order, colour, label in (
            ("reference", "serial", "tab:red", "reference, serial"),
            ("reference", TOLD, "tab:orange", "reference, staged before"),
            ("ours", "serial", "tab:cyan", "ours, serial"),
            ("ours", TOLD, "tab:blue", "ours, staged before"),
        ):
            values = [max(p[side][order]["idle_s"], LEAST_IDLE_S) for p in rows]
            idle.plot(hosts, values, style, color=colour, marker=".", label=f"{label} ({law})")
        for axes, key in ((memory, "orchestrator_ram_nbytes"), (network, "orchestrator_network_nbytes")):
            for which, colour, label in (("reference_load", "tab:red", "reference"), ("load", "tab:blue", "ours")):
                values = [(p["hosts"], p[which][key] / 1e9) for p in rows if p[which][key]]
                axes.plot(*zip(*values, strict=True), style, color=colour, marker=".", label=f"{label} ({law})")
    memory.axhline(FUNNEL_LIMIT_GB, color="black", linewidth=0.8, linestyle=":")
    memory.scatter([FUNNEL_CHIPS / chips_per_host], [FUNNEL_GB], color="black", zorder=3, label="stated")
    idle.set_title(f"boundary idle, s ({count} micro-batches per step)")
    memory.set_title(f"orchestrator's memory, GB (dotted: {FUNNEL_LIMIT_GB:g})")
    network.set_title("orchestrator's network, GB per step")
    for axes in (idle, memory, network):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("hosts (rows: 2 rows a host; batch: 64 rows in all)")
        hosts = sorted({p["hosts"] for p in chosen})
        axes.set_xticks(hosts, [str(each) for each in hosts], fontsize="x-small")
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=2)

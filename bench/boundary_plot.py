"""The plots of ``boundary.py``: idle by arm and micro-batches per step, one drawing for each variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from results import plot


def draw_variants(result: dict[str, Any], path: Path) -> list[str]:
    """Write ``PATH-VARIANT.svg``; notes for the reader."""
    variants = dict.fromkeys(figure["variant"] for figure in result["figures"].values())
    notes: list[str] = []
    for variant in variants:
        file = path.with_name(f"{path.stem}-{variant}.svg")
        notes = plot(file, lambda drawing, variant=variant: _draw(drawing, result, variant), size=(10.0, 4.0))
    return notes


def _draw(drawing: Any, result: dict[str, Any], variant: str) -> None:
    figures = [f for f in result["figures"].values() if f["variant"] == variant]
    arms = list(dict.fromkeys(f["arm"] for f in figures))
    counts = sorted({f["microbatches_per_step"] for f in figures})
    axes = drawing.subplots()
    width = 0.8 / max(1, len(arms))
    for number, arm in enumerate(arms):
        of_arm = {f["microbatches_per_step"]: f for f in figures if f["arm"] == arm}
        medians = [max(1e3 * of_arm[c]["idle_s"]["median"], 1e-3) for c in counts]
        most = [max(1e3 * of_arm[c]["idle_s"]["max"], 1e-3) for c in counts]
        places = [place + number * width for place in range(len(counts))]
        axes.bar(places, medians, width, label=f"{arm} {of_arm[counts[0]]['mode']}, {of_arm[counts[0]]['path']}")
        axes.scatter(places, most, marker="_", color="black", s=20)
    axes.set_yscale("log")
    axes.set_xticks([p + 0.4 - width / 2 for p in range(len(counts))], [str(c) for c in counts])
    axes.set_xlabel("micro-batches per step")
    axes.set_ylabel("boundary idle, ms: median, and maximum (–); 0 drawn as 0.001")
    axes.set_title(f"{variant}, payload {result['payload_nbytes'] / 1e6:.1f} MB, 1:{result['scale']:g}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))

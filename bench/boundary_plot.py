"""The plots of ``boundary.py``: idle by arm and micro-batches per step, one drawing for each variant."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], path: Path) -> list[Path]:
    """Write ``PATH-VARIANT.svg``; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as text, not as paths: a tenth of the size
    return [
        _drawn(result, variant, path.with_name(f"{path.stem}-{variant}.svg"))
        for variant in dict.fromkeys(f["variant"] for f in result["figures"].values())
    ]


def _drawn(result: dict[str, Any], variant: str, path: Path) -> Path:
    from matplotlib import pyplot

    figures = [f for f in result["figures"].values() if f["variant"] == variant]
    arms = list(dict.fromkeys(f["arm"] for f in figures))
    counts = sorted({f["microbatches_per_step"] for f in figures})
    drawing, axes = pyplot.subplots(figsize=(10, 4))
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
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
    return path

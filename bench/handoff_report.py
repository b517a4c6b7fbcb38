"""The tables and the plot of ``handoff.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from paths import PATHS

from shmstage.memory.limits import format_nbytes

FIGURES = {"hand_off_s": "hand-off", "whole_path_s": "whole path"}


def in_words(seconds: float) -> str:
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def print_tables(result: dict[str, Any]) -> None:
    """One per figure: a row for each path, a column for each size."""
    figures = list(result["figures"].values())
    sizes = sorted({each["nbytes"] for each in figures})
    at = {(each["path"], each["nbytes"]): each for each in figures}
    names = [name for name in PATHS if any(each["path"] == name for each in figures)]
    print(result["machine"])

    def table(title: str, cell: Any, width: int = 26) -> None:
        print(f"\n{title:<34}" + "".join(f"{format_nbytes(size):>{width}}" for size in sizes))
        for name in names:
            found = [at.get((name, size)) for size in sizes]
            cells = ["-" if each is None else cell(each) for each in found]
            print(f"{PATHS[name].title:<34}" + "".join(f"{each:>{width}}" for each in cells))

    def timed(figure: str) -> Any:
        return lambda each: (
            f"{in_words(each[figure]['median'])} ({in_words(each[figure]['min'])}-{in_words(each[figure]['max'])})"
        )

    for figure, said in FIGURES.items():
        table(f"{said}, median (min-max)", timed(figure))
    table("read once afterwards, median", lambda each: in_words(each["read_s"]["median"]), 12)
    table("peak memory, packed arrays too", lambda each: format_nbytes(each["peak_nbytes"]), 12)
    print("\nbytes copied per hand-off, in payloads")
    for name in names:
        print(f"{PATHS[name].title:<34}{PATHS[name].copied_payloads:>3}  {PATHS[name].copies}")
    print()


def plot(result: dict[str, Any], path: Path) -> bool:
    """Both figures over the size, logarithmic; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figures = list(result["figures"].values())
    drawing, both = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axes, (figure, said) in zip(both, FIGURES.items(), strict=True):
        for name, known in PATHS.items():
            points = sorted((each["nbytes"], each[figure]) for each in figures if each["path"] == name)
            if points:
                medians = [value["median"] for _, value in points]
                low = [value["median"] - value["min"] for _, value in points]
                high = [value["max"] - value["median"] for _, value in points]
                axes.errorbar(
                    [size for size, _ in points], medians, yerr=[low, high], marker="o", markersize=3, capsize=2,
                    linewidth=2.5 if name == "ours" else 1.2, elinewidth=0.6, label=known.title,
                )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("bytes of the packed micro-batch")
        axes.set_title(said)
        axes.grid(True, which="major", linewidth=0.3)
    both[0].set_ylabel("seconds, median, min and max")
    both[1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
    return True

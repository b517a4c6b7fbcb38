"""Two results of one script: what became faster or smaller, and what worse beyond the spread.

    python bench/compare.py A.json B.json [--tolerance 0.05] [--all] [--json]

Figures with a spread are judged: B's median lies outside A's least and greatest, and is worse by more than
``--tolerance``. Which way is better follows from the unit in a figure's name (``DIRECTIONS``); a name without one is
left out. Plain numbers have no spread: their ratio is printed, they are not judged. A target that A met and B misses is
a regression if its value is worse by more than the tolerance. Ratios are B / A; zeros count as the least that a unit
tells apart.

Exit 1 on a regression, 2 for a file that is no result, or two of different scripts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from results import RESULTS, keep, machine, plot, verdict

Better = Literal["lower", "higher"]
SPREAD = {"median", "min", "max"}
#: what a name begins with, ends with or is → (which way is better, least that is told apart); the first that fits
DIRECTIONS: tuple[tuple[str, str, Better, float], ...] = (
    ("begins", "times_", "higher", 1e-9),
    ("ends", "of_memcpy", "higher", 1e-9),
    ("ends", "efficiency", "higher", 1e-9),
    ("ends", "_gbps", "higher", 1e-9),
    ("ends", "_per_s", "higher", 1e-9),
    ("is", "s", "lower", 1e-6),
    ("ends", "_s", "lower", 1e-6),
    ("is", "ms", "lower", 1e-3),
    ("ends", "_ms", "lower", 1e-3),
    ("is", "us", "lower", 1.0),
    ("ends", "_us", "lower", 1.0),
    ("ends", "_ns", "lower", 1e3),
    ("is", "nbytes", "lower", 4096.0),
    ("ends", "_nbytes", "lower", 4096.0),
    ("ends", "_share", "lower", 1e-6),
    ("begins", "of_", "lower", 1e-9),
    ("ends", "of_payload", "lower", 1e-9),
    ("ends", "of_dense", "lower", 1e-9),
    ("ends", "_payloads", "lower", 1e-9),
)
#: of the machine, what moves by itself
PASSING = ("load", "available_gb")
#: of a result, what is no setting of it
NOT_SETTINGS = {"machine", "figures", "targets", "notes", "problems", "script", "at", "command", "revision"}
BAD_INPUT = 2


class NoResult(Exception):
    """A file that cannot be compared; says why."""


@dataclass(frozen=True)
class Figure:
    median: float
    least: float
    greatest: float
    #: plain numbers have none
    has_spread: bool


def read(path: Path) -> dict[str, Any]:
    """A result of a script here. Raises ``NoResult``."""
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise NoResult(f"{path}: {error}; give a file that a script of bench/ has kept") from None
    if not isinstance(found, dict) or not isinstance(found.get("figures"), dict | list):
        raise NoResult(f"{path}: no figures in it; give a file that a script of bench/ has kept, or its --json output")
    return found


def walk(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """Every number and every spread with its path of names; an item of a list is named by what it says first."""
    if isinstance(tree, Mapping):
        if tree.keys() >= SPREAD:
            yield path, Figure(float(tree["median"]), float(tree["min"]), float(tree["max"]), True)
            return
        for name, inner in tree.items():
            yield from walk(inner, (*path, str(name)))
    elif isinstance(tree, list):
        for name, inner in zip(_names(tree), tree, strict=True):
            if isinstance(inner, Mapping):  # lists of numbers are samples or curves, not figures
                yield from walk(inner, (*path, name))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, Figure(float(tree), float(tree), float(tree), False)


def _names(items: list[Any]) -> list[str]:
    names = [str(next(iter(item.values()))) if isinstance(item, Mapping) and item else "" for item in items]
    return names if len(set(names)) == len(names) else [str(number) for number in range(len(items))]


def direction(path: tuple[str, ...]) -> tuple[Better, float] | None:
    """Of the innermost name with a unit: ``ms`` of ``ms / fill``."""
    for name in reversed(path):
        for how, part, better, least in DIRECTIONS:
            if {"begins": name.startswith(part), "ends": name.endswith(part), "is": name == part}[how]:
                return better, least
    return None


def compared(a: Figure, b: Figure, better: Better, least: float, tolerance: float) -> dict[str, Any]:
    """``change`` is how many times worse B is; below 1 it is better."""
    ratio = max(b.median, least) / max(a.median, least)
    change = ratio if better == "lower" else 1 / ratio
    outside = not a.least <= b.median <= a.greatest
    word = "not judged"
    if a.has_spread and b.has_spread:
        word = "same"
        if outside and change > 1 + tolerance:
            word = "regression"
        elif outside and 1 / change > 1 + tolerance:
            word = "better"
    return {
        "a": a.median, "b": b.median, "a_min": a.least, "a_max": a.greatest, "ratio": ratio, "better": better,
        "change": change, "verdict": word,
    }  # fmt: skip


def compare(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> dict[str, Any]:
    """Everything both have. Raises ``NoResult`` if that is nothing, or the scripts differ."""
    scripts = {name for each in (a, b) if (name := each.get("script"))}
    if len(scripts) > 1:
        raise NoResult(f"these are of {a['script']} and of {b['script']}; give two results of one script")
    of_a, of_b = (
        {" / ".join(path): (path, figure) for path, figure in walk(each["figures"])} for each in (a, b)
    )
    figures = {}
    for name, (path, figure) in of_a.items():
        known = direction(path)
        if known is not None and name in of_b:
            figures[name] = compared(figure, of_b[name][1], *known, tolerance)
    if not figures:
        raise NoResult("the two have no figure in common; give two results of one script, of the same arms")
    notes = _differences(a, b)
    for which, here, there in (("A", of_a, of_b), ("B", of_b, of_a)):
        alone = [name for name in here if name not in there and direction(here[name][0])]
        if alone:
            notes.append(f"only in {which}: {len(alone)} figures, {alone[0]} for one")
    judged = [
        verdict(f"{name}, times worse", each["change"], 1 + tolerance)
        | {"met": each["verdict"] != "regression"}  # within A's spread nothing is worse
        for name, each in figures.items()
        if each["verdict"] != "not judged"
    ]
    return {"figures": figures, "targets": judged + _lost_targets(a, b, tolerance), "notes": notes}


def _lost_targets(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[dict[str, Any]]:
    """Targets that A met and B misses by more than what the tolerance allows."""
    now = {each["name"]: each for each in b.get("targets", [])}
    lost = []
    for then in a.get("targets", []):
        each = now.get(then["name"])
        if each is None or not then["met"] or each["met"]:
            continue
        low, high = sorted((abs(then["value"]), abs(each["value"])))
        if high > (1 + tolerance) * low:
            lost.append({**each, "name": f"target {each['name']}"})
    return lost


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """In words: other machines, other packages, other settings."""
    notes = []
    of_a, of_b = _flat(a.get("machine")), _flat(b.get("machine"))
    for name in sorted(of_a.keys() | of_b.keys()):
        then, now = of_a.get(name), of_b.get(name)
        if name not in PASSING and then != now:
            what = "package" if name.startswith("packages.") else "machine"
            notes.append(f"another {what}: {name.removeprefix('packages.')} {then} and {now}")
    if abs(float(of_a.get("load", 0)) - float(of_b.get("load", 0))) > 1:
        notes.append(f"other work on the cores: load {of_a['load']} and {of_b['load']}")
    for name in sorted((a.keys() | b.keys()) - NOT_SETTINGS):
        if not isinstance(a.get(name), dict | list) and a.get(name) != b.get(name):
            notes.append(f"another setting: {name} {a.get(name)} and {b.get(name)}")
    return notes


def _flat(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {}
    found = {name: value for name, value in tree.items() if not isinstance(value, Mapping)}
    return found | {f"{name}.{key}": v for name, each in tree.items() for key, v in _flat(each).items()}


def print_table(result: dict[str, Any], *, everything: bool) -> None:
    """What is judged, and what moved; the rest is asked for."""
    allowed = 1 + result["tolerance"]
    shown = {
        name: each
        for name, each in result["figures"].items()
        if everything or each["verdict"] != "not judged" or max(each["change"], 1 / each["change"]) > allowed
    }
    width = max([len(name) for name in shown], default=6)
    print(f"{'figure':<{width}}{'A':>12}{'B':>12}{'B / A':>9}  ")
    for name, each in shown.items():
        print(f"{name:<{width}}{each['a']:>12.4g}{each['b']:>12.4g}{each['ratio']:>9.3f}  {each['verdict']}")
    for note in result["notes"]:
        print(note)
    for each in result["targets"]:
        if not each["met"] and each["name"].startswith("target "):
            print(f"{each['name']}: was met, is {each['value']:.6g} (target {each['target']:g})")
    if left_out := len(result["figures"]) - len(shown):
        print(f"{left_out} plain numbers that did not move are left out (--all)")
    print(f"{result['regressions']} regressions")


def draw(result: dict[str, Any], figure: Any) -> None:
    """How many times worse, on a scale of logarithms; 1 is unchanged."""
    colours = {"regression": "tab:red", "better": "tab:green", "same": "tab:grey"}
    figures = {name: each for name, each in result["figures"].items() if each["verdict"] != "not judged"}
    axes = figure.subplots()
    for place, each in enumerate(figures.values()):
        axes.plot([1.0, each["change"]], [place, place], color=colours[each["verdict"]], linewidth=3)
        axes.plot([each["change"]], [place], "o", color=colours[each["verdict"]])
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.5)
    axes.set_yticks(range(len(figures)), list(figures), fontsize="xx-small")
    axes.invert_yaxis()
    axes.set_xlabel("B against A, times worse (left of 1: better)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A.json", help="what it was")
    parser.add_argument("b", type=Path, metavar="B.json", help="what it is")
    parser.add_argument("--tolerance", type=float, default=0.05, help="worse by less is no regression")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--all", action="store_true", help="also plain numbers that did not move")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    try:
        a, b = read(args.a), read(args.b)
        found = compare(a, b, args.tolerance)
    except NoResult as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    result = {
        "machine": machine(), "of": a.get("script", b.get("script", "")), "tolerance": args.tolerance,
        "regressions": sum(not each["met"] for each in found["targets"]), **found,
    }  # fmt: skip
    path = keep("compare", result, args.results)
    height = max(3.0, 0.2 * len(found["targets"]))
    result["notes"] += plot(path.with_suffix(".svg"), lambda figure: draw(result, figure), size=(9.0, height))
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result, everything=args.all)
    return 1 if result["regressions"] else 0


if __name__ == "__main__":
    sys.exit(main())

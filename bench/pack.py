"""Filling a micro-batch against this machine's memcpy, measured in the same run, and against a plain numpy packer.

Real length lists, each as one micro-batch of 7 word fields, filled again and again into the same warm shared memory,
the arms alternating. The ceiling is a memcpy of as many bytes onto the same pages, by one thread or by all cores,
whichever is faster. What is left of the difference is shown: `gather` looks the records of all trajectories up, under
the GIL; `native` is the rest, the bare C++ of it, without. Beside it all, plan and fill together against Grain's packer
on the same trajectories (`pack_grain.py` says what it does otherwise). Routing: the bytes that each encoding writes at
a quarter fill, and how long writing them takes, from dense arrays and from held ones. Planner: time to place up to
100,000 trajectories.

    python bench/pack.py [--lengths FOLDER] [--rounds N] [--planned N,N] [--results FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from pack_grain import GrainPacker
from pack_making import (
    LENGTHS,
    OPTIONAL,
    ROWS_OF,
    Shared,
    Views,
    alternating,
    memcpy_arms,
    nbytes_of,
    numpy_into,
    plan_all,
    read_lengths,
    trajectory,
    word_specs,
)
from results import RESULTS, keep, machine, print_targets, spread, verdict

from shmstage import _native
from shmstage.packing.fields import SEGMENT_IDS, SEGMENT_POSITIONS, WORD_FIELDS
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.routing import PACKED, RAGGED, id_bits, routing_fields
from shmstage.packing.trajectory import Trajectory

LAYERS, TOP_K, EXPERTS = 60, 10, 512


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def native_arms(plan: PlannedMicrobatch, held: dict[int, Trajectory], views: Views) -> dict[str, Callable[[], object]]:
    """The two halves of a fill: with the GIL, and without."""
    tokens = views[SEGMENT_IDS].shape[1]
    words = [(views[f.packed], number, f.pad_byte) for number, f in enumerate(WORD_FIELDS) if f.packed in views]
    gathered = _native.Gathered([row.segments for row in plan.rows], held)
    ids, positions = views[SEGMENT_IDS], views[SEGMENT_POSITIONS]
    return {
        "gather": lambda: _native.Gathered([row.segments for row in plan.rows], held),
        "native": lambda: _native.fill_microbatch(gathered, tokens, ids, positions, words),
    }


def beside_grain(
    plan: PlannedMicrobatch, held: dict[int, Trajectory], views: Views, rounds: int
) -> dict[str, Any] | None:
    """Plan and fill against Grain's packer; None without Grain."""
    rows, tokens = views[SEGMENT_IDS].shape
    try:
        grain = GrainPacker(list(held.values()), OPTIONAL, rows=rows, tokens=tokens)
    except ImportError:
        return None

    def ours() -> None:
        planner = Planner(PlanSettings(rows=rows, tokens=tokens))
        for arrival, one in held.items():
            planner.add(arrival, one.length)
        (planned,) = planner.flush()
        fill_microbatch(planned, held, views)

    ms = {arm: spread(values) for arm, values in alternating({"ours": ours, "grain": grain}, min(rounds, 3)).items()}
    return {
        "ms": ms,
        "rows": grain.rows,
        "efficiency": plan.real_tokens / (grain.rows * tokens),
        "nothing_lost": grain.count() == plan.real_tokens,
        "times_ours": ms["grain"]["median"] / ms["ours"]["median"],
    }


def fill_of_list(
    name: str, lengths: Sequence[int], tokens: int, rounds: int, pool: ThreadPoolExecutor
) -> dict[str, Any]:
    dice = np.random.default_rng(1)
    plan = plan_all(lengths, tokens)
    held = {arrival: trajectory(arrival, length, dice) for arrival, length in enumerate(lengths)}
    specs = word_specs(len(plan.rows), tokens)
    nbytes = nbytes_of(specs)
    shared = Shared(nbytes)
    views = shared.views(specs)
    numpy_into(plan, held, views)
    want = {key: view.copy() for key, view in views.items()}
    shared.memory[:] = b"\7" * nbytes
    fill_microbatch(plan, held, views)
    equal = all(np.array_equal(views[key], want[key]) for key in want)
    arms = {
        **memcpy_arms(shared, nbytes, pool, len(os.sched_getaffinity(0))),
        "fill": lambda: fill_microbatch(plan, held, views),
        "numpy": lambda: numpy_into(plan, held, views),
        **native_arms(plan, held, views),
    }
    ms = {arm: spread(values) for arm, values in alternating(arms, rounds).items()}
    fill = ms["fill"]["median"]
    return {
        "list": name,
        "trajectories": len(lengths),
        "rows": len(plan.rows),
        "tokens": tokens,
        "efficiency": plan.real_tokens / (len(plan.rows) * tokens),
        "nbytes": nbytes,
        "equal_to_numpy": equal,
        "ms": ms,
        "of_memcpy": min(ms["memcpy_1"]["median"], ms["memcpy_all"]["median"]) / fill,
        "native_of_memcpy": min(ms["memcpy_1"]["median"], ms["memcpy_all"]["median"]) / ms["native"]["median"],
        "times_numpy": ms["numpy"]["median"] / fill,
        "grain": beside_grain(plan, held, views, rounds),
    }


def routing_bytes() -> dict[str, Any]:
    """Whole micro-batches of 64 rows x 65,536 tokens with a quarter of them real."""
    rows, tokens = 64, 65536
    words = nbytes_of(word_specs(rows, tokens))
    sizes = {
        encoding: words
        + nbytes_of(
            routing_fields(
                encoding,
                rows=rows,
                tokens=tokens,
                max_real_tokens=rows * tokens // 4,
                layers=LAYERS,
                top_k=TOP_K,
                experts=EXPERTS,
            )
        )
        for encoding in ("dense", "ragged", "ragged_packed")
    }
    return {"nbytes": sizes, "of_dense": {name: size / sizes["dense"] for name, size in sizes.items()}}


def _gathered(rows: list[tuple[tuple[int, int, int], ...]], routing: list[Any]) -> _native.Gathered:
    records = {
        number: SimpleNamespace(record=_native.TrajectoryRecord(each[1], (), each))
        for number, each in enumerate(routing)
    }
    return _native.Gathered(rows, records)


def routing_times(rounds: int) -> dict[str, Any]:
    """Routing of 16,384 real tokens in 4 rows x 16,384, written in each encoding from dense and from held sources."""
    rows, tokens, dice, bits = 4, 16384, np.random.default_rng(2), id_bits(EXPERTS)
    lengths = [3001] * 5 + [1379]
    first = (np.arange(TOP_K) * 51).astype(np.int16)
    dense, at = [], [0] * rows
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    for number, length in enumerate(lengths):
        row = number * rows // len(lengths)
        spans[row].append((number, at[row], length))
        at[row] += length
        dense.append(first + dice.integers(0, 50, (length, LAYERS, 1), dtype=np.int16))
    held = [(_native.pack_routing(each, LAYERS, TOP_K, bits), len(each)) for each in dense]
    places = [tuple(row) for row in spans]
    from_dense = _gathered(places, [(each, len(each), LAYERS, TOP_K, 0) for each in dense])
    from_held = _gathered(places, [(each, count, LAYERS, TOP_K, bits) for each, count in held])
    words = [np.empty((rows, tokens), np.int32) for _ in range(2)]
    arms: dict[str, Callable[[], object]] = {}
    sizes = {}
    for encoding in ("dense", "ragged", "ragged_packed"):
        sizes_of = {"rows": rows, "tokens": tokens, "max_real_tokens": sum(lengths)}
        specs = routing_fields(encoding, **sizes_of, layers=LAYERS, top_k=TOP_K, experts=EXPERTS)
        views = Shared(nbytes_of(specs)).views(specs)
        sizes[encoding] = nbytes_of(specs)
        ids = views.get(PACKED, views.get(RAGGED, next(iter(views.values()))))
        rest = [
            next((view for key, view in views.items() if key.endswith(end)), None) for end in ("validity", "offsets")
        ]
        width = bits if encoding == "ragged_packed" else 0
        routing = (encoding, LAYERS, TOP_K, width, ids, *rest)
        for kind, gathered in (("dense", from_dense), ("held", from_held)):
            arms[f"{encoding} from {kind}"] = lambda gathered=gathered, routing=routing: _native.fill_microbatch(
                gathered, tokens, *words, [], routing
            )
    ms = {arm: spread(values) for arm, values in alternating(arms, rounds).items()}
    packed = sum(len(each) for each, _ in held) / sum(each.nbytes for each in dense)
    return {"real_tokens": sum(lengths), "places": rows * tokens, "nbytes": sizes, "ms": ms, "held_of_dense": packed}


def planner_times(lengths: Sequence[int], tokens: int, rounds: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    out = []
    for count in counts:
        many = np.random.default_rng(3).choice(lengths, count).tolist()

        def plan(many: list[int] = many) -> None:
            planner = Planner(PlanSettings(rows=64, tokens=tokens))
            for arrival, length in enumerate(many):
                planner.add(arrival, length)
            planner.flush()

        ms = spread(alternating({"plan": plan}, min(rounds, 3))["plan"])
        out.append({"trajectories": count, "ms": ms})
    return out


def measure(folder: Path, rounds: int, planned: Sequence[int]) -> dict[str, Any]:
    found = [name for name in ROWS_OF if (folder / f"{name}.json").is_file()]
    notes = [f"no {name}.json in {folder}: skipped" for name in ROWS_OF if name not in found]
    for text in notes:
        note(text)
    lists = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name in found:
            note(f"{name} at {ROWS_OF[name]} tokens")
            lengths = read_lengths(folder / f"{name}.json", ROWS_OF[name])
            lists.append(fill_of_list(name, lengths, ROWS_OF[name], rounds, pool))
    if any(each["grain"] is None for each in lists):
        notes.append("Grain left out: it is missing; pip install 'shmstage[bench]'")
    note("routing")
    routing = {**routing_bytes(), "times": routing_times(rounds)}
    note("planner")
    known = {each["list"]: each for each in lists}
    sample = read_lengths(folder / "gsm8k.json", 2048) if "gsm8k" in found else list(range(50, 500))
    planner = planner_times(sample, 2048, rounds, planned)
    targets = [verdict("ragged_packed_of_dense_bytes", routing["of_dense"]["ragged_packed"], 0.17)]
    targets += [
        verdict(f"fill_of_memcpy_{name}", known[name]["of_memcpy"], 0.8, at_least=True)
        for name in ("codeio", "agent_sessions")
        if name in known
    ]
    for name, least in (("gsm8k", 5.0), ("agent_sessions", 1.0)):
        if name in known:
            targets.append(verdict(f"fill_times_numpy_{name}", known[name]["times_numpy"], least, at_least=True))
    figures = {"lists": lists, "routing": routing, "planner": planner}
    equal = all(each["equal_to_numpy"] and (each["grain"] or {}).get("nothing_lost", True) for each in lists)
    return {
        "machine": machine(),
        "rounds": rounds,
        "notes": notes,
        "equal": equal,
        "figures": figures,
        "targets": targets,
    }


def print_tables(result: dict[str, Any]) -> None:
    print(f"{result['machine']}, {result['rounds']} rounds, medians (min-max) in ms")
    print(f"{'list':<16}{'rows':>6}{'effic.':>8}{'MB':>7}{'fill':>21}{'memcpy, best':>21}{'numpy':>21}"
          f"{'of memcpy':>11}{'x numpy':>9}")  # fmt: skip
    for each in result["figures"]["lists"]:
        ms = each["ms"]
        best = min(ms["memcpy_1"], ms["memcpy_all"], key=lambda one: one["median"])
        cells = "".join(f"{one['median']:>8.2f} ({one['min']:.1f}-{one['max']:.1f})".rjust(21)
                        for one in (ms["fill"], best, ms["numpy"]))  # fmt: skip
        print(f"{each['list']:<16}{each['rows']:>6}{each['efficiency']:>8.3f}{each['nbytes'] / 1e6:>7.1f}{cells}"
              f"{each['of_memcpy']:>11.2f}{each['times_numpy']:>9.1f}")  # fmt: skip
    for each in result["figures"]["lists"]:
        ms, grain = each["ms"], each["grain"]
        print(f"{each['list']:<16}of the fill {ms['gather']['median']:.2f} ms look records up, native "
              f"{ms['native']['median']:.2f} ms, {each['native_of_memcpy']:.2f} of memcpy")  # fmt: skip
        if grain is not None:
            print(f"{'':<16}plan and fill {grain['ms']['ours']['median']:.1f} ms; Grain "
                  f"{grain['ms']['grain']['median']:.1f} ms, {grain['times_ours']:.1f} times, {grain['rows']} rows, "
                  f"efficiency {grain['efficiency']:.3f}")  # fmt: skip
    routing = result["figures"]["routing"]
    for name, share in routing["of_dense"].items():
        print(f"{name:<16}{routing['nbytes'][name] / 1e6:>10.1f} MB of a micro-batch, {share:.3f} of dense")
    for name, one in routing["times"]["ms"].items():
        print(f"{name:<28}{one['median']:>9.2f} ms ({one['min']:.1f}-{one['max']:.1f})")
    for each in result["figures"]["planner"]:
        print(f"planner, {each['trajectories']:>7} trajectories {each['ms']['median']:>9.1f} ms")
    print_targets(result["targets"])


def plot(result: dict[str, Any], path: Path) -> bool:
    """Bytes written per second by list and arm; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    lists = result["figures"]["lists"]
    drawing, axes = pyplot.subplots(figsize=(8, 4))
    for number, arm in enumerate(("fill", "native", "memcpy_all", "memcpy_1", "numpy")):
        rates = [each["nbytes"] / each["ms"][arm]["median"] / 1e6 for each in lists]
        axes.bar([at + 0.16 * number for at in range(len(lists))], rates, 0.16, label=arm)
    axes.set_xticks([at + 0.32 for at in range(len(lists))], [each["list"] for each in lists])
    axes.set_ylabel("GB/s written, median")
    axes.legend(fontsize="small")
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="folder of the length lists")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--planned", default="1000,10000,100000", help="trajectories to plan, with commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    result = measure(args.lengths, args.rounds, [int(count) for count in args.planned.split(",")])
    path = keep("pack", result, args.results)
    if not plot(result, path.with_suffix(".svg")):
        result["notes"].append("no plot: matplotlib is missing; pip install 'shmstage[bench]'")
    if args.json:
        print(json.dumps(result))
    else:
        print_tables(result)
        print("\n".join(result["notes"]))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

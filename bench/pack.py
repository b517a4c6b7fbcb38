"""Filling a micro-batch against this machine's memcpy, measured in the same run, and against a plain numpy packer.

Real length lists, each as one micro-batch of 7 word fields, filled again and again into the same warm shared memory,
the arms alternating. The ceiling is a memcpy of as many bytes onto the same pages, by one thread or by all cores,
whichever is faster. Routing: the bytes that each encoding writes at a quarter fill, and how long writing them takes,
from dense arrays and from held ones. Planner: time to place up to 100,000 trajectories.

    python bench/pack.py [--lengths FOLDER] [--rounds N] [--json] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from results import keep, machine, print_targets, spread, verdict

from shmstage import _native
from shmstage.packing.fields import SEGMENT_IDS, SEGMENT_POSITIONS, carried_fields
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import PlannedMicrobatch, Planner, PlanSettings
from shmstage.packing.routing import PACKED, RAGGED, id_bits, routing_fields
from shmstage.packing.trajectory import Trajectory

LENGTHS = Path(__file__).resolve().parents[2] / "shared" / "reference" / "lengths"
#: tokens of a row, as each list is used
ROWS_OF = {"gsm8k": 2048, "humaneval": 1024, "codeio": 8192, "agent_sessions": 131072}
OPTIONAL = frozenset({"ref_logprobs"})
LAYERS, TOP_K, EXPERTS = 60, 10, 512
Views = dict[str, npt.NDArray[Any]]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_lengths(path: Path, longest: int) -> list[int]:
    pairs = json.loads(path.read_text())["pairs"]
    return [length for prompt, completion in pairs if 0 < (length := prompt + completion) <= longest]


def plan_all(lengths: Sequence[int], tokens: int) -> PlannedMicrobatch:
    """All of them as one micro-batch with no more rows than it takes."""
    rows = len(lengths)
    for _ in range(2):
        planner = Planner(PlanSettings(rows=rows, tokens=tokens))
        for arrival, length in enumerate(lengths):
            planner.add(arrival, length)
        (plan,) = planner.flush()
        rows = sum(bool(row.segments) for row in plan.rows)
    return plan


def trajectory(number: int, length: int, dice: np.random.Generator, **more: Any) -> Trajectory:
    floats = {name: dice.random(length, np.float32) for name in ("advantages", "old_logprobs", *sorted(OPTIONAL))}
    tokens = dice.integers(0, 1 << 17, length, dtype=np.int32)
    mask = np.ones(length, np.float32)
    return Trajectory(trajectory_id=f"t{number}", tokens=tokens, loss_mask=mask, **floats, **more)


class Shared:
    """Warm shared memory, 64-byte aligned arrays in it."""

    def __init__(self, nbytes: int) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            os.ftruncate(file.fileno(), nbytes)
            self.memory = mmap.mmap(file.fileno(), nbytes)
        _native.populate(self.memory, True)

    def views(self, specs: dict[str, tuple[str, tuple[int, ...]]]) -> Views:
        views, at = {}, 0
        for name, (dtype, shape) in specs.items():
            count = int(np.prod(shape))
            views[name] = np.frombuffer(self.memory, dtype, count, at).reshape(shape)
            at += -(-views[name].nbytes // 64) * 64
        return views


def nbytes_of(specs: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(-(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64 for dtype, shape in specs.values())


def word_specs(rows: int, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    words = {SEGMENT_IDS: "int32", SEGMENT_POSITIONS: "int32"}
    words |= {field.packed: field.dtype for field in carried_fields(OPTIONAL)}
    return {name: (dtype, (rows, tokens)) for name, dtype in words.items()}


def numpy_into(plan: PlannedMicrobatch, held: dict[int, Trajectory], views: Views) -> None:
    """The packer one would write first, into arrays that exist already."""
    fields = carried_fields(OPTIONAL)
    for view in views.values():
        view[...] = 0
    for row, planned in enumerate(plan.rows):
        for number, segment in enumerate(planned.segments, start=1):
            end = segment.start + segment.length
            views[SEGMENT_IDS][row, segment.start : end] = number
            views[SEGMENT_POSITIONS][row, segment.start : end] = np.arange(segment.length)
            for field in fields:
                views[field.packed][row, segment.start : end] = getattr(held[segment.arrival], field.source)


def alternating(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each arm; the first round is thrown away."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            begin = time.perf_counter()
            arm()
            if number:
                samples[name].append(1e3 * (time.perf_counter() - begin))
    return samples


def memcpy_arms(shared: Shared, nbytes: int, pool: ThreadPoolExecutor, threads: int) -> dict[str, Callable[[], object]]:
    source = np.ones(nbytes, np.uint8)
    into = np.frombuffer(shared.memory, np.uint8, nbytes)
    cuts = [nbytes * part // threads // 64 * 64 for part in range(threads)] + [nbytes]
    parts = [(into[a:b], source[a:b]) for a, b in pairwise(cuts)]

    def together() -> None:
        list(pool.map(lambda part: _native.copy_into(*part), parts))

    return {"memcpy_1": lambda: _native.copy_into(into, source), "memcpy_all": together}


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
        "times_numpy": ms["numpy"]["median"] / fill,
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


def routing_times(rounds: int) -> dict[str, Any]:
    """Routing of 16,384 real tokens in 4 rows x 16,384, written in each encoding from dense and from held sources."""
    rows, tokens, dice, bits = 4, 16384, np.random.default_rng(2), id_bits(EXPERTS)
    lengths = [3001] * 5 + [1379]
    first = (np.arange(TOP_K) * 51).astype(np.int16)
    spans, dense, at = [], [], [0] * rows
    for number, length in enumerate(lengths):
        row = number * rows // len(lengths)
        spans.append((row, at[row], length))
        at[row] += length
        dense.append(first + dice.integers(0, 50, (length, LAYERS, 1), dtype=np.int16))
    held = [(_native.pack_routing(each, LAYERS, TOP_K, bits), len(each)) for each in dense]
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
        for kind, sources in (("dense", dense), ("held", held)):
            routing = (encoding, LAYERS, TOP_K, bits, ids, *rest, sources)
            arms[f"{encoding} from {kind}"] = lambda routing=routing: _native.fill_microbatch(
                rows, tokens, spans, *words, [], routing
            )
    ms = {arm: spread(values) for arm, values in alternating(arms, rounds).items()}
    packed = sum(len(each) for each, _ in held) / sum(each.nbytes for each in dense)
    return {"real_tokens": sum(lengths), "places": rows * tokens, "nbytes": sizes, "ms": ms, "held_of_dense": packed}


def planner_times(lengths: Sequence[int], tokens: int, rounds: int) -> list[dict[str, Any]]:
    out = []
    for count in (1_000, 10_000, 100_000):
        many = np.random.default_rng(3).choice(lengths, count).tolist()

        def plan(many: list[int] = many) -> None:
            planner = Planner(PlanSettings(rows=64, tokens=tokens))
            for arrival, length in enumerate(many):
                planner.add(arrival, length)
            planner.flush()

        ms = spread(alternating({"plan": plan}, min(rounds, 3))["plan"])
        out.append({"trajectories": count, "ms": ms})
    return out


def measure(folder: Path, rounds: int) -> dict[str, Any]:
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
    note("routing")
    routing = {**routing_bytes(), "times": routing_times(rounds)}
    note("planner")
    known = {each["list"]: each for each in lists}
    sample = read_lengths(folder / "gsm8k.json", 2048) if "gsm8k" in found else list(range(50, 500))
    planner = planner_times(sample, 2048, rounds)
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
    equal = all(each["equal_to_numpy"] for each in lists)
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
    routing = result["figures"]["routing"]
    for name, share in routing["of_dense"].items():
        print(f"{name:<16}{routing['nbytes'][name] / 1e6:>10.1f} MB of a micro-batch, {share:.3f} of dense")
    for name, one in routing["times"]["ms"].items():
        print(f"{name:<28}{one['median']:>9.2f} ms ({one['min']:.1f}-{one['max']:.1f})")
    for each in result["figures"]["planner"]:
        print(f"planner, {each['trajectories']:>7} trajectories {each['ms']['median']:>9.1f} ms")
    print_targets(result["targets"])


def plot(result: dict[str, Any], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        note("no plot: pip install matplotlib")
        return
    lists = result["figures"]["lists"]
    axes = (figure := Figure(figsize=(8, 4))).subplots()
    for number, arm in enumerate(("fill", "memcpy_all", "memcpy_1", "numpy")):
        rates = [each["nbytes"] / each["ms"][arm]["median"] / 1e6 for each in lists]
        axes.bar([at + 0.2 * number for at in range(len(lists))], rates, 0.2, label=arm)
    axes.set_xticks([at + 0.3 for at in range(len(lists))], [each["list"] for each in lists])
    axes.set_ylabel("GB/s written, median")
    axes.legend()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    result = measure(args.lengths, args.rounds)
    keep("pack", result)
    if args.plot:
        plot(result, args.plot)
    if args.json:
        print(json.dumps(result))
    else:
        print_tables(result)
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

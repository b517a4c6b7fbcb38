"""What control and Python cost when the device takes no time, and how long the commands take to start.

Two runs per order, with few and with many micro-batches per step, small payloads, an instant simulated device: the
step's duration is a + b * micro-batches, so b is the cost of one micro-batch (pack, hand over, stage, dispatch, tell
that it is over) and a that of a step (update, metrics, step line). Everything on the way counts, since nothing else is
waited for. Beside it the processor time of both processes, from the same runs: it hardly depends on what else the
cores are given to do.

The simulated engine takes part of that for itself: what it takes alone, driven by one thread, is measured in the same
run and is not counted as ours. So are the bounds: the same calls and events with nothing behind them, a bare ZeroMQ
round trip, and a hand-over between two threads.

Events (``OUT/events``) are on throughout. What they take of a step of 10 ms is the number that a real step notes times
what one costs: noted, encoded and written, in processor time. Steps with and without them, in turn, are shown beside.

    python bench/overhead.py [--steps 150] [--rounds 2] [--json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from overhead_events import ENGINE, MICROBATCHES, alternating, costs
from overhead_parts import calls, engine_alone, hand_over, round_trip
from results import RESULTS, keep, machine, print_targets, spread, verdict

from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import BOUNDARIES, Settings
from shmstage.timeline.reading import read_events

FEW, MANY = 1, 9
ROWS, TOKENS = 4, 256
#: steps left out: programs, sockets and memory are touched for the first time there
WARM_UP = 10
PARTS = {
    "hand_over_s": "from one thread to another",
    "round_trip_s": "a bare ZeroMQ round trip; two per staged micro-batch",
    "calls_s": "the calls and events of a staged micro-batch, nothing behind them",
    "engine_alone_s": "the simulated engine alone, per micro-batch; not counted as ours",
}
COMMANDS = {
    "shmstage --help": ["--help"],
    "shmstage run --print-config": ["run", "--print-config"],
    "shmstage budget": ["budget"],
    "shmstage status": ["status"],
}


def step_seconds(
    mode: str, microbatches: int, steps: int, out: Path, engine: dict[str, float] | None = None, events: str = "on"
) -> tuple[list[float], float]:
    """Seconds from one update's end to the next one's, on the device's clock; processor seconds of the whole run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    settings = Settings(
        run=f"bench-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=ROWS, tokens=TOKENS, steps=steps, microbatches_per_step=microbatches, aux_slots=0, latch=False,
        engine="shmstage.testing.engines_simulated:make_engine",
        engine_settings={**(engine or {}), "record": str(out / "device.json")}, events=events,
        source="shmstage.testing.simulated_input:make_source",
        source_settings={"rows": ROWS, "tokens": TOKENS, "microbatches": 8},
    )  # fmt: skip
    run(completed(settings), _Quiet())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    device = json.loads((out / "device.json").read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [b["step_ns"] / 1e9 for b in device["boundaries"][WARM_UP:]], cpu_s


def control(steps: int, rounds: int, work: Path) -> dict[str, Any]:
    """Per order: step time with few and with many micro-batches, and what follows from both."""
    samples: dict[str, dict[int, list[float]]] = {mode: {FEW: [], MANY: []} for mode in BOUNDARIES}
    cpu: dict[str, dict[int, list[float]]] = {mode: {FEW: [], MANY: []} for mode in BOUNDARIES}
    for number in range(rounds):
        for mode in BOUNDARIES:
            for count in (FEW, MANY):
                print(f"round {number + 1} of {rounds}: {mode}, {count} per step", file=sys.stderr)
                seconds, cpu_s = step_seconds(mode, count, steps, work / f"{mode}-{count}-{number}")
                samples[mode][count] += seconds
                cpu[mode][count].append(cpu_s)
    figures = {}
    for mode, by_count in samples.items():
        few, many = spread(by_count[FEW]), spread(by_count[MANY])
        per_microbatch = (many["median"] - few["median"]) / (MANY - FEW)
        figures[mode] = {
            "step_s": {str(FEW): few, str(MANY): many},
            "per_microbatch_s": per_microbatch,
            "cpu_per_microbatch_s": (median(cpu[mode][MANY]) - median(cpu[mode][FEW])) / (steps * (MANY - FEW)),
            "per_step_s": max(0.0, few["median"] - FEW * per_microbatch),
        }
    return figures


def events_cost(steps: int, rounds: int, work: Path) -> dict[str, Any]:
    """Of each process, the share of a step of 10 ms that events take; and such steps with and without them."""
    mode = "staged_before_update"

    def steps_with(events: str, number: int) -> list[float]:
        print(f"round {number + 1} of {rounds}: events {events}", file=sys.stderr)
        return step_seconds(mode, MICROBATCHES, steps, work / f"events-{events}-{number}", ENGINE, events)[0]

    steps_s = alternating(steps_with, rounds)
    processes = costs(read_events(work / "events-on-0"), WARM_UP, work)
    return {"processes": processes, "share": sum(each["share"] for each in processes.values()), "step_s": steps_s}


def start_up(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds from the start of a command's process to its end."""
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "shmstage.cli", *arguments], capture_output=True, check=False)
            samples[name].append(time.monotonic() - began)
    return {name: spread(values) for name, values in samples.items()}


def plot(figures: dict[str, Any], path: Path) -> bool:
    """Per order, what a micro-batch takes, beside what bounds it; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    orders = figures["control"]
    drawing, axes = pyplot.subplots(figsize=(9, 3.5))
    places = range(len(orders))
    engine = [1e3 * figures["engine_alone_s"]["median"]] * len(orders)
    whole = [1e3 * each["per_microbatch_s"] for each in orders.values()]
    axes.barh([p - 0.2 for p in places], whole, 0.35, label="step time per micro-batch")
    axes.barh([p - 0.2 for p in places], engine, 0.35, label="of it the simulated engine, measured alone")
    processor = [1e3 * each["cpu_per_microbatch_s"] for each in orders.values()]
    axes.barh([p + 0.2 for p in places], processor, 0.35, label="processor time, both processes", color="0.7")
    axes.axvline(1.0, linestyle="--", color="black", label="target for all but the engine")
    bare = 1e3 * figures["calls_s"]["median"]
    axes.axvline(bare, linestyle=":", color="black", label="the same calls and events with nothing behind them")
    axes.set_yticks(list(places), list(orders))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawing.tight_layout()
    drawing.savefig(path)
    pyplot.close(drawing)
    return True


class _Quiet:
    def poll(self) -> None:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    if args.steps < WARM_UP + 3:
        parser.error(f"--steps {args.steps}: the first {WARM_UP} are left out; give {WARM_UP + 3} or more")
    with tempfile.TemporaryDirectory() as work:
        figures = control(args.steps, args.rounds, Path(work))
        events = events_cost(args.steps, args.rounds, Path(work))
        parts = {
            "engine_alone_s": engine_alone(ROWS, TOKENS, MANY),
            "calls_s": calls(f"bench-{os.getpid()}-calls"),
            "round_trip_s": round_trip(Path(work)),
            "hand_over_s": hand_over(),
        }
    commands = start_up(max(3, args.rounds))
    engine_s = parts["engine_alone_s"]["median"]
    ours_ms = {mode: 1e3 * max(0.0, figure["per_microbatch_s"] - engine_s) for mode, figure in figures.items()}
    targets = [verdict(f"control and Python per micro-batch, {mode}, ms", ms, 1.0) for mode, ms in ours_ms.items()]
    targets += [
        verdict(f"events, of a step of 10 ms, {process}", each["share"], 0.01)
        for process, each in events["processes"].items()
    ]
    result = {
        "machine": machine(), "steps": args.steps, "rounds": args.rounds,
        "figures": {"control": figures, **parts, "events": events, "start_up_s": commands}, "targets": targets,
    }  # fmt: skip
    path = keep("overhead", result, args.results)
    note = "" if plot(result["figures"], path.with_suffix(".svg")) else (
        "no plot: matplotlib is missing; pip install 'shmstage[bench]'"
    )  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return 0
    print(result["machine"])
    print(
        f"{'order':<22}{'per micro-batch':>16}{'processor':>12}{'per step':>12}"
        f"{f'step of {FEW}':>14}{f'step of {MANY}':>14}"
    )
    for mode, figure in figures.items():
        names = ("per_microbatch_s", "cpu_per_microbatch_s", "per_step_s")
        numbers = [*(figure[name] for name in names), *(each["median"] for each in figure["step_s"].values())]
        widths = (13, 9, 9, 11, 11)
        print(f"{mode:<22}" + "".join(f"{1e3 * n:>{w}.3f} ms" for n, w in zip(numbers, widths, strict=True)))
    for name, what in PARTS.items():
        print(f"{what:<66}{1e3 * parts[name]['median']:>8.3f} ms, least {1e3 * parts[name]['min']:.3f}")
    print(f"{'  and of the processor':<66}{1e3 * parts['engine_alone_s']['cpu_s']:>8.3f} ms")
    for process, each in events["processes"].items():
        print(
            f"{f'events of the {process}: ' + str(each['events_per_step']) + ' per step':<66}"
            f"{1e6 * each['all_s']['median']:>8.2f} us each, {1e6 * each['note_s']['median']:.2f} of it where they "
            f"happen; {100 * each['share']:.2f} % of 10 ms"
        )
    on, off = (1e3 * events["step_s"][which]["median"] for which in ("on", "off"))
    print(f"{'steps with events, and without':<66}{on:>8.3f} ms, {off:.3f} ms")
    for name, seconds in commands.items():
        print(f"{name:<30}{1e3 * seconds['median']:>8.0f} ms")
    print_targets(targets)
    if note:
        print(note)
    return 0


if __name__ == "__main__":
    sys.exit(main())

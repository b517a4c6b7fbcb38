"""What control and Python cost when the device takes no time, and how long the commands take to start.

Two runs per order, with few and with many micro-batches per step, small payloads, an instant simulated device: the
step's duration is a + b * micro-batches, so b is the cost of one micro-batch (pack, hand over, stage, dispatch, tell
that it is over) and a that of a step (update, metrics, step line). Everything on the way counts, since nothing else is
waited for. Beside it the processor time of both processes, from the same runs: it hardly depends on what else the
cores are given to do.

    python bench/overhead.py [--steps 150] [--rounds 2] [--json]
"""

from __future__ import annotations

import argparse
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

import zmq
from results import RESULTS, keep, machine, print_targets, spread, verdict

from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import BOUNDARIES, Settings

FEW, MANY = 1, 9
ROWS, TOKENS = 4, 256
#: steps left out: programs, sockets and memory are touched for the first time there
WARM_UP = 10
COMMANDS = {
    "shmstage --help": ["--help"],
    "shmstage run --print-config": ["run", "--print-config"],
    "shmstage budget": ["budget"],
    "shmstage status": ["status"],
}


def step_seconds(mode: str, microbatches: int, steps: int, out: Path) -> tuple[list[float], float]:
    """Seconds from one update's end to the next one's, on the device's clock; processor seconds of the whole run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    settings = Settings(
        run=f"bench-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=ROWS, tokens=TOKENS, steps=steps, microbatches_per_step=microbatches, aux_slots=0, latch=False,
        engine="shmstage.testing.engines_simulated:make_engine",
        engine_settings={"record": str(out / "device.json")},
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


def start_up(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds from the start of a command's process to its end."""
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            began = time.monotonic()
            subprocess.run([sys.executable, "-m", "shmstage.cli", *arguments], capture_output=True, check=False)
            samples[name].append(time.monotonic() - began)
    return {name: spread(values) for name, values in samples.items()}


ECHO = """
import sys, zmq
echo = zmq.Context().socket(zmq.REP)
echo.connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    echo.send(echo.recv())
"""


def round_trip(work: Path, count: int = 2000) -> dict[str, float]:
    """Seconds of a bare ZeroMQ round trip between two processes with nothing behind it: what two calls cannot beat."""
    address = f"ipc://{work}/echo"
    context = zmq.Context()
    asking = context.socket(zmq.REQ)
    asking.bind(address)
    echo = subprocess.Popen([sys.executable, "-c", ECHO, address, str(count)])
    samples = []
    for _ in range(count):
        began = time.monotonic()
        asking.send(bytes(200))
        asking.recv()
        samples.append(time.monotonic() - began)
    echo.wait(60)
    context.destroy(linger=0)
    return spread(samples[count // 10 :])


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
        bare = round_trip(Path(work))
    commands = start_up(max(3, args.rounds))
    targets = [
        verdict(f"control and Python per micro-batch, {mode}, ms", 1e3 * figure["per_microbatch_s"], 1.0)
        for mode, figure in figures.items()
    ]
    result = {
        "machine": machine(), "steps": args.steps, "rounds": args.rounds,
        "figures": {"control": figures, "round_trip_s": bare, "start_up_s": commands}, "targets": targets,
    }  # fmt: skip
    keep("overhead", result, args.results)
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
    print(f"a bare round trip {1e3 * bare['median']:.3f} ms, least {1e3 * bare['min']:.3f}; two per staged micro-batch")
    for name, seconds in commands.items():
        print(f"{name:<30}{1e3 * seconds['median']:>8.0f} ms")
    print_targets(targets)
    return 0


if __name__ == "__main__":
    sys.exit(main())

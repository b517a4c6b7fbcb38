"""How much memory a micro-batch takes on its way: peak of orchestrator and trainer over what they need without it.

Proportional set size of both processes together, read again and again while micro-batches flow, over a baseline, in
multiples of the payload; *high water* is the kernel's own mark of resident memory, which no reading can miss and which
is at least the true peak (``memory_sampling.py``).

The baseline is read of the same two processes in the same run, when both have imported what they need, the orchestrator
holds its trajectories and the trainer's engine has compiled its programs for the very layout, but no pool exists:
plug-ins (``memory_rig.py``) hold both there until it has been read. Everything after that counts: the pool, the
device's copies, the runtime's own memory of a first execution, a checkpoint, threads, queues.

    python bench/memory.py [--payload 64MB,256MB] [--arms ...] [--steps 10] [--rounds 1] [--hold 0] [--json]

Arms: *optax*, the engine that ships on JAX's CPU backend, its device buffers are private host memory; *simulated*, a
device whose memory is host memory as well and whose uploads read the slot itself; both staged before the update, over
shared memory. *streamed*, the simulated engine behind gRPC in pieces of 4 MB, staged in the same order; *pickled*, in
one message, serial. ``optax`` has a loss that reads all bytes and needs no memory for it: activations are the model's,
not the transport's. ``--hold`` keeps bytes in the source that nobody needs, to see that the target would be missed.

Exit 1 if the simulated engine was not trained the same over shared memory and over gRPC.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memory_rig import Gate, layout_of
from memory_sampling import Sampler
from results import RESULTS, available_nbytes, keep, machine, machine_line, plot, print_targets, spread, verdict

from shmstage.budget.sizes import parse_size
from shmstage.errors import InputError
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.records import read_json
from shmstage.settings import Settings
from shmstage.testing.simulated_input import InputSettings

#: arm → (how payloads travel, engine, order of the commands)
ARMS = {
    "optax": ("shm", "optax", "staged_before_update"),
    "simulated": ("shm", "simulated", "staged_before_update"),
    "streamed": ("grpc", "simulated", "staged_before_update"),
    "pickled": ("unary", "simulated", "serial"),
}
ROWS, LAYERS, TOP_K, EXPERTS = 64, 60, 10, 512
TOKEN_NBYTES = 6 * 4 + 2 * LAYERS * TOP_K
SLOTS, AUX_SLOTS, DEVICE_BUFFERS = 3, 1, 2
#: different micro-batches that the source holds, before the baseline is read
MICROBATCHES = 2
MICROBATCHES_PER_STEP = 3
#: a device that takes a while per micro-batch, else its buffers would never all be full
MICROBATCH_S = 0.05
ALLOWED_NBYTES = 64 << 20
#: payloads that a run may take in all, trajectories and a margin included: with less an arm is left out
ROOM = {"shm": 9, "grpc": 12, "unary": 17}


def input_of(payload_nbytes: int) -> InputSettings:
    tokens = max(2, round(payload_nbytes / (ROWS * TOKEN_NBYTES)))
    return InputSettings(ROWS, tokens, MICROBATCHES, layers=LAYERS, top_k=TOP_K, experts=EXPERTS)


def run_shm(given: InputSettings, arm: str, args: argparse.Namespace, out: Path, gate: Gate) -> None:
    _, kind, mode = ARMS[arm]
    settings = Settings(
        run=f"bench-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=given.rows, tokens=given.tokens, steps=args.steps, microbatches_per_step=MICROBATCHES_PER_STEP,
        slots=SLOTS, aux_slots=AUX_SLOTS, device_buffers=DEVICE_BUFFERS, latch=False, max_restarts=0,
        engine="memory_rig:make_engine",
        engine_settings={
            "gate": str(gate.directory), "kind": kind, "input": asdict(given), "microbatch_s": MICROBATCH_S,
        },
        source="memory_rig:make_source",
        source_settings={"gate": str(gate.directory), "hold_nbytes": args.hold, **asdict(given)},
    )  # fmt: skip
    run(completed(settings), _Quiet())


def run_grpc(given: InputSettings, arm: str, args: argparse.Namespace, out: Path, gate: Gate) -> None:
    path, _, mode = ARMS[arm]
    out.mkdir()
    said = {
        "gate": str(gate.directory), "out": str(out), "mode": mode, "unary": path == "unary", "steps": args.steps,
        "microbatches": MICROBATCHES_PER_STEP, "input": asdict(given), "engine": {"microbatch_s": MICROBATCH_S},
    }  # fmt: skip
    command = [sys.executable, str(Path(__file__).with_name("memory_rig.py")), json.dumps(said)]
    # a pipe that only this process holds open: it ends when we do
    with subprocess.Popen(command, stdin=subprocess.PIPE) as orchestrator:
        code = orchestrator.wait()
    if code:
        raise subprocess.CalledProcessError(code, command)


PATHS = {"shm": run_shm, "grpc": run_grpc, "unary": run_grpc}


def measured(given: InputSettings, arm: str, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One run: what the sampler saw, and what was trained."""
    out, gate = work / "out", Gate(work / "gate")
    gate.directory.mkdir(parents=True)
    with Sampler(out, gate, args.every_ms / 1e3) as sampler:
        PATHS[ARMS[arm][0]](given, arm, args, out, gate)
    return {**sampler.seen(), "param_digest": read_json(out / "summary.json")["param_digest"]}


def measure(arms: list[str], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Arms alternate within a round: whatever else the machine does meets all of them."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    notes: list[str] = []
    wanted = arms
    for payload in args.payload:
        given, room = input_of(payload), available_nbytes()
        arms = [arm for arm in wanted if ROOM[ARMS[arm][0]] * payload + args.hold < room]
        if left_out := [arm for arm in wanted if arm not in arms]:
            notes.append(f"{', '.join(left_out)} left out at {payload / 1e6:g} MB: {room / 1e9:.1f} GB are available")
        if not arms:
            continue
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for number in range(args.rounds):
            for arm in arms:
                print(f"{payload / 1e6:g} MB, round {number + 1} of {args.rounds}: {arm}", file=sys.stderr, flush=True)
                runs[arm].append(measured(given, arm, args, work / f"{payload}-{number}-{arm}"))
        nbytes = layout_of(given).payload_nbytes
        for arm in arms:
            figures[f"{arm} {payload / 1e6:g} MB"] = figure_of(runs[arm], arm, nbytes)
        if len({r["param_digest"] for arm in arms if ARMS[arm][1] == "simulated" for r in runs[arm]}) > 1:
            problems.append(f"{payload / 1e6:g} MB: the simulated engine was not trained the same on each path")
    return {"figures": figures, "problems": problems, "notes": notes}


def figure_of(runs: list[dict[str, Any]], arm: str, payload_nbytes: int) -> dict[str, Any]:
    path, kind, mode = ARMS[arm]
    peaks = [r["peak"]["pss_nbytes"] for r in runs]
    highest = max(runs, key=lambda r: r["peak"]["pss_nbytes"])
    return {
        "arm": arm, "path": path, "engine": kind, "mode": mode, "payload_nbytes": payload_nbytes,
        "peak_over_nbytes": spread(peaks), "of_payload": spread([peak / payload_nbytes for peak in peaks]),
        "high_water_of_payload": spread([r["high_water_nbytes"] / payload_nbytes for r in runs]),
        "growth_nbytes": max(r["growth_nbytes"] for r in runs), "reading_s": highest["reading_s"],
        "readings": highest["readings"], "peak": highest["peak"], "peak_of": highest["peak_of"],
        "baseline": highest["baseline"], "series": highest["series"],
    }  # fmt: skip


def limit_of(payload_nbytes: int) -> int:
    """The pool, as many payloads as there are device buffers (host memory, in these arms), and a fixed rest."""
    return (SLOTS + AUX_SLOTS + DEVICE_BUFFERS) * payload_nbytes + ALLOWED_NBYTES


def targets_of(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name, figure in figures.items():
        if figure["path"] == "shm":
            payload = figure["payload_nbytes"]
            limit = limit_of(payload) / payload
            found.append(verdict(f"peak over the baseline in payloads, {name}", figure["of_payload"]["max"], limit))
    return found


def print_table(result: dict[str, Any]) -> None:
    print(machine_line(result["machine"]))
    print(f"{'arm':<12}{'path':<7}{'order':<22}{'payload':>10}{'peak over':>13}{'in payloads':>13}{'high water':>15}"
          f"{'orchestrator':>14}{'trainer':>11}{'growth':>10}{'a reading':>11}")  # fmt: skip
    for f in result["figures"].values():
        halves = [f["peak_of"][role]["pss_nbytes"] / 1e6 for role in ("orchestrator", "trainer")]
        print(
            f"{f['arm']:<12}{f['path']:<7}{f['mode']:<22}{f['payload_nbytes'] / 1e6:>7.1f} MB"
            f"{f['peak_over_nbytes']['median'] / 1e6:>10.1f} MB{f['of_payload']['median']:>13.2f}"
            f"{f['high_water_of_payload']['median']:>15.2f}{halves[0]:>11.1f} MB{halves[1]:>8.1f} MB"
            f"{f['growth_nbytes'] / 1e6:>7.2f} MB{1e3 * f['reading_s']['median']:>8.2f} ms"
        )


def draw(result: dict[str, Any], figure: Any) -> None:
    """Left the peaks in payloads with the target; right how the largest payload's runs went."""
    figures = result["figures"]
    left, right = figure.subplots(1, 2)
    left.barh(list(figures), [f["of_payload"]["median"] for f in figures.values()])
    ours = {name: f["payload_nbytes"] for name, f in figures.items() if f["path"] == "shm"}
    left.plot([limit_of(p) / p for p in ours.values()], list(ours), "k|", markersize=24, label="target")
    left.set_xlabel("peak over the baseline, payloads")
    left.invert_yaxis()
    left.legend(fontsize="small")
    largest = max(f["payload_nbytes"] for f in figures.values())
    for f in figures.values():
        if f["payload_nbytes"] == largest:
            seconds, nbytes = zip(*f["series"], strict=True)
            right.plot(seconds, [each / largest for each in nbytes], label=f["arm"], linewidth=1)
    right.set_xlabel("seconds since the pool may exist")
    right.set_ylabel(f"over the baseline, payloads of {largest / 1e6:.0f} MB")
    right.legend(fontsize="small")


class _Quiet:
    def poll(self) -> None:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payload", default="64MB,256MB", help="of a micro-batch, with commas")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)}, with commas")
    parser.add_argument("--steps", type=int, default=10, help=f"of {MICROBATCHES_PER_STEP} micro-batches")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--every-ms", type=float, default=10.0, help="between two looks")
    parser.add_argument("--hold", type=parse_size, default=0, help="bytes that the source keeps on purpose")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    args.payload = [parse_size(each) for each in args.payload.split(",")]
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"arm {', '.join(unknown)}: want some of {', '.join(ARMS)}")
    notes = []
    for package, needed in (("grpc", lambda arm: ARMS[arm][0] != "shm"), ("optax", lambda arm: arm == "optax")):
        if importlib.util.find_spec(package) is None and (left_out := [arm for arm in arms if needed(arm)]):
            arms = [arm for arm in arms if arm not in left_out]
            notes.append(f"{', '.join(left_out)} left out: {package} is missing; pip install 'shmstage[train,bench]'")
    # the plug-ins are beside this file
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory() as work:
        try:
            found = measure(arms, args, Path(work))
        except InputError as error:
            print(f"this machine has no room for it: {error}; give a smaller --payload", file=sys.stderr)
            return 2
    result = {
        "machine": machine(), "steps": args.steps, "rounds": args.rounds, "hold_nbytes": args.hold, **found,
        "targets": targets_of(found["figures"]), "notes": (notes := notes + found["notes"]),
    }  # fmt: skip
    path = keep("memory", result, args.results)
    if found["figures"]:
        notes += plot(path.with_suffix(".svg"), lambda figure: draw(result, figure), size=(12, 4))
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
        print_targets(result["targets"])
        print("\n".join([*notes, *result["problems"]]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

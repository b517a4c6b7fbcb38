"""How long a device waits at the step boundary: the replay rig.

Real orchestrator, real shared memory, real worker, and a device that takes a given time and states its own idle from
exact stamps (``shmstage/testing/simulated_device.py``). Beside them what is common practice, serial over gRPC, twice:
the second one (A0') is the noise floor. Proportions are the reference's (micro-batch 13.38 s, update 1.5 s, a payload
of 5.15 GB that takes 3.7 s to place, bookkeeping 5.75 s), divided by ``--scale``.

    python bench/boundary.py [--scale 100] [--payload 5.15GB] [--microbatches 1,2,3,9] [--arms A0,A0',A1,A2,A3]
                             [--variants plain,saved,settling,blocking,two-deep] [--serial-over stream|unary|stronger]
                             [--slots 3] [--device-buffers 2] [--steps 8] [--rounds 2] [--events DIR] [--json]

Arms: A0 and A0' serial over gRPC, A1 pipelined, A2 staged after the update, A3 staged before it, over shared memory; S0
is serial over shared memory; G1, G2, G3 are A1, A2, A3 over gRPC, streamed. ``--serial-over`` says how A0's payloads
travel: in a stream of 4 MB pieces, pickled in one message, or as is stronger here (the default: both are run once,
shortly, and the one with less idle is taken). A0s and U0 are streamed and pickled whatever it says.

Variants: plain; saved (a checkpoint and a weight sync in every step); settling (the engine reads overflow flags on the
host); blocking (it also returns from an update only when the step's last micro-batch is done, as the reference trainer
does); two-deep (a call returns only when no more than two programs are unfinished, as with a bounded device queue).

What the reference calls arrival, a payload's way to the trainer's host in 4.0 to 7.6 s, is gRPC's own time here; it is
stated, scaled up. Through shared memory nothing arrives, it is packed there. The trajectories are in the orchestrator's
memory from the beginning, for all arms.

The events of each run over shared memory are read back, and what the estimators make of them is held against the
device's stamps at every boundary. With ``--events DIR`` they are kept, a run in a directory, as ``shmstage report``
reads them.

Full size, ``--scale 1``: device memory is not simulated in this machine's then (hashes of what was read are kept), most
trajectories share routing, and an arm that does not fit is refused beforehand:

    python bench/boundary.py --scale 1 --slots 2 --microbatches 1 --variants plain --arms S0,A3 --steps 3 --rounds 1
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from boundary_arms import ARMS, ARRIVAL_S, PLACING_S, STRONGER, VARIANTS, WARM_UP, Rig, measured
from boundary_checks import contents_of, expected, faults_of
from boundary_memory import MAX_MESSAGE_NBYTES, check_memory
from boundary_plot import draw_variants
from results import RESULTS, keep, machine, print_targets, spread, verdict

from shmstage.budget.sizes import parse_size
from shmstage.errors import InputError, ShmstageError, StoppedError
from shmstage.memory.limits import read_limits

#: what every run of the same steps has to agree in
EXACT = ("param_digest", "losses", "denominators")
#: idle below this is taken for this in ratios: no device is told apart from another by less
LEAST_IDLE_S = 1e-6
SERIAL_OVER = {"stream": "grpc", "unary": "unary", "stronger": STRONGER}
PROBED_STEPS = 4
SHOWN_FAULTS = 3


def stronger_path(rig: Rig, steps: int, microbatches: int, work: Path) -> dict[str, Any]:
    """Run both ways to send a payload once: what each took, and the one that lets the device wait less."""
    if rig.payload_nbytes > MAX_MESSAGE_NBYTES:
        return {"chosen": "grpc", "why": f"{rig.payload_nbytes} bytes do not go into one message"}
    tried: dict[str, Any] = {}
    for path in ("grpc", "unary"):
        print(f"which is the stronger: {path}", file=sys.stderr)
        run = measured(rig, path, "serial", "plain", microbatches, steps, work / f"probe-{path}")
        tried[path] = {"idle_s": median(run["idle_s"]), "step_s": median(run["step_s"])}
    return {"chosen": stronger_of(tried), **tried}


def stronger_of(tried: dict[str, Any]) -> str:
    return min(tried, key=lambda path: float(tried[path]["idle_s"]))


def measure(rig: Rig, paths: dict[str, str], args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """``paths``: how each arm's payloads travel."""
    figures: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    contents = contents_of(rig.source)
    for variant in args.variants:
        for count in args.microbatches:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in paths}
            wanted = expected(contents, args.steps, count)
            for number in range(args.rounds):
                for arm, path in paths.items():  # alternating: whatever else the machine does meets all of them
                    what = f"{variant}, {count} per step, round {number + 1} of {args.rounds}: {arm}"
                    print(what, file=sys.stderr)
                    out = work / f"{variant}-{count}-{number}-{ARMS[arm][1]}"
                    try:
                        run = measured(rig, path, ARMS[arm][1], variant, count, args.steps, out, args.events)
                    except StoppedError:
                        raise
                    except ShmstageError as error:  # what others measured is not lost with it
                        problems.append(f"{what}: {type(error).__name__}: {error}")
                        continue
                    faults = faults_of(run, wanted, rig.payload_nbytes, count)
                    if missing := sum(error is None for error in run.get("event_errors_s", {}).get("reported", [])):
                        faults.append(f"the events tell nothing of {missing} boundaries")
                    problems += [f"{what}: {fault}" for fault in faults[:SHOWN_FAULTS]]
                    runs[arm].append(run)
            trained = {json.dumps([r[key] for key in EXACT]) for of_arm in runs.values() for r in of_arm}
            if len(trained) > 1:
                problems.append(f"{variant}, {count} per step: the arms trained {len(trained)} different things")
            for arm, path in paths.items():
                if runs[arm]:
                    figures[f"{arm} {variant} {count}"] = figure_of(runs[arm], arm, path, variant, count)
    return {"figures": figures, "problems": problems}


def figure_of(runs: list[dict[str, Any]], arm: str, path: str, variant: str, count: int) -> dict[str, Any]:
    def of_all(key: str) -> list[float]:
        return [value for run in runs for value in run[key]]

    idle, step = spread(of_all("idle_s")), spread(of_all("step_s"))
    figure = {
        "arm": arm, "path": path, "mode": ARMS[arm][1], "variant": variant, "microbatches_per_step": count,
        "idle_s": idle, "step_s": step, "idle_share": idle["median"] / step["median"],
        "pack_s": spread(of_all("pack_s")), "placed_s": spread(of_all("placed_s")),
        "told_late_s": max(r["told_late_s"] for r in runs),
    }  # fmt: skip
    if path == "shm":
        errors = [abs(each) for each in of_all("estimate_error_s")]
        figure["reported_idle_s"] = [r["reported_idle_s"]["median"] for r in runs]
        figure["estimate_off_s"] = spread(errors)
        told = {
            name: [error for run in runs for error in run["event_errors_s"][name]]
            for name in ("reported", "by_stamps", "by_calibration")
        }
        figure["events_off_s"] = {
            name: spread([abs(error) for error in of_name if error is not None])
            for name, of_name in told.items()
            if any(error is not None for error in of_name)
        }
        figure["events_missing"] = sum(error is None for error in told["reported"])
        figure["staged"] = [r["staged"] for r in runs]
    else:
        figure["arrival_s"] = spread(of_all("arrival_s"))
    return figure


def targets_of(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    limits = {"plain": 0.002, "saved": 0.002, "settling": 0.005, "blocking": 0.005}
    for figure in figures.values():
        count, variant = figure["microbatches_per_step"], figure["variant"]
        if "reported" in figure.get("events_off_s", {}):
            which = f"{figure['arm']}, {variant}, {count} per step"
            name = f"idle from the events off the device's truth, at most, ms, {which}"
            found.append(verdict(name, 1e3 * figure["events_off_s"]["reported"]["max"], 1.0))
        if figure["arm"] == "A3" and variant in limits:
            limit = 0.01 if count == 1 else limits[variant]
            name = f"idle share of the step, staged before, {variant}, {count} per step"
            found.append(verdict(name, figure["idle_share"], limit))
    base, ours = figures.get("A0s plain 3", figures.get("A0 plain 3")), figures.get("A3 plain 3")
    if base and ours:
        ratio = base["idle_s"]["median"] / max(ours["idle_s"]["median"], LEAST_IDLE_S)
        found.append(verdict("idle, serial over gRPC / staged before, 3 per step", ratio, 100, at_least=True))
    return found


def print_table(result: dict[str, Any]) -> None:
    scale = result["scale"]
    print(f"payload {result['payload_nbytes'] / 1e6:.1f} MB, 1:{scale:g}, {result['machine']}")
    print(
        f"{'arm':<5}{'path':<6}{'order':<22}{'variant':<10}{'per step':>8}{'idle, median':>14}{'max':>11}{'of step':>9}"
        f"{'step':>11}{'estimate off':>14}{'staged':>8}{'arrives':>9}{'placed':>9}"
    )
    for f in result["figures"].values():
        idle, step = f["idle_s"], f["step_s"]
        off = f"{1e3 * f['estimate_off_s']['max']:>11.3f} ms" if "estimate_off_s" in f else f"{'':>14}"
        arrives = f"{scale * f['arrival_s']['median']:>7.1f} s" if "arrival_s" in f else f"{'':>9}"
        print(
            f"{f['arm']:<5}{f['path']:<6}{f['mode']:<22}{f['variant']:<10}{f['microbatches_per_step']:>8}"
            f"{1e3 * idle['median']:>11.3f} ms{1e3 * idle['max']:>8.2f} ms{100 * f['idle_share']:>8.2f}%"
            f"{1e3 * step['median']:>8.1f} ms{off}{','.join(map(str, f.get('staged', []))):>8}{arrives}"
            f"{scale * f['placed_s']['median']:>7.1f} s"
        )
    low, high = ARRIVAL_S
    print(
        f"arrives, placed: a payload's way to the trainer's host and on to the device, scaled up; the reference's are "
        f"{low:g} to {high:g} s and {PLACING_S:g} s. estimate off: the step line's idle against the device's, at most"
    )
    if "chosen" in result["serial_over"]:
        print("A0:", json.dumps(result["serial_over"]))


def paths_of(arms: list[str], rig: Rig, args: argparse.Namespace, work: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """How each arm's payloads travel, and how that was found out. Raises ``BudgetError`` for an arm too large."""
    told: dict[str, Any] = {"asked": args.serial_over}
    serial_over = SERIAL_OVER[args.serial_over]
    asked = [(arm, *ARMS[arm]) for arm in arms]
    if any(path == STRONGER for _, path, _ in asked):
        if serial_over == STRONGER:
            probed = ["grpc"] if rig.payload_nbytes > MAX_MESSAGE_NBYTES else ["grpc", "unary"]
            check_memory(rig, [("A0", path, "serial") for path in probed], read_limits())
            told |= stronger_path(rig, PROBED_STEPS, min(args.microbatches), work)
            serial_over = told["chosen"]
        told["chosen"] = serial_over
    paths = {arm: serial_over if path == STRONGER else path for arm, path, _ in asked}
    check_memory(rig, [(arm, paths[arm], ARMS[arm][1]) for arm in arms], read_limits())
    return paths, told


def _listed(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=100.0, help="everything is divided by it")
    parser.add_argument("--payload", type=parse_size, default=5_150_000_000, help="of a micro-batch before scaling")
    parser.add_argument("--microbatches", default="1,2,3,9", help="micro-batches per step, with commas")
    parser.add_argument("--arms", type=_listed, default="A0,A0',A1,A2,A3", help=f"of {', '.join(ARMS)}, with commas")
    parser.add_argument("--variants", type=_listed, default="plain,saved", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--serial-over", choices=SERIAL_OVER, default="stronger", help="how A0's payloads travel")
    parser.add_argument("--slots", type=int, default=3, help="places for micro-batches in shared memory")
    parser.add_argument("--device-buffers", type=int, default=2, help="micro-batches on the device side, all arms")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--events", type=Path, metavar="DIR", help="keep the events of each run here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    for kind, given, known in (("arm", args.arms, ARMS), ("variant", args.variants, VARIANTS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{kind} {', '.join(unknown)}: want some of {', '.join(known)}")
    try:
        args.microbatches = [int(count) for count in args.microbatches.split(",")]
    except ValueError:
        parser.error(f"--microbatches {args.microbatches}: want numbers with commas")
    for name, least in (("steps", WARM_UP + 2), ("rounds", 1), ("slots", 2), ("device_buffers", 2)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: want {least} or more")
    if min(args.microbatches) < 1 or args.scale <= 0:
        parser.error("--microbatches and --scale: want numbers above 0")
    return args


def main() -> int:
    args = _arguments()
    arms, notes = args.arms, []
    if importlib.util.find_spec("grpc") is None:
        arms = [arm for arm in args.arms if ARMS[arm][0] == "shm"]
        if left_out := [arm for arm in args.arms if arm not in arms]:
            notes.append(f"{', '.join(left_out)} left out: grpcio is missing; pip install 'shmstage[bench]'")
    rig = Rig.of(args.scale, args.payload, slots=args.slots, device_buffers=args.device_buffers)
    try:
        with tempfile.TemporaryDirectory() as work:
            paths, serial_over = paths_of(arms, rig, args, Path(work))
            found = measure(rig, paths, args, Path(work))
    except InputError as error:
        print(f"boundary.py: {error}", file=sys.stderr)
        return 2
    except StoppedError as error:
        print(f"boundary.py: {error}", file=sys.stderr)
        return 130
    result = {
        "machine": machine(), "scale": args.scale, "payload_nbytes": rig.payload_nbytes, "steps": args.steps,
        "rounds": args.rounds, "slots": rig.slots, "device_buffers": rig.device_buffers, "device_keeps": rig.keeps,
        "serial_over": serial_over, **found, "targets": targets_of(found["figures"]), "notes": notes,
    }  # fmt: skip
    path = keep("boundary", result, args.results)
    notes += draw_variants(result, path)
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
        print_targets(result["targets"])
        print("\n".join([*notes, *result["problems"]]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""How long a device waits at the step boundary, and what the orchestrator carries, on 1 to 1,024 hosts: a model.

A discrete-event model (``scale_events.py``) of packing, network, upload, compute and boundary. It is calibrated on the
arms that the reference measured on 128 chips (serial, pipelined, staged after and before the update, at 2 and 3
micro-batches per step): shared inputs, nothing fitted to an arm, boundary idle and step within 10 %, else the exit code
is 1. Then ours is run through it: plans go out, payloads do not, and every host fetches, fills and uploads its share.

    python bench/scale.py [--hosts 1,2,4,...,1024] [--microbatches 3] [--laws rows,batch] [--engines blocks,free]
                          [--results DIR] [--json]

Laws of growth, both the reference's rig at 32 hosts (128 chips): ``rows``, payload and trajectories grow with the hosts
and a micro-batch takes as long as before; ``batch``, the same 64 rows everywhere, computed in ever shorter time.

Engines: ``blocks`` settles on the host and flushes in a step's second call, as the reference's trainer; ``free`` never.

Nothing here is measured but the inputs, and those on other machines: every one is told with where it comes from, and
between which factors of it the calibration holds, the others as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import scale_calibration as calibration
import scale_predictions as predictions
from results import RESULTS, keep, machine, print_targets
from scale_inputs import LAWS, MODEL, OURS, REFERENCE, assumptions_of
from scale_plot import draw_scale

HOSTS = "1,2,4,8,16,32,64,128,256,512,1024"


def assumptions() -> list[dict[str, Any]]:
    within = calibration.ranges()
    found = []
    for each in (*assumptions_of(REFERENCE), *assumptions_of(OURS), *MODEL):
        row: dict[str, Any] = each._asdict()
        if each.name in within:
            row["holds_between"] = within[each.name]
        found.append(row)
    return found


def study(args: argparse.Namespace) -> dict[str, Any]:
    figures = calibration.figures_of()
    told = [
        predictions.predict(law, engine, count, hosts)
        for law in args.laws for engine in args.engines for count in args.microbatches for hosts in args.hosts
    ]  # fmt: skip
    return {
        "assumptions": assumptions(), "laws": {law: LAWS[law] for law in args.laws}, "figures": figures,
        "other_arrivals": calibration.other_arrivals(), "held_out": calibration.held_out(), "predictions": told,
        "targets": calibration.targets_of(figures),
        "problems": calibration.problems_of(figures) + predictions.problems_of(told),
    }  # fmt: skip


def print_study(result: dict[str, Any]) -> None:
    print("assumptions")
    for each in result["assumptions"]:
        within = "x{:.2f} to x{:.2f}".format(*each["holds_between"]) if "holds_between" in each else ""
        value = f"{each['value']:>11} {each['unit']:<17}"
        print(f"  {each['name']:<20}{value}{each['kind']:<10}{within:<17}{each['source']}")
    columns = "".join(f"{what + ': measured':>16}{'model':>9}{'off':>8}" for what in ("idle", "step"))
    print(f"\n{'arm':<5}{'per step':>8}{columns}")
    for each in result["figures"].values():
        idle, step = each["idle_s"], each["step_s"]
        print(
            f"{each['arm']:<5}{each['microbatches_per_step']:>8}"
            f"{idle['measured']:>14.2f} s{idle['model']:>7.2f} s{100 * idle['off']:>+7.1f}%"
            f"{step['measured']:>14.2f} s{step['model']:>7.2f} s{100 * step['off']:>+7.1f}%  idle: {each['idle_is']}"
        )
    for name, errors in result["other_arrivals"].items():
        worst = ", ".join(f"{arm}: {100 * each['idle_off']:+.1f}%" for arm, each in errors.items())
        print(f"upload time {name}: idle off {worst}")
    for each in result["held_out"]:
        print(f"held out: {each['arm']}, {each['name']}: {each['measured']:g} s, model {each['model']:.2f} s")
    print_predictions(result["predictions"])


def print_predictions(told: list[dict[str, Any]]) -> None:
    before = ""
    for each in told:
        title = f"{each['law']}, engine {each['engine']}, {each['microbatches_per_step']} micro-batches per step"
        if title != before:
            before = title
            print(
                f"\n{title}: idle and step in s; serial, staged before the update; the orchestrator's load a step\n"
                f"{'hosts':>6}{'reference serial':>19}{'staged':>19}{'ours serial':>19}{'staged':>19}"
                f"{'RAM: reference':>16}{'ours':>9}{'network: ref.':>15}{'ours':>10}{'busy':>7}{'host fetches':>14}"
            )
        cells = [
            f"{each[side][order]['idle_s']:>9.3f}{each[side][order]['step_s']:>10.2f}"
            for side in ("reference", "ours") for order in ("serial", predictions.TOLD)
        ]  # fmt: skip
        theirs, load = each["reference_load"], each["load"]
        print(
            f"{each['hosts']:>6}{''.join(cells)}{theirs['orchestrator_ram_nbytes'] / 1e9:>13.1f} GB"
            f"{load['orchestrator_ram_nbytes'] / 1e9:>6.2f} GB{theirs['orchestrator_network_nbytes'] / 1e9:>12.2f} GB"
            f"{load['orchestrator_network_nbytes'] / 1e6:>7.2f} MB{100 * load['busy_share']:>6.1f}%"
            f"{load['host_fetched_nbytes'] / 1e6:>11.1f} MB"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default=HOSTS, help="numbers of hosts, with commas")
    parser.add_argument("--microbatches", default="3", help="micro-batches per step, with commas")
    parser.add_argument("--laws", default=",".join(LAWS), help=f"of {', '.join(LAWS)}, with commas")
    parser.add_argument("--engines", default=",".join(predictions.ENGINES), help="of blocks, free, with commas")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result and the plot")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    for name, known in (("laws", LAWS), ("engines", predictions.ENGINES)):
        given = getattr(args, name).split(",")
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name} {', '.join(unknown)}: want some of {', '.join(known)}")
        setattr(args, name, given)
    for name in ("hosts", "microbatches"):
        given = getattr(args, name)
        try:
            numbers = [int(each) for each in given.split(",")]
        except ValueError:
            parser.error(f"--{name} {given}: want numbers with commas")
        if min(numbers) < 1:
            parser.error(f"--{name} {given}: want numbers above 0")
        setattr(args, name, numbers)
    return args


def main() -> int:
    args = _arguments()
    result = {"machine": machine(), **study(args), "notes": []}
    path = keep("scale", result, args.results)
    result["notes"] += draw_scale(result, path)
    if args.json:
        print(json.dumps(result))
    else:
        print_study(result)
        print_targets(result["targets"])
        print("\n".join([*result["notes"], *result["problems"]]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

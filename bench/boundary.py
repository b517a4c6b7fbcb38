"""How long a device waits at the step boundary: the replay rig.

Real orchestrator, real shared memory, real worker, and a device that takes a given time and states its own idle from
exact stamps (``shmstage/testing/simulated_device.py``). Beside them what is common practice, serial over gRPC, twice:
the second one (A0') is the noise floor. Proportions are the reference's (micro-batch 13.38 s, update 1.5 s, a payload
of 5.15 GB that takes 3.7 s to place, bookkeeping 5.75 s), divided by ``--scale``.

    python bench/boundary.py [--scale 100] [--payload 5.15GB] [--microbatches 1,2,3,9] [--arms A0,A0',A1,A2,A3]
                             [--variants plain,saved,settling,blocking] [--steps 8] [--rounds 2] [--json]

Arms: A0 serial, A1 pipelined, A2 staged after the update, A3 staged before it, over shared memory; S0 is serial over
shared memory; A0 and A0' always go over gRPC, streamed in pieces of 4 MB, U0 pickled in one message (how to see which
is the stronger), and G1, G2, G3 are A1, A2, A3 over gRPC, streamed. Variants: plain; saved (a
checkpoint and a weight sync in every step); settling (the engine reads overflow flags on the host); blocking (it also
returns from an update only when the step's last micro-batch is done, as the reference trainer does).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from results import RESULTS, keep, machine, print_targets, spread, verdict

from shmstage.budget.sizes import parse_size
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import Settings
from shmstage.testing.simulated_input import InputSettings

#: arm → (how payloads travel, order of the commands)
ARMS = {
    "A0": ("grpc", "serial"),
    "A0'": ("grpc", "serial"),
    "U0": ("unary", "serial"),
    "S0": ("shm", "serial"),
    "A1": ("shm", "pipelined"),
    "A2": ("shm", "staged_after_update"),
    "A3": ("shm", "staged_before_update"),
    "G1": ("grpc", "pipelined"),
    "G2": ("grpc", "staged_after_update"),
    "G3": ("grpc", "staged_before_update"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "saved": {},
    "settling": {"settles": True},
    "blocking": {"settles": True, "blocks": "until last done"},
}
ROWS, LAYERS, TOP_K, EXPERTS = 64, 60, 10, 512
TOKEN_NBYTES = 6 * 4 + 2 * LAYERS * TOP_K
#: the reference's, in seconds and bytes per second
MICROBATCH_S, UPDATE_S, BOOKKEEPING_S, UPLOAD_NBYTES_PER_S = 13.38, 1.5, 5.75, 5.15e9 / 3.7
CHECKPOINT_S = 5.0
#: what every run of the same steps has to agree in
EXACT = ("param_digest", "losses", "denominators")
#: boundaries of a run that are left out: everything is touched for the first time there
WARM_UP = 1
#: idle below this is taken for this in ratios: no device is told apart from another by less
LEAST_IDLE_S = 1e-6


@dataclass(frozen=True)
class Rig:
    """One scale: what the device takes, and what it is given."""

    scale: float
    source: InputSettings

    @classmethod
    def of(cls, scale: float, payload_nbytes: float) -> Rig:
        tokens = max(2, round(payload_nbytes / scale / (ROWS * TOKEN_NBYTES)))
        return cls(scale, InputSettings(ROWS, tokens, layers=LAYERS, top_k=TOP_K, experts=EXPERTS))

    @property
    def payload_nbytes(self) -> int:
        return self.source.rows * self.source.tokens * TOKEN_NBYTES

    def engine(self, variant: str, record: Path) -> dict[str, Any]:
        return {
            "microbatch_s": MICROBATCH_S / self.scale,
            "update_s": UPDATE_S / self.scale,
            "upload_gbps": UPLOAD_NBYTES_PER_S / 1e9,
            "checkpoint_s": CHECKPOINT_S / self.scale,
            "record": str(record),
            **VARIANTS[variant],
        }


def run_shm(rig: Rig, mode: str, variant: str, microbatches: int, steps: int, out: Path) -> dict[str, Any]:
    saved = variant == "saved"
    settings = Settings(
        run=f"bench-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=rig.source.rows, tokens=rig.source.tokens, steps=steps, microbatches_per_step=microbatches,
        aux_slots=0, checkpoint_every=int(saved), weight_sync="async" if saved else "off",
        engine="shmstage.testing.engines_simulated:make_engine",
        engine_settings=rig.engine(variant, out / "device.json"),
        source="shmstage.testing.simulated_input:make_source", source_settings=asdict(rig.source),
        hooks="shmstage.testing.simulated_input:make_hooks",
        hooks_settings={"bookkeeping_s": BOOKKEEPING_S / rig.scale},
    )  # fmt: skip
    summary = run(completed(settings), _Quiet())
    return {
        "param_digest": summary["param_digest"],
        "denominators": summary["denominators"],
        "losses": summary["losses"],
        "reported_idle_s": summary["boundary_idle_s"],
        "staged": summary["staged_boundaries"],
    }


def run_grpc(
    rig: Rig, mode: str, variant: str, microbatches: int, steps: int, out: Path, *, unary: bool = False
) -> dict[str, Any]:
    from grpc_path import Plan
    from grpc_path import run as run_over_grpc

    out.mkdir(parents=True)
    plan = Plan(mode, steps, microbatches, variant == "saved", BOOKKEEPING_S / rig.scale)
    return run_over_grpc(plan, rig.source, rig.engine(variant, out / "device.json"), unary=unary)


PATHS = {"shm": run_shm, "grpc": run_grpc, "unary": partial(run_grpc, unary=True)}


def measured(rig: Rig, arm: str, variant: str, microbatches: int, steps: int, out: Path) -> dict[str, Any]:
    """One run: what the device says of its boundaries, in seconds, and what was trained."""
    path, mode = ARMS[arm]
    result = PATHS[path](rig, mode, variant, microbatches, steps, out)
    device = json.loads((out / "device.json").read_text())
    shutil.rmtree(out)
    kept = device["boundaries"][WARM_UP:]
    return {
        **result,
        "idle_s": [b["idle_ns"] / 1e9 for b in kept],
        "step_s": [b["step_ns"] / 1e9 for b in kept],
        "told_late_s": max(op["late_ns"] for op in device["compute"]) / 1e9,
    }


def measure(rig: Rig, arms: list[str], variants: list[str], counts: list[int], args: Any, work: Path) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for variant in variants:
        for count in counts:
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
            for number in range(args.rounds):
                for arm in arms:  # alternating: whatever else the machine does meets all of them
                    print(f"{variant}, {count} per step, round {number + 1} of {args.rounds}: {arm}", file=sys.stderr)
                    out = work / f"{variant}-{count}-{number}-{ARMS[arm][1]}"
                    runs[arm].append(measured(rig, arm, variant, count, args.steps, out))
            trained = {json.dumps([r[key] for key in EXACT]) for arm in arms for r in runs[arm]}
            if len(trained) != 1:
                problems.append(f"{variant}, {count} per step: the arms trained {len(trained)} different things")
            for arm in arms:
                figures[f"{arm} {variant} {count}"] = _figure(runs[arm], arm, variant, count)
    return {"figures": figures, "problems": problems}


def _figure(runs: list[dict[str, Any]], arm: str, variant: str, count: int) -> dict[str, Any]:
    idle = [value for r in runs for value in r["idle_s"]]
    step = [value for r in runs for value in r["step_s"]]
    figure = {
        "arm": arm, "path": ARMS[arm][0], "mode": ARMS[arm][1], "variant": variant, "microbatches_per_step": count,
        "idle_s": spread(idle), "step_s": spread(step), "idle_share": spread(idle)["median"] / spread(step)["median"],
        "told_late_s": max(r["told_late_s"] for r in runs),
    }  # fmt: skip
    if "reported_idle_s" in runs[0]:
        figure["reported_idle_s"] = [r["reported_idle_s"]["median"] for r in runs]
        figure["staged"] = [r["staged"] for r in runs]
    return figure


def targets_of(figures: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    limits = {"plain": 0.002, "saved": 0.002, "settling": 0.005, "blocking": 0.005}
    for figure in figures.values():
        if figure["arm"] == "A3":
            count, variant = figure["microbatches_per_step"], figure["variant"]
            limit = 0.01 if count == 1 else limits[variant]
            name = f"idle share of the step, staged before, {variant}, {count} per step"
            found.append(verdict(name, figure["idle_share"], limit))
    base, ours = figures.get("A0 plain 3"), figures.get("A3 plain 3")
    if base and ours:
        ratio = base["idle_s"]["median"] / max(ours["idle_s"]["median"], LEAST_IDLE_S)
        found.append(verdict("idle, serial over gRPC / staged before, 3 per step", ratio, 100, at_least=True))
    return found


def print_table(result: dict[str, Any]) -> None:
    print(f"payload {result['payload_nbytes'] / 1e6:.1f} MB, 1:{result['scale']:g}, {result['machine']}")
    print(
        f"{'arm':<5}{'path':<6}{'order':<22}{'variant':<10}{'per step':>8}"
        f"{'idle, median':>14}{'max':>11}{'of step':>9}{'step':>11}"
    )
    for f in result["figures"].values():
        idle, step = f["idle_s"], f["step_s"]
        print(
            f"{f['arm']:<5}{f['path']:<6}{f['mode']:<22}{f['variant']:<10}{f['microbatches_per_step']:>8}"
            f"{1e3 * idle['median']:>11.3f} ms{1e3 * idle['max']:>8.2f} ms{100 * f['idle_share']:>8.2f}%"
            f"{1e3 * step['median']:>8.1f} ms"
        )


def plot(result: dict[str, Any], path: Path) -> bool:
    """Idle by arm and micro-batches per step, of the first variant; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    variant = next(iter(result["figures"].values()))["variant"]
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figures = [f for f in result["figures"].values() if f["variant"] == variant]
    arms = list(dict.fromkeys(f["arm"] for f in figures))
    counts = sorted({f["microbatches_per_step"] for f in figures})
    drawing, axes = pyplot.subplots(figsize=(10, 4))
    width = 0.8 / max(1, len(arms))
    for number, arm in enumerate(arms):
        of_arm = {f["microbatches_per_step"]: f for f in figures if f["arm"] == arm}
        values = [max(1e3 * of_arm[c]["idle_s"]["median"], 1e-3) for c in counts]
        places = [place + number * width for place in range(len(counts))]
        axes.bar(places, values, width, label=f"{arm} {of_arm[counts[0]]['mode']}, {of_arm[counts[0]]['path']}")
    axes.set_yscale("log")
    axes.set_xticks([p + 0.4 - width / 2 for p in range(len(counts))], [str(c) for c in counts])
    axes.set_xlabel("micro-batches per step")
    axes.set_ylabel("boundary idle, ms (0 drawn as 0.001)")
    axes.set_title(f"{variant}, payload {result['payload_nbytes'] / 1e6:.1f} MB, 1:{result['scale']:g}")
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
    parser.add_argument("--scale", type=float, default=100.0, help="everything is divided by it")
    parser.add_argument("--payload", type=parse_size, default=5_150_000_000, help="of a micro-batch before scaling")
    parser.add_argument("--microbatches", default="1,2,3,9", help="micro-batches per step, with commas")
    parser.add_argument("--arms", default="A0,A0',A1,A2,A3", help=f"of {', '.join(ARMS)}, with commas")
    parser.add_argument("--variants", default="plain,saved", help=f"of {', '.join(VARIANTS)}, with commas")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the kept result")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    arms, variants = args.arms.split(","), args.variants.split(",")
    for kind, given, known in (("arm", arms, ARMS), ("variant", variants, VARIANTS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{kind} {', '.join(unknown)}: want some of {', '.join(known)}")
    if args.steps < WARM_UP + 3:
        parser.error(f"--steps {args.steps}: the first boundary is left out and the last step has none; give 4 or more")
    notes = []
    if importlib.util.find_spec("grpc") is None:
        left_out = [arm for arm in arms if ARMS[arm][0] != "shm"]
        arms = [arm for arm in arms if arm not in left_out]
        if left_out:
            notes.append(f"{', '.join(left_out)} left out: grpcio is missing; pip install 'shmstage[bench]'")
    rig = Rig.of(args.scale, args.payload)
    with tempfile.TemporaryDirectory() as work:
        found = measure(rig, arms, variants, [int(c) for c in args.microbatches.split(",")], args, Path(work))
    result = {
        "machine": machine(), "scale": args.scale, "payload_nbytes": rig.payload_nbytes, "steps": args.steps,
        "rounds": args.rounds, **found, "targets": targets_of(found["figures"]), "notes": notes,
    }  # fmt: skip
    path = keep("boundary", result, args.results)
    if not plot(result, path.with_suffix(".svg")):
        notes.append("no plot: matplotlib is missing; pip install 'shmstage[bench]'")
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
        print_targets(result["targets"])
        print("\n".join([*notes, *result["problems"]]))
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

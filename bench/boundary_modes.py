"""Step time and boundary idle of each mode against ``serial``, in one run, alternating.

The demo on a CPU: device and host are the same cores, so these figures show that nothing is badly wrong, not what an
accelerator gains.

    python bench/boundary_modes.py [--steps N] [--rounds R] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.settings import BOUNDARIES, Settings

FIGURES = ("boundary_idle_s", "step_s")


class Quiet:
    def poll(self) -> None:
        return


def measure(steps: int, rounds: int, out: Path) -> dict[str, Any]:
    """Medians per mode over ``rounds`` alternating runs, and their ratio to ``serial``."""
    samples: dict[str, dict[str, list[float]]] = {mode: {figure: [] for figure in FIGURES} for mode in BOUNDARIES}
    digests = set()
    for number in range(rounds):
        for mode in BOUNDARIES:
            print(f"round {number + 1} of {rounds}: {mode}", file=sys.stderr)
            settings = Settings(steps=steps, boundary=mode, out=out / f"{mode}-{number}", run=f"bench-{mode}-{number}")
            summary = run(completed(settings), Quiet())
            digests.add(summary["param_digest"])
            for figure in FIGURES:
                samples[mode][figure].append(summary[figure]["median"])
    modes = {
        mode: {
            figure: {"median": median(values), "min": min(values), "max": max(values)}
            for figure, values in samples[mode].items()
        }
        for mode in BOUNDARIES
    }
    for mode in BOUNDARIES:
        for figure in FIGURES:
            modes[mode][figure]["of_serial"] = modes[mode][figure]["median"] / modes["serial"][figure]["median"]
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    return {"steps": steps, "rounds": rounds, "machine": machine, "same_parameters": len(digests) == 1, "modes": modes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("PJRT_NPROC", str(os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as out:
        result = measure(args.steps, args.rounds, Path(out))
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{'mode':<22}{'step, median':>14}{'of serial':>11}{'idle, median':>14}{'of serial':>11}")
        for mode, figures in result["modes"].items():
            step, idle = figures["step_s"], figures["boundary_idle_s"]
            print(
                f"{mode:<22}{1e3 * step['median']:>11.1f} ms{step['of_serial']:>11.2f}"
                f"{1e3 * idle['median']:>11.2f} ms{idle['of_serial']:>11.2f}"
            )
    return 0 if result["same_parameters"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""All scripts one after another, and at the end one table of every target; ``make bench`` and ``make bench-full``.

    python bench/run.py [quick|full] [--only boundary,pack] [--list]

*quick* is for every day: 3 micro-batches per step, the arms A0 (streamed), A0', A2 and A3, payloads to 1 GB, under ten
minutes. *full* is everything, and takes hours. A missed target stops nothing and is no failure; a script that fails
(its arms trained different things, bytes were lost, it crashed, it took longer than its limit) makes the exit code 1,
after the others have run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import BENCH, RESULTS, keep, machine, machine_line

#: for what hangs; on quiet cores a quick script takes a quarter of it
QUICK_LIMIT_S, FULL_LIMIT_S = 600.0, 3 * 3600.0


@dataclass(frozen=True)
class Script:
    """``NAME.py`` with what it is given. It keeps ``NAME.json`` itself, or what it prints with ``--json`` is kept."""

    name: str
    arguments: str = ""
    limit_s: float = FULL_LIMIT_S
    keeps: bool = True


def _quick(name: str, arguments: str = "") -> Script:
    return Script(name, arguments, QUICK_LIMIT_S)


SUITES = {
    "quick": [
        _quick(
            "boundary",
            "--microbatches 3 --arms \"A0,A0',A2,A3\" --serial-over stream --variants plain,saved,settling --rounds 1",
        ),
        _quick("handoff", "--sizes 1KB,64MB,1GB --rounds 1"),
        _quick("pack", "--rounds 7"),
        _quick("memory", "--payload 256MB --arms optax,simulated,streamed --steps 6"),
        _quick("overhead", "--rounds 1 --steps 80"),
    ],
    "full": [
        Script("boundary", "--arms \"A0,A0',U0,S0,A1,A2,A3,G1,G2,G3\" --variants plain,saved,settling,blocking"),
        Script("handoff"),
        Script("pack"),
        Script("memory", "--payload 64MB,256MB,1GB --rounds 2"),
        Script("overhead"),
        Script("scale", "--microbatches 1,3,9"),
        Script("boundary_modes", keeps=False),
        Script("soak", "--handoffs 200000", keeps=False),
        Script("crash", keeps=False),
    ],
}


@dataclass(frozen=True)
class Outcome:
    script: Script
    seconds: float
    #: "" if it ended well
    problem: str
    targets: list[dict[str, Any]]


def run_all(scripts: list[Script], folder: Path = BENCH, results: Path = RESULTS) -> list[Outcome]:
    """In order, their output passed through; nothing that one does keeps the next from running."""
    outcomes = []
    for number, script in enumerate(scripts, start=1):
        print(f"\n== {number} of {len(scripts)}: {script.name} {script.arguments}", flush=True)
        outcomes.append(run_one(script, folder, results))
        print(f"== {script.name}: {outcomes[-1].problem or 'done'} after {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


def run_one(script: Script, folder: Path, results: Path) -> Outcome:
    kept = results / f"{script.name}.json"
    before = _stamp(kept)
    began = time.monotonic()
    command = [sys.executable, str(folder / f"{script.name}.py"), *shlex.split(script.arguments)]
    printed = ""
    try:
        if script.keeps:
            code = subprocess.run(command, timeout=script.limit_s, stdin=subprocess.DEVNULL).returncode
        else:
            done = subprocess.run(
                [*command, "--json"], timeout=script.limit_s, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            code, printed = done.returncode, done.stdout
        problem = f"FAILED, exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"FAILED, not done within {script.limit_s:g} s"
    seconds = time.monotonic() - began
    if printed:
        found = json.loads(printed)
        keep(script.name, found if "figures" in found else {"machine": machine(), "figures": found}, results)
    if _stamp(kept) == before:
        return Outcome(script, seconds, problem or "FAILED, it kept no result", [])
    result = json.loads(kept.read_text())
    if result.get("problems") and not problem:
        problem = f"FAILED: {result['problems'][0]}"
    return Outcome(script, seconds, problem, result.get("targets", []))


def _stamp(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else None


def print_closing_table(outcomes: list[Outcome], seconds: float) -> None:
    print(f"\n{machine_line(machine())}")
    width = max((len(t["name"]) for o in outcomes for t in o.targets), default=0)
    for outcome in outcomes:
        print(f"\n{outcome.script.name}, {outcome.seconds:.0f} s  {outcome.problem}")
        for each in outcome.targets:
            word = "met" if each["met"] else "MISSED"
            print(f"  {word:<8}{each['name']:<{width}}{each['value']:>14.6g}   target {each['target']:g}")
    met = sum(each["met"] for outcome in outcomes for each in outcome.targets)
    of = sum(len(outcome.targets) for outcome in outcomes)
    failed = [outcome.script.name for outcome in outcomes if outcome.problem]
    print(f"\n{met} of {of} targets met, {len(failed)} scripts failed{': ' * bool(failed)}{', '.join(failed)}; "
          f"{seconds / 60:.1f} minutes")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", default="quick", choices=list(SUITES))
    parser.add_argument("--only", default="", help="some of the scripts, with commas")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args = parser.parse_args()
    scripts = SUITES[args.suite]
    if args.only:
        wanted = args.only.split(",")
        if unknown := sorted(set(wanted) - {script.name for script in scripts}):
            parser.error(f"--only {', '.join(unknown)}: {args.suite} has {', '.join(s.name for s in scripts)}")
        scripts = [script for script in scripts if script.name in wanted]
    if args.list:
        for script in scripts:
            print(f"python bench/{script.name}.py {script.arguments}".rstrip())
        return 0
    began = time.monotonic()
    outcomes = run_all(scripts)
    print_closing_table(outcomes, time.monotonic() - began)
    print(f"results and plots in {RESULTS}")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

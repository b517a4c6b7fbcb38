#!/usr/bin/env python3
"""Runs the native core under the address, undefined-behaviour and thread sanitizers: clean, and does it notice?

    make native-sanitize            # or: python3 native/sanitize/run.py [--json] [--only NAME ...]

Needs a C++17 compiler (CXX, else c++, g++ or clang++) and nothing else. Every driver has to come out clean; every
deliberate fault compiled into one (SEED_*, or weaker memory order in atomics.h) has to be reported. Exit 0 if both
hold, 1 if not, 2 if there is no compiler or it lacks a sanitizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY = "address,undefined"
THREAD = "thread"
FLAGS = ["-std=c++17", "-O1", "-g", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Wconversion", "-pthread"]
#: what each driver is linked with, of native/
SOURCES = {
    "slots": ["slots.cpp", "bytes.cpp"],
    "cells": ["cells.cpp"],
    "bytes": ["bytes.cpp", "fill.cpp", "guarded_copy.cpp"],
    "routing": ["fill.cpp", "parallel.cpp", "record.cpp", "routing.cpp", "window.cpp"],
}
RUN_DEADLINE_S = 120
#: a race shows in some orders of the threads only: a seeded one is missed if none of so many runs reports it
RACE_RUNS = 20
RELAXED = "-U__ATOMIC_{0} -D__ATOMIC_{0}=__ATOMIC_RELAXED"


@dataclass(frozen=True)
class Check:
    """One program: a driver, a sanitizer, perhaps a seeded fault and the words it has to be reported in."""

    driver: str
    sanitizer: str
    fault: str = ""
    flags: str = ""
    report: str = ""


CHECKS = (
    *(Check(driver, sanitizer) for driver in ("slots", "cells") for sanitizer in (MEMORY, THREAD)),
    Check("bytes", MEMORY),
    *(Check("routing", sanitizer) for sanitizer in (MEMORY, THREAD)),
    Check("slots", THREAD, "race: a slot is read without a lease", "-DSEED_RACE", "data race"),
    Check("slots", THREAD, "race: a lease ends before it is read", "-DSEED_EARLY_END", "data race"),
    Check("slots", THREAD, "race: stores do not release", RELAXED.format("RELEASE"), "data race"),
    Check("slots", THREAD, "race: loads do not acquire", RELAXED.format("ACQUIRE"), "data race"),
    Check("cells", THREAD, "race: nobody looks at the cells", "-DSEED_RACE", "data race"),
    Check("cells", THREAD, "race: cells are not ordered", RELAXED.format("SEQ_CST"), "data race"),
    Check("slots", MEMORY, "overrun: a word past a slot", "-DSEED_OVERRUN", "heap-buffer-overflow"),
    Check("slots", MEMORY, "use after free: an unmapped slot", "-DSEED_USE_AFTER_FREE", "heap-use-after-free"),
    Check("routing", THREAD, "race: threads write one another's part", "-DSEED_RACE", "data race"),
    Check("routing", MEMORY, "overrun: packed ids a byte too short", "-DSEED_OVERRUN", "heap-buffer-overflow"),
    Check("routing", MEMORY, "overrun: a window reads past a piece", "-DSEED_SHORT_PIECE", "heap-buffer-overflow"),
    Check("bytes", MEMORY, "overrun: a field a byte too short", "-DSEED_OVERRUN", "heap-buffer-overflow"),
    Check("bytes", MEMORY, "use after free: segments", "-DSEED_USE_AFTER_FREE", "heap-use-after-free"),
    Check("bytes", MEMORY, "undefined: signed overflow", "-DSEED_OVERFLOW", "signed integer overflow"),
    Check("bytes", MEMORY, "undefined: shift past the width", "-DSEED_SHIFT", "shift exponent"),
    Check("bytes", MEMORY, "undefined: misaligned load", "-DSEED_MISALIGNED", "misaligned address"),
)


@dataclass
class Outcome:
    """``got``: clean, reported, missed or failed; ``text`` is what was printed when that is not what was wanted."""

    driver: str
    sanitizer: str
    fault: str
    want: str
    got: str
    seconds: float
    text: str = ""

    @property
    def good(self) -> bool:
        return self.want == self.got


def compiler() -> list[str] | None:
    given = shlex.split(os.environ.get("CXX", ""))
    names = [given] if given else [["c++"], ["g++"], ["clang++"]]
    return next((name for name in names if shutil.which(name[0])), None)


def lacking(cxx: list[str], where: Path) -> list[str]:
    """The sanitizers that the compiler cannot link, or whose programs do not start here."""
    source = where / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    missing = []
    for sanitizer in (MEMORY, THREAD):
        program = where / f"empty-{sanitizer}"
        built = subprocess.run([*cxx, f"-fsanitize={sanitizer}", str(source), "-o", str(program)], capture_output=True)
        if built.returncode or run(program, sanitizer)[0]:
            missing.append(sanitizer)
    return missing


def environment() -> dict[str, str]:
    """The options are ours: what somebody has set for another program must not turn reports off."""
    return {
        **os.environ,
        # handle_sigbus: the guarded copy's handler is under test
        "ASAN_OPTIONS": "detect_leaks=1:handle_sigbus=0:halt_on_error=1:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=99",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=99",
        "LSAN_OPTIONS": "exitcode=99",
    }


def run(program: Path, sanitizer: str) -> tuple[int, str]:
    """Exit code and output. Some kernels place memory where a thread sanitizer of old does not expect it."""
    commands = [[str(program)]]
    if sanitizer == THREAD and (setarch := shutil.which("setarch")):
        commands.append([setarch, "-R", str(program)])
    code, text = 1, "not run"
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=RUN_DEADLINE_S, env=environment()
            )
        except subprocess.TimeoutExpired:
            return 1, f"still running after {RUN_DEADLINE_S} s"
        code, text = done.returncode, done.stdout + done.stderr
        if "unexpected memory mapping" not in text:
            break
    return code, text


def build_and_run(check: Check, cxx: list[str], where: Path) -> Outcome:
    begin = time.monotonic()
    program = where / f"{check.driver}-{check.sanitizer}-{abs(hash(check.flags))}"
    sources = [HERE / f"{check.driver}_driver.cpp", *(HERE.parent / name for name in SOURCES[check.driver])]
    flags = [*FLAGS, f"-fsanitize={check.sanitizer}", "-fno-sanitize-recover=all", *shlex.split(check.flags)]
    if not check.fault:
        flags.append("-Werror")
    built = subprocess.run(
        [*cxx, *flags, *map(str, sources), "-o", str(program)], capture_output=True, text=True, errors="replace"
    )
    want = "reported" if check.fault else "clean"
    outcome = Outcome(check.driver, check.sanitizer, check.fault, want, "failed", 0.0)
    if built.returncode:
        outcome.text = built.stderr
    else:
        for _ in range(RACE_RUNS if check.fault and check.sanitizer == THREAD else 1):
            code, text = run(program, check.sanitizer)
            if code:
                break
        if check.report and check.report in text and code:
            outcome.got = "reported"
        elif not code:
            outcome.got = "missed" if check.fault else "clean"
        outcome.text = "" if outcome.good else text
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--only", nargs="*", choices=sorted(SOURCES), default=sorted(SOURCES), help="drivers to run")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    arguments = parser.parse_args()
    cxx = compiler()
    if cxx is None:
        print("no C++17 compiler: install one (apt-get install g++) or point CXX at it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shmstage-sanitize-") as folder:
        where = Path(folder)
        if missing := lacking(cxx, where):
            print(f"{cxx[0]} cannot build or run programs with -fsanitize={' and '.join(missing)}; install its "
                  "sanitizer libraries or point CXX at another compiler", file=sys.stderr)  # fmt: skip
            return 2
        checks = [check for check in CHECKS if check.driver in arguments.only]
        outcomes = []
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for outcome in pool.map(lambda check: build_and_run(check, cxx, where), checks):
                outcomes.append(outcome)
                say(outcome)
    bad = [outcome for outcome in outcomes if not outcome.good]
    clean = sum(outcome.good and not outcome.fault for outcome in outcomes)
    seeded = [outcome for outcome in outcomes if outcome.fault]
    verdict = f"{clean} of {len(outcomes) - len(seeded)} programs clean, " + (
        f"{sum(outcome.good for outcome in seeded)} of {len(seeded)} seeded faults reported"
    )
    print(verdict, file=sys.stderr)
    if arguments.json:
        print(json.dumps({"ok": not bad, "compiler": cxx[0], "checks": [asdict(outcome) for outcome in outcomes]}))
    return 1 if bad else 0


def say(outcome: Outcome) -> None:
    mark = "ok  " if outcome.good else "BAD "
    what = outcome.fault or "as it is"
    print(f"{mark} {outcome.driver:<7} {outcome.sanitizer:<18} {what:<40} {outcome.got:<9} {outcome.seconds:>5.1f} s",
          file=sys.stderr)  # fmt: skip
    if not outcome.good:
        print("\n".join(outcome.text.splitlines()[:60]), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

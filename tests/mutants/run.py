"""``make mutants``: apply each mutant to a copy of the repository and see a test that it names fail.

Prints one line per mutant and, last, ``N mutants, N caught``. Exit 1 unless every mutant is caught. A mutant fails the
run, too, when its target is gone or not unique, when its tests do not pass unmutated or take too long, and when they
end in an error instead of a failure: then something else than the fault was noticed.
"""

from __future__ import annotations

import argparse
import ast
import re
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from mutant import LIMIT_S, Mutant  # noqa: E402
from sandbox import Outcome, copy_repository, run_tests, stop_all  # noqa: E402

from native import NotBuiltError, rebuild  # noqa: E402

#: a hang is a way to be caught, too, but not one to wait for
EACH_S = 30.0
ALL_S = 180.0
#: the mutated text itself is wrong, or breaks something that no test was written for
BROKEN = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError", "AttributeError")


def catalogue(module: str = "*") -> list[Mutant]:
    """All mutants of ``MODULE_mutants.py``, of all such modules here unless one is named."""
    found: list[Mutant] = []
    for path in sorted(HERE.glob(f"{module}_mutants.py")):
        found += __import__(path.stem).MUTANTS
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), f"two mutants share a name: {sorted(n for n in names if names.count(n) > 1)}"
    return found


def unmutated_problem(mutant: Mutant, outcome: Outcome) -> str:
    """"" if all of the mutant's tests ran, passed and were fast enough."""
    seconds = 0.0
    for named in mutant.tests:
        ran = [test for test in outcome.seconds if test == named or test.startswith(f"{named}[")]
        if not ran:
            return f"{named} does not run unmutated"
        for test in ran:
            if test in outcome.failed or test in outcome.errors:
                return f"{test} does not pass unmutated: {(outcome.failed | outcome.errors)[test][:500]}"
            seconds += outcome.seconds[test]
    return "" if seconds <= LIMIT_S else f"its tests take {seconds:.1f} s, the limit is {LIMIT_S:.0f}"


def mutated_problem(mutant: Mutant, where: Path) -> str:
    """"" if the mutant is caught, else why not."""
    path = where / mutant.file
    if not path.is_file():
        return f"its target {mutant.file} is gone"
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"its target occurs {text.count(mutant.old)} times in {mutant.file}"
    mutated = text.replace(mutant.old, mutant.new)
    if path.suffix == ".py":
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            return f"it is no Python: {error}"
    path.write_text(mutated)
    try:
        with rebuild(where, path):
            outcome = run_tests(where, list(mutant.tests), each_s=EACH_S, all_s=ALL_S, stop_at_first=True)
    except NotBuiltError as error:
        return f"it cannot be built: {error}"
    finally:
        path.write_text(text)
    if outcome.failed:
        message = next(iter(outcome.failed.values()))
        return f"the mutant is broken: {message[:500]}" if message.startswith(BROKEN) else ""
    if outcome.killed:
        return f"its tests had to be killed after {ALL_S:.0f} s"
    if outcome.errors or len(outcome.seconds) < len(mutant.tests):
        return f"its tests end in an error instead of a failure: {outcome.output[-1500:]}"
    return "SURVIVED: its tests pass"


def run_unmutated(where: Path, tests: list[str]) -> Outcome:
    """All of them in one process. pytest runs none if one of them is unknown: then the others are run again."""
    limit_s = ALL_S + LIMIT_S * len(tests)
    outcome = run_tests(where, tests, each_s=EACH_S, all_s=limit_s, stop_at_first=False) if tests else Outcome()
    unknown = tuple(re.findall(r"ERROR: .*not found: \S*?(tests/.+)", outcome.output))
    others = [test for test in tests if not test.startswith(unknown)]
    return run_unmutated(where, others) if unknown and len(others) < len(tests) else outcome


def run_shard(mutants: list[Mutant]) -> list[tuple[Mutant, str]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        where = Path(folder)
        copy_repository(ROOT, where)
        unmutated = run_unmutated(where, sorted({test for mutant in mutants for test in mutant.tests}))
        for mutant in mutants:
            why = unmutated_problem(mutant, unmutated) or mutated_problem(mutant, where)
            results.append((mutant, why))
            print(f"{'caught ' if not why else 'NOT OK '} {mutant.name}" + (f": {why}" if why else ""), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="copies worked on at once")
    parser.add_argument("--only", default="", help="mutants whose file or name contains this")
    parser.add_argument("--module", default="*", help="mutants of MODULE_mutants.py alone")
    args = parser.parse_args()
    mutants = [mutant for mutant in catalogue(args.module) if args.only in mutant.name or args.only in mutant.file]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ThreadPoolExecutor(args.jobs) as pool:
        parts = [mutants[number :: args.jobs] for number in range(args.jobs)]
        try:
            results = [result for part in pool.map(run_shard, parts) for result in part]
        except BaseException:
            stop_all()
            raise
    caught = sum(not why for _, why in results)
    for mutant, why in results:
        if why:
            print(f"not caught: {mutant.name}: {why.splitlines()[0]}")
    print(f"{len(results)} mutants, {caught} caught")
    return 0 if results and caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

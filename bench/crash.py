"""Kill -9 the trainer or the orchestrator at random instants in every phase of a step; is the outcome still the same?

One undisturbed run, then runs of the same input that are killed and restarted until ``--kills`` kills are done. Final
parameters, digests, denominators, losses and trajectory counts have to be equal to the last bit, and nothing may be
left in shared memory, in the runtime directory or as a process.

    python bench/crash.py [--kills N] [--seed S] [--steps N] [--boundary MODE] [--checkpoint-every N] [--json]
    python bench/crash.py -- --recompute-old-logps          # what comes after -- is an option of `shmstage run`

The phase of a kill is what the trainer had been told last, read from ``trainer_calls.jsonl`` after the kill. A kill
that hits nothing, because the run was over, is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmstage.memory.names import list_objects
from shmstage.settings import BOUNDARIES

ROLES = ("trainer", "orchestrator")
EQUAL = ("param_digest", "initial_param_digest", "steps", "digests", "denominators", "losses", "trajectories")
#: a small model: most of the time goes into starting processes, and that is what is tested
ENGINE = '[engine]\npolicy = "fresh"\nlayers = 1\nd_model = 16\nd_ff = 32\nlearning_rate = 1e-3\n'
#: command → what we call the time from it to the next one, where that is not its own name
PHASES = {"hello": "starting", "info": "restoring", "restore_checkpoint": "restoring", "compile": "compiling"}
IN_EVERY_MODE = ["fwd_bwd", "get_metrics", "save_checkpoint", "prepare_weight_sync", "shutdown"]
IF_STAGED = ["stage_fwd_bwd", "fwd_bwd_staged"]
#: come after a start or a restart only
AFTER_A_DEATH = ("starting", "restoring", "compiling")
#: seconds within which a kill falls after its phase was seen to begin; the phases of a step take milliseconds
SPREAD_S = {"starting": 2.5, "compiling": 0.3, "restoring": 0.1, "first_checkpoint": 0.1, "shutdown": 0.05}
SHORT_S = 0.01
RUN_DEADLINE_S = 900.0
MOST_STEPS_BETWEEN_KILLS = 4
#: how long a kill waits for its phase before the next one in the deck is tried
PHASE_DEADLINE_S = 60.0


@dataclass
class Tally:
    """What was done and what was found."""

    by_phase: Counter[str] = field(default_factory=Counter)
    by_role: Counter[str] = field(default_factory=Counter)
    leaked_pools: list[str] = field(default_factory=list)
    leaked_processes: list[str] = field(default_factory=list)
    leaked_files: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    runs: int = 0

    @property
    def kills(self) -> int:
        return self.by_role.total()


class Calls:
    """The trainer's record of commands, followed from outside: which phase is it in, how often was it there?"""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.phase = "starting"
        self.seen: Counter[str] = Counter({"starting": 1})
        self.saved = 0  # the highest step of which a checkpoint was asked for

    def read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._offset:  # a successor cut a torn line off
                self._offset, self._rest = os.fstat(file.fileno()).st_size, b""
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line))

    def trainer_died(self) -> None:
        self._enter("starting")

    def _take(self, record: dict[str, Any]) -> None:
        command = record["command"]
        if self.phase == "first_checkpoint" and command in ("prepare_weight_sync", "get_metrics"):
            return  # the weights of step 0 go out while its checkpoint is written
        if command == "save_checkpoint":
            self.saved = max(self.saved, record["step"])
        first = command == "save_checkpoint" and record["step"] == 0
        self._enter("first_checkpoint" if first else PHASES.get(command, command))

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.seen[phase] += 1


class Disturbed:
    """One run in a process of its own."""

    def __init__(self, command: list[str], out: Path, environment: dict[str, str]) -> None:
        self.out = out
        self.calls = Calls(out / "trainer_calls.jsonl")
        self._log = (out.parent / f"{out.name}.err").open("wb")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env=environment, start_new_session=True
        )
        self._began = time.monotonic()

    def record(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.out / "run.json").read_text())
            return found
        except (FileNotFoundError, ValueError):
            return {}

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self._began + RUN_DEADLINE_S

    def wait_for(self, phase: str) -> bool:
        """Until the trainer is in that phase; False if it is not going to be."""
        self.calls.read()
        wanted = self.calls.seen[phase] + (self.calls.phase != phase)
        return self._wait(lambda: self.calls.seen[phase] >= wanted)

    def get_further(self, steps: int) -> bool:
        """Until so many more steps than ever before were saved; False if the run ends before that."""
        wanted = self.calls.saved + steps
        return self._wait(lambda: self.calls.saved >= wanted)

    def _wait(self, is_so: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PHASE_DEADLINE_S
        while not is_so():
            if self.is_over or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
            self.calls.read()
        return True

    def kill(self, role: str) -> str | None:
        """Kill the living process of this role; the phase it was in, or ``None`` if that hit nothing."""
        while not self.is_over:
            before = self.record()
            pid = before.get("pids", {}).get(role)
            if pid is None:  # its successor is not started yet
                time.sleep(0.005)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while not self.is_over:
                after = self.record()
                if after["restarts"][role] > before["restarts"][role]:
                    self.calls.read()
                    phase = self.calls.phase
                    if role == "trainer":
                        self.calls.trainer_died()
                    return phase
                time.sleep(0.002)
        return None

    def finish(self) -> tuple[int, str]:
        """Exit code and standard output; a run that does not end is killed and counts as failed."""
        try:
            out, _ = self.process.communicate(timeout=max(1.0, self._began + RUN_DEADLINE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, _ = self.process.communicate()
            return 124, out.decode()
        finally:
            self._log.close()
        return self.process.returncode, out.decode()


def deck(rng: random.Random, phases: list[str]) -> Iterator[tuple[str, str]]:
    """(role, phase) without end: every phase once before any comes twice, roles in turn."""
    role = rng.randrange(2)
    while True:
        for phase in rng.sample(phases, len(phases)):
            yield ROLES[role], phase
            role = 1 - role


def disturb(
    run: Disturbed, tally: Tally, targets: Iterator[tuple[str, str]], args: argparse.Namespace, rng: random.Random
) -> None:
    """Kill until enough is done or the run is over."""
    # the start of a run is the only time for its first checkpoint
    if run.wait_for(rng.choice(["first_checkpoint", "starting", "compiling"])):
        _strike(run, ROLES[tally.runs % 2], tally, rng)
    in_a_step = ["prepare_weight_sync", *(IF_STAGED if args.boundary.startswith("staged") else ["fwd_bwd"])]
    while tally.kills < args.kills and not run.is_over:
        role, phase = next(targets)
        run.get_further(rng.randint(0, MOST_STEPS_BETWEEN_KILLS))
        rarely = phase == "fwd_bwd" and args.boundary.startswith("staged")
        if (phase in AFTER_A_DEATH or rarely) and run.wait_for(rng.choice(in_a_step)):
            _strike(run, min(ROLES, key=lambda each: tally.by_role[each]), tally, rng)
        if tally.kills < args.kills and run.wait_for(phase):
            _strike(run, role, tally, rng)


def _strike(run: Disturbed, role: str, tally: Tally, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.0, SPREAD_S.get(run.calls.phase, SHORT_S)))
    phase = run.kill(role)
    if phase is not None:
        tally.by_role[role] += 1
        tally.by_phase[phase] += 1
        print(f"kill {tally.kills}: {role} in {phase}, step {run.calls.saved} saved", file=sys.stderr)


def differences(summary: dict[str, Any], undisturbed: dict[str, Any], lines: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words."""
    found = [f"{key} differs" for key in EQUAL if summary[key] != undisturbed[key]]
    if [line["step"] for line in lines] != list(range(1, undisturbed["steps"] + 1)):
        found.append("steps.jsonl does not hold every step once")
    if summary["leaked_pools"]:
        found.append(f"the summary names leaked pools: {summary['leaked']}")
    return found


def processes_of(out: Path) -> list[str]:
    """Living processes whose command line names ``out``."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if any(str(out).encode() in word for word in words):
                    found.append(entry.name)
    return found


def crash(args: argparse.Namespace, where: Path) -> dict[str, Any]:
    began = time.monotonic()
    rng = random.Random(args.seed)
    runtime = Path(tempfile.mkdtemp(prefix="rt", dir=where))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    environment.setdefault("PJRT_NPROC", str(os.cpu_count() or 1))
    # a restart is a new process, which would compile for longer than all else takes
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(where / "compiled"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    config = where / "engine.toml"
    config.write_text(ENGINE)
    common = [
        sys.executable, "-m", "shmstage.cli", "run", "--json", "--config", str(config), "--rows", "1", "--tokens",
        "192", "--microbatches-per-step", str(args.microbatches_per_step), "--steps", str(args.steps), "--boundary",
        args.boundary, "--checkpoint-every", str(args.checkpoint_every), "--weight-sync", "async", "--max-restarts",
        "1000", "--restart-backoff-s", "0.02", *args.more,
    ]  # fmt: skip

    def start(name: str) -> Disturbed:
        out = where / name
        return Disturbed([*common, "--run", f"crash-{os.getpid()}-{name}", "--out", str(out)], out, environment)

    code, text = start("undisturbed").finish()
    if code != 0:
        raise SystemExit(f"the undisturbed run ended with {code}; see {where}")
    undisturbed = json.loads(text)
    phases = [*AFTER_A_DEATH, *IN_EVERY_MODE, *(IF_STAGED if args.boundary.startswith("staged") else [])]
    phases += ["apply_deferred_update"] if args.boundary == "staged_before_update" else []
    tally = Tally()
    targets = deck(rng, phases)
    while tally.kills < args.kills and not tally.differences:
        run = start(f"disturbed-{tally.runs}")
        try:
            disturb(run, tally, targets, args, rng)
        finally:
            code, text = run.finish()
        judge(run, code, text, undisturbed, tally)
        tally.leaked_pools += list_objects(f"crash-{os.getpid()}-{run.out.name}")
        tally.leaked_processes += processes_of(run.out)
        tally.leaked_files += [str(path) for path in runtime.rglob("*") if not path.is_dir()]
        tally.runs += 1
    return {
        "identical": not tally.differences and tally.kills >= args.kills,
        "kills": tally.kills,
        "kills_by_phase": dict(tally.by_phase.most_common()),
        "kills_by_role": {role: tally.by_role[role] for role in ROLES},
        "leaked_pools": len(tally.leaked_pools),
        "leaked_processes": len(tally.leaked_processes),
        "leaked_files": len(tally.leaked_files),
        "differences": tally.differences,
        "runs": tally.runs,
        "steps": args.steps,
        "boundary": args.boundary,
        "seed": args.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def judge(run: Disturbed, code: int, text: str, undisturbed: dict[str, Any], tally: Tally) -> None:
    if code != 0:
        said = (run.out.parent / f"{run.out.name}.err").read_text().strip().splitlines()[-1:]
        tally.differences.append(f"{run.out.name} ended with exit code {code}: {' '.join(said)}")
        return
    lines = [json.loads(line) for line in (run.out / "steps.jsonl").read_text().splitlines()]
    tally.differences += [f"{run.out.name}: {what}" for what in differences(json.loads(text), undisturbed, lines)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills that have to hit (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of phases and instants (default 0)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run (default 40)")
    parser.add_argument("--boundary", choices=BOUNDARIES, default="staged_before_update")
    parser.add_argument("--microbatches-per-step", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' directories here, empty or new")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("more", nargs="*", metavar="-- OPTION", help="more options of `shmstage run`")
    args = parser.parse_args()
    where = args.keep.absolute() if args.keep else Path(tempfile.mkdtemp(prefix="crash"))
    where.mkdir(parents=True, exist_ok=True)
    try:
        verdict = crash(args, where)
    finally:
        if not args.keep:
            shutil.rmtree(where, ignore_errors=True)
    if args.json:
        print(json.dumps(verdict))
    else:
        for key, value in verdict.items():
            shown = "  ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            print(f"{key:<18}{shown}")
    leaks = any(verdict[key] for key in ("leaked_pools", "leaked_processes", "leaked_files"))
    return 0 if verdict["identical"] and not leaks else 1


if __name__ == "__main__":
    sys.exit(main())

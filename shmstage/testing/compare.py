"""``shmstage compare``: the four boundary modes and the reference loop on the same input; are they equal?

The latch does not exist here and a planned stage waits for its micro-batch to a deadline, so that the outcome does not
depend on how fast anything is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmstage.errors import RunFailedError, SettingsError
from shmstage.launch.processes import Child
from shmstage.launch.run_command import add_settings, resolve_args
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.records import read_failure, read_json_lines
from shmstage.settings import BOUNDARIES, SWITCHES, Boundary, Settings
from shmstage.testing.boundary_table import expected_calls, received_calls

DEFAULT_STEPS = 6
STAGE_WAIT_S = 120.0
REFERENCE_ROLE = "testing.reference_run"
REFERENCE_TIMEOUT_S = 3600.0
#: what has to be equal between every mode and the reference loop
EQUAL = ("payload_digests", "denominators", "losses", "initial_param_digest", "param_digest")


class _Quiet:
    def poll(self) -> None:
        return


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="shmstage compare",
        description="Run serial, pipelined, staged_after_update, staged_before_update and the reference loop on the "
        "same input and check that payloads, denominators, losses and parameters are equal. Exit 1 if they are not.",
    )
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object on stdout")
    args = parser.parse_args(argv)
    for name in ("resume", "boundary", "latch", "record", "record_steps", *SWITCHES):
        if getattr(args, name) is not None:
            raise SettingsError(f"--{name.replace('_', '-')}: compare runs every mode from the start; leave it out")
    settings = resolve_args(args).settings
    if settings.out is not None and os.path.isdir(settings.out) and any(settings.out.iterdir()):
        raise SettingsError(f"out = {settings.out} is not empty; compare starts anew: choose another --out")
    if settings.steps is None and settings.passes is None:
        settings = settings.model_copy(update={"steps": DEFAULT_STEPS})
    verdict = compare(completed(settings), say=_say)
    if args.json:
        print(json.dumps(verdict))
    else:
        _print_table(verdict)
    return 0 if verdict["equal"] else 1


def _say(text: str) -> None:
    from shmstage.launch.progress import PatientConsole

    PatientConsole(stderr=True).print(text, highlight=False)


def compare(settings: Settings, *, say: Any = lambda text: None) -> dict[str, Any]:
    """Run everything and return the verdict with what it rests on; ``settings`` is complete."""
    # bit-identity holds for one CPU count: all arms get the same, whatever the machine does meanwhile
    os.environ.setdefault("PJRT_NPROC", str(os.cpu_count() or 1))
    # what a job's file says of recording is for the job
    changes = {"verify": "full", "stage_wait_s": STAGE_WAIT_S, "latch": False, "record": None, "record_steps": ""}
    base = settings.model_copy(update=changes)
    say("reference loop")
    reference = run_reference(_arm(base, "reference"))
    modes: dict[str, dict[str, Any]] = {}
    for mode in BOUNDARIES:
        say(mode)
        arm = _arm(base, mode).model_copy(update={"boundary": mode})
        modes[mode] = _result(arm, run(arm, _Quiet()))
    problems = [text for mode, result in modes.items() for text in problems_of(mode, result, reference, base)]
    if not all(map(math.isfinite, (*reference["losses"], *reference["denominators"]))):
        problems.append("reference: a loss or denominator is not finite; what is broken alike is not equal")
    if reference["param_digest"] == reference["initial_param_digest"]:
        problems.append("reference: the final parameters are the initial ones; nothing was trained")
    return {
        "equal": not problems,
        "problems": problems,
        "steps": reference["steps"],
        "microbatches_per_step": settings.microbatches_per_step,
        "modes": modes,
        "reference": reference,
        "out": str(base.out_dir),
    }


def _arm(base: Settings, name: str) -> Settings:
    return base.model_copy(update={"run": f"{base.run}-{name}", "out": base.out_dir / name})


def _result(arm: Settings, summary: dict[str, Any]) -> dict[str, Any]:
    calls = received_calls(read_json_lines(Path(summary["out"]) / "trainer_calls.jsonl"))
    kept = (*EQUAL, "steps", "staged_boundaries", "boundary_idle_s", "step_s", "digests", "leaked_pools")
    return {**{key: summary[key] for key in kept}, "trainer_calls": calls}


def problems_of(
    mode: Boundary | str, result: dict[str, Any], reference: dict[str, Any], settings: Settings
) -> list[str]:
    """Everything that is not as the contract wants it, in words; empty if all is well. Pure."""
    problems = [f"{mode}: {key} differ from the reference loop" for key in EQUAL if result[key] != reference[key]]
    if not all(digest for step in result["payload_digests"] or [[""]] for digest in step):
        problems.append(f"{mode}: payload digests are missing")
    steps = reference["steps"]
    problems += _call_problems(mode, result["trainer_calls"], reference["payload_digests"], settings)
    boundaries = steps - 1 if str(mode).startswith("staged") else 0
    if result["staged_boundaries"] != boundaries:
        problems.append(f"{mode}: {result['staged_boundaries']} staged boundaries, wanted {boundaries}")
    if result["leaked_pools"]:
        problems.append(f"{mode}: {result['leaked_pools']} leaked objects in shared memory")
    return problems


def _call_problems(
    mode: Boundary | str, received: list[str], payload_digests: list[list[str]], settings: Settings
) -> list[str]:
    """The trainer's record against the contract's table for this mode, step by step, the short last one too."""
    variants = [
        expected_calls(
            mode,  # type: ignore[arg-type]
            microbatches=[len(step) for step in payload_digests],
            microbatches_per_step=settings.microbatches_per_step,
            checkpoint_every=settings.checkpoint_every,
            weight_sync=settings.weight_sync != "off",
            recompute_old_logps=settings.recompute_old_logps,
            end_came_late=late,
        )
        # whether the feeder had seen the end by the last call depends on speed; both are in the contract
        for late in ((False,) if len(payload_digests) == settings.step_cap else (False, True))
    ]
    if received in variants:
        return []
    wanted = variants[0]
    pairs = enumerate(zip(received, wanted, strict=False))
    at = next((i for i, (got, want) in pairs if got != want), min(len(received), len(wanted)))
    got, want = ((calls[at : at + 1] or ["nothing"])[0] for calls in (received, wanted))
    return [f"{mode}: call {at} was {got}, wanted {want}"]


def run_reference(settings: Settings) -> dict[str, Any]:
    """The reference loop in a process of its own; raises ``RunFailedError`` with the log to look at."""
    out = settings.out_dir
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"out = {out}: {error.strerror}; choose a directory that can be written") from None
    child = Child(REFERENCE_ROLE, ["--settings", settings.model_dump_json()], out / "reference.log")
    try:
        code = child.wait(REFERENCE_TIMEOUT_S)
    finally:
        child.end(1.0)
    if code != 0:
        raise read_failure(out, REFERENCE_ROLE) or RunFailedError(f"the reference loop {child.describe_end()}")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _print_table(verdict: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shmstage.launch.progress import PatientConsole

    table = Table(
        title=f"{verdict['steps']} steps of {verdict['microbatches_per_step']} micro-batches; medians of step time and "
        "boundary idle", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in ("mode", "step ms", "idle ms", "max idle ms", "staged", "params", "equal"):
        table.add_column(column, no_wrap=True, justify="right" if column.endswith("ms") else "left")
    for mode, result in verdict["modes"].items():
        bad = any(text.startswith(f"{mode}:") for text in verdict["problems"])
        idle = result["boundary_idle_s"]
        table.add_row(
            mode, _ms(result["step_s"]["median"]), _ms(idle["median"]), _ms(idle["max"]),
            f"{result['staged_boundaries']}/{result['steps'] - 1}", result["param_digest"][:8],
            "no" if bad else "yes",
        )  # fmt: skip
    table.add_row("reference", "", "", "", "", verdict["reference"]["param_digest"][:8], "")
    # tables are cut to a terminal's width; a file or a pipe has none
    console = PatientConsole(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for text in verdict["problems"]:
        console.print(Text(text, style="red"), soft_wrap=True)
    console.print("equal" if verdict["equal"] else "NOT EQUAL", style="bold")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"

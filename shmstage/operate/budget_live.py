"""``shmstage budget --live RUN``: the forecast of a run beside what it uses now. The run is not asked."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.budget.formula import MOMENTS, Forecast, Moment, forecast
from shmstage.budget.report import add_texts
from shmstage.errors import SettingsError, shown
from shmstage.launch.run_directory import find_run
from shmstage.memory.inspect import PoolSnapshot, read_pools
from shmstage.memory.limits import format_nbytes
from shmstage.memory.usage import ProcessUse, process_use
from shmstage.operate.budget_command import inputs_from
from shmstage.operate.budget_settings import take_table
from shmstage.records import read_json
from shmstage.settings import Settings, resolve

REMEDY = "restore it, or name another run"
#: who owns the pool of micro-batches, and who that of the weights
ORCHESTRATOR, TRAINER = "orchestrator", "trainer"


@final
@dataclass(frozen=True)
class Use:
    """What a run uses now. ``processes``: role → use; ``None`` where it does not run (any more)."""

    run: str
    processes: dict[str, ProcessUse | None]
    pools: Sequence[PoolSnapshot]

    def pool_nbytes(self, role: str) -> int:
        return sum(pool.nbytes for pool in self.pools if pool.owner.role == role)

    @property
    def private_nbytes(self) -> int:
        return sum(use.private_nbytes for use in self.processes.values() if use is not None)


def show_live(name: str, args: argparse.Namespace) -> int:
    """Print forecast and use side by side; 0. Raises ``SettingsError`` for a run that is not there."""
    out = find_run(name)
    flags = {key: getattr(args, key) for key in Settings.model_fields if getattr(args, key, None) is not None}
    resolved = resolve(flags, {}, args.config, before=_settings_of(out), before_origin=f"{out}/run.json")
    take_table(args, resolved.budget, args.config)
    inputs, assumed = inputs_from(args, resolved, journaled=_is_journaled(out))
    found, use = forecast(inputs), use_of(out)
    rows = compare(found, use)
    if args.json:
        print(json.dumps(_as_json(out, found, use, rows, assumed)))
    else:
        _print(out, use, rows, assumed)
    return 0


def _settings_of(out: Path) -> dict[str, Any]:
    settings = read_json(out / "run.json", REMEDY).get("settings")
    if type(settings) is not dict:
        raise SettingsError(f"{out / 'run.json'}: settings is {shown(settings)}, want an object; {REMEDY}")
    return settings


def _is_journaled(out: Path) -> bool | None:
    """Whether the run has a journal; ``None`` before its first step, when it may not have one yet."""
    if (out / "journal").is_dir():
        return True
    return False if (out / "steps.jsonl").exists() else None


def use_of(out: Path) -> Use:
    """What the run in ``out`` uses now, from its pids and the headers of its pools. Raises ``SettingsError``."""
    record = read_json(out / "run.json", REMEDY)
    run, pids = record.get("run"), record.get("pids")
    if not isinstance(run, str) or not isinstance(pids, dict):
        raise SettingsError(f"{out / 'run.json'} names no run and no processes; {REMEDY}")
    written_s = os.stat(out / "run.json").st_mtime
    processes = {
        str(role): process_use(pid, started_before_s=written_s) if type(pid) is int and pid > 0 else None
        for role, pid in pids.items()
    }
    return Use(run, processes, read_pools(run))


@final
@dataclass(frozen=True, slots=True)
class Row:
    """Bytes forecast at steady state and at a checkpoint, ``None`` where nobody said enough, and bytes used."""

    what: str
    steady: int | None
    checkpoint: int | None
    used: int


def compare(found: Forecast, use: Use) -> list[Row]:
    """Forecast and use of each pool, of private memory and of all. Where nobody said how large
    the parameters are, the weights pool is forecast as it is there."""
    publishes = found.inputs.weight_sync
    real = use.pool_nbytes(TRAINER)
    told = sum(amount.steady for amount in found.amounts if amount.name == "weights_pool")
    weights = told or real or (None if publishes else 0)

    def whole(moment: Moment) -> int | None:
        return None if weights is None else found.total(moment, "shm", "host") - told + weights

    host = {moment: found.total(moment, "host") for moment in MOMENTS}
    return [
        Row("pool", found.pool_nbytes, found.pool_nbytes, use.pool_nbytes(ORCHESTRATOR)),
        Row("weights pool", weights, weights, real),
        Row("private memory", host["steady"], host["checkpoint"], use.private_nbytes),
        Row(
            "all of it", whole("steady"), whole("checkpoint"), use.pool_nbytes(ORCHESTRATOR) + real + use.private_nbytes
        ),
    ]


def _as_json(out: Path, found: Forecast, use: Use, rows: list[Row], assumed: list[str]) -> dict[str, Any]:
    return {
        "run": use.run,
        "out": str(out),
        "compare": [
            {"what": row.what, "forecast": row.steady, "checkpoint": row.checkpoint, "used": row.used} for row in rows
        ],
        "processes": [
            {"role": role, "alive": False}
            if each is None
            else {
                "role": role, "alive": True, "pid": each.pid, "pss": each.pss_nbytes, "pools": each.pool_nbytes,
                "private": each.private_nbytes,
            }
            for role, each in use.processes.items()
        ],
        "pools": [
            {"name": pool.name, "owner": pool.owner.role, "nbytes": pool.nbytes, "slots": len(pool.slots)}
            for pool in use.pools
        ],
        "amounts": {amount.name: amount.steady for amount in found.amounts if amount.counted},
        "assumed": assumed,
    }  # fmt: skip


def _print(out: Path, use: Use, rows: list[Row], assumed: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shmstage.launch.progress import PatientConsole

    # a table is cut to a terminal's width; a file or a pipe has none
    console = PatientConsole(width=None if sys.stdout.isatty() else 200)
    table = Table(title=Text(f"run {use.run} in {out}, bytes"), title_justify="left")
    table.add_column("")
    for name in ("forecast", "at a checkpoint", "used now"):
        table.add_column(name, justify="right")
    for row in rows:
        add_texts(table, row.what, *map(_in_words, (row.steady, row.checkpoint, row.used)))
    table.add_section()
    for role, each in use.processes.items():
        text = "does not run" if each is None else _in_words(each.private_nbytes)
        add_texts(table, f"{role}, without pools", "", "", text)
    console.print(table)
    for text in assumed:
        console.print(f"assumed: {text}", markup=False, highlight=False, soft_wrap=True)


def _in_words(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes} ({format_nbytes(nbytes)})"

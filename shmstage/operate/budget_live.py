"""``shmstage budget --live RUN``: the forecast of a run beside what it uses now. The run is not asked."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shmstage.budget.formula import Forecast, forecast
from shmstage.budget.report import add_texts
from shmstage.errors import SettingsError
from shmstage.events import read_json
from shmstage.launch.run_directory import find_run, run_file
from shmstage.memory.inspect import PoolSnapshot, read_pools
from shmstage.memory.limits import format_nbytes
from shmstage.memory.usage import ProcessUse, process_use
from shmstage.operate.budget_command import inputs_from
from shmstage.operate.budget_settings import take_table
from shmstage.settings import Settings, resolve

REMEDY = "name the OUT directory of a run, its id or the beginning of it"
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
    resolved = resolve(flags, {}, args.config, before=run_file(out), before_origin=f"{out}/run.json")
    take_table(args, resolved.budget, args.config)
    inputs, assumed = inputs_from(args, resolved)
    found, use = forecast(inputs), use_of(out)
    rows = compare(found, use)
    if args.json:
        print(json.dumps(_as_json(out, found, use, rows, assumed)))
    else:
        _print(out, use, rows, assumed)
    return 0


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


def compare(found: Forecast, use: Use) -> list[tuple[str, int, int]]:
    """(what, bytes forecast at steady state, bytes used)."""
    weights = sum(amount.steady for amount in found.amounts if amount.name == "weights_pool")
    return [
        ("pool", found.pool_nbytes, use.pool_nbytes(ORCHESTRATOR)),
        ("weights pool", weights, use.pool_nbytes(TRAINER)),
        ("private memory", found.total("steady", "host"), use.private_nbytes),
        ("all of it", found.total("steady", "shm", "host"), _all(use)),
    ]


def _all(use: Use) -> int:
    return use.pool_nbytes(ORCHESTRATOR) + use.pool_nbytes(TRAINER) + use.private_nbytes


def _as_json(
    out: Path, found: Forecast, use: Use, rows: list[tuple[str, int, int]], assumed: list[str]
) -> dict[str, Any]:
    return {
        "run": use.run,
        "out": str(out),
        "compare": [{"what": what, "forecast": wanted, "used": used} for what, wanted, used in rows],
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


def _print(out: Path, use: Use, rows: list[tuple[str, int, int]], assumed: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    from shmstage.launch.progress import PatientConsole

    console = PatientConsole()
    table = Table(title=Text(f"run {use.run} in {out}, bytes"), title_justify="left")
    table.add_column("")
    for name in ("forecast", "used now"):
        table.add_column(name, justify="right")
    for what, wanted, used in rows:
        add_texts(table, what, f"{wanted} ({format_nbytes(wanted)})", f"{used} ({format_nbytes(used)})")
    table.add_section()
    for role, each in use.processes.items():
        text = "does not run" if each is None else f"{each.private_nbytes} ({format_nbytes(each.private_nbytes)})"
        add_texts(table, f"{role}, without pools", "", text)
    console.print(table)
    for text in assumed:
        console.print(f"assumed: {text}", markup=False, highlight=False, soft_wrap=True)

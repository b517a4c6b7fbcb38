"""What can be known of a run from outside: its OUT, its locks and its pools. Nothing of it is asked or changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmstage.errors import SettingsError
from shmstage.launch.run_directory import LAUNCHER, ROLES, find_run, newest_checkpoint
from shmstage.memory.inspect import (
    PoolSnapshot,
    ProcessSnapshot,
    printable,
    process_state,
    read_pools,
    read_processes,
)
from shmstage.memory.names import list_objects, run_hash
from shmstage.operate.run_verdict import DEFAULT_STOP_GRACE_S, Verdict, judge
from shmstage.operate.step_tail import Progress, read_progress
from shmstage.records import read_failure
from shmstage.settings import DEFAULT_STEPS


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run as it is now. ``out`` is ``None`` where only shared memory knows of it; ``notes`` say what is odd.

    ``restarts``, ``steps`` (how many it is to make; ``None``: as many as the input gives) and ``checkpoint`` (number of
    the newest; ``None``: none) are of OUT.
    """

    run: str
    out: Path | None
    verdict: Verdict
    processes: tuple[ProcessSnapshot, ...]
    pools: tuple[PoolSnapshot, ...]
    progress: Progress | None = None
    epoch: int | None = None
    restarts: Mapping[str, int] | None = None
    steps: int | None = None
    checkpoint: int | None = None
    failures: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


def status_of(name: str) -> RunStatus:
    """Of the run that ``name`` means (``locate``)."""
    run, out = locate(name)
    return _status(out) if out is not None else _from_memory(read_pools(run), read_processes(run))


def locate(name: str) -> tuple[str, Path | None]:
    """Id and OUT of the run that ``name`` means: an OUT directory, a run id or its beginning.

    OUT is ``None`` for a run that only shared memory knows of. Raises ``SettingsError`` if there is none or more than
    one.
    """
    try:
        out = find_run(name)
        return _run_of(out), out
    except SettingsError as error:
        ids = {pool.run_id for pool in read_pools() if pool.run_id and pool.run_id.startswith(name)} if name else set()
        ids = {name} if name in ids or (name and not ids and list_objects(name)) else ids
        if len(ids) != 1:
            raise SettingsError(f"{error}; nor is it one in shared memory: `shmstage status` lists those") from None
        run = ids.pop()
    return run, _out_of_living(read_processes(run), run)


def all_statuses(runs: Path = Path("runs")) -> list[RunStatus]:
    """Of every run of this user that has a pool or a process. OUT: as a living process says it, or under ``runs``."""
    pools, processes = read_pools(), read_processes()
    hashes = {_hash_in(pool.name) for pool in pools} | {_hash_in(process.lock) for process in processes}
    known = {run_hash(_run_of(file.parent)): file.parent for file in sorted(runs.glob("*/run.json"))}
    found = []
    for tag in sorted(hashes):
        theirs = [process for process in processes if _hash_in(process.lock) == tag]
        ours = [pool for pool in pools if _hash_in(pool.name) == tag]
        out = _out_of_living(theirs) or known.get(tag)
        found.append(_status(out) if out is not None else _from_memory(ours, theirs))
    return found


# --- one run ----------------------------------------------------------------------------------------------


def _status(out: Path) -> RunStatus:
    record, notes = _run_record(out)
    settings = record["settings"]
    run = str(settings.get("run") or record.get("run") or "")
    locks = read_processes(run) if run else []
    pools = tuple(read_pools(run)) if run else ()
    processes = processes_of(record.get("pids"), locks, launcher_lives(out))
    failures, odd = _failures(out)
    progress = None
    try:
        progress = read_progress(out / "steps.jsonl")
    except OSError as error:
        odd.append(f"steps.jsonl cannot be read: {error.strerror}")
    checkpoint = newest_checkpoint(out)
    verdict = NAMELESS if not run else judge(
        processes, pools, finished=(out / "summary.json").exists(), failures=failures, has_steps=progress is not None,
        out=str(out.absolute()), checkpoint=checkpoint,
        grace_s=_number(settings.get("stop_grace_s"), DEFAULT_STOP_GRACE_S),
    )  # fmt: skip
    steps = settings.get("steps")
    if steps is None and settings.get("passes") is None:
        steps = DEFAULT_STEPS
    return RunStatus(
        run=printable(run), out=out.absolute(), verdict=verdict, processes=processes, pools=pools, progress=progress,
        epoch=record.get("epoch") if isinstance(record.get("epoch"), int) else None,
        restarts=_counts(record.get("restarts")),
        steps=steps if isinstance(steps, int) else None, checkpoint=checkpoint, failures=failures,
        notes=(*notes, *odd),
    )  # fmt: skip


#: nothing can be said about processes and pools of a run whose record is damaged
NAMELESS = Verdict(
    "unclear",
    "its run.json does not say which run it is, so its processes and pools cannot be told from others",
    ("`shmstage status` lists all runs that have something in shared memory, `shmstage gc` frees what the dead left",),
)


def _from_memory(pools: Iterable[PoolSnapshot], processes: Iterable[ProcessSnapshot]) -> RunStatus:
    """Of a run that has no OUT here: one of other programs, or one whose directory is somewhere else."""
    held, known = tuple(pools), tuple(processes)
    run = next((pool.run_id for pool in held if pool.run_id), "")
    return RunStatus(run, None, judge(known, held), known, held)


def processes_of(pids: object, locks: Iterable[ProcessSnapshot], launcher: bool | None) -> tuple[ProcessSnapshot, ...]:
    """Who belongs to a run: whom ``run.json`` names, and who else holds a lifetime lock of it.

    ``launcher``: whether it lives; it holds a lock in OUT, not one beside the pools.
    """
    named = _counts(pids)
    left = list(locks)
    pid = named.get("launcher", 0)
    state = process_state(pid) if launcher else ""
    found = [ProcessSnapshot("launcher", pid, launcher, state, "")]
    # a launcher that lives and is not seen is in another pid namespace, and so are its children
    unseen = None if launcher and not state else False
    for role in ROLES:
        own = next((lock for lock in left if lock.role == role and lock.pid == named.get(role, -1)), None)
        if own is not None:
            left.remove(own)
        found.append(own or _without_lock(role, named.get(role, 0), unseen))
    return (*found, *left)


def _without_lock(role: str, pid: int, unseen: bool | None) -> ProcessSnapshot:
    """A child takes its lock some time after it was started, and gives it up before it ends; ``unseen``: otherwise."""
    with contextlib.suppress(OSError):
        if pid and f"shmstage.{role}" in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"):
            return ProcessSnapshot(role, pid, True, process_state(pid), "")
    return ProcessSnapshot(role, pid, unseen if pid else False, "", "")


def launcher_lives(out: Path) -> bool | None:
    """Whether somebody holds ``OUT/.lock``, as a launcher does for life; ``None`` if that cannot be seen."""
    try:
        descriptor = os.open(out / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # shared, and for a moment: two who look at once do not take each other for the launcher
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)


# --- what lies in OUT -------------------------------------------------------------------------------------


def _run_record(out: Path) -> tuple[dict[str, Any], list[str]]:
    """``run.json``, with "settings" in any case, and what is wrong with it."""
    empty: dict[str, Any] = {"settings": {}}
    try:
        record = json.loads((out / "run.json").read_bytes())
    except OSError as error:
        return empty, [f"run.json cannot be read: {error.strerror}"]
    except (ValueError, RecursionError):
        return empty, ["run.json is not JSON"]
    if not isinstance(record, dict) or not isinstance(record.get("settings"), dict):
        return empty, ["run.json holds no settings"]
    return record, []


def _failures(out: Path) -> tuple[dict[str, str], list[str]]:
    """Role → what it said when it failed, and what cannot be read."""
    found, odd = {}, []
    for role in (LAUNCHER, *ROLES):
        try:
            error = read_failure(out, role)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            odd.append(f"{role}.failure.json cannot be read")
            continue
        if error is not None:
            found[role] = printable(f"{type(error).__name__}: {error}")
    return found, odd


def _run_of(out: Path) -> str:
    record, _ = _run_record(out)
    return str(record["settings"].get("run", ""))


def _out_of_living(processes: Iterable[ProcessSnapshot], run: str | None = None) -> Path | None:
    """OUT as a living child's command line names it: ``--settings-file OUT/run.json``."""
    for process in processes:
        if not process.alive or not process.state:
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
            out = Path(words[words.index("--settings-file") + 1]).parent
            if out.is_absolute() and (out / "run.json").exists() and (run is None or _run_of(out) == run):
                return out
    return None


def _hash_in(name: str) -> str:
    return name.split(".")[2]


def _counts(value: object) -> dict[str, int]:
    return {str(k): v for k, v in value.items() if isinstance(v, int)} if isinstance(value, dict) else {}


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) else otherwise

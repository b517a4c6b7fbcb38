"""``OUT``: whose it is, what lies in it, and what a fresh start may do to it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmstage.errors import InputError, SettingsError, named, shown
from shmstage.events import FOLDER as EVENTS
from shmstage.memory.identity import PeerWatch
from shmstage.memory.locks import lock_exclusively
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, owned_objects
from shmstage.memory.sweep import sweep
from shmstage.orchestrator.beginning import NAME as BEGUN
from shmstage.orchestrator.step_lines import last_step, read_step_lines
from shmstage.packing.recording import check_is_free
from shmstage.records import failure_path, read_json
from shmstage.settings import Settings

POLL_S = 0.1
#: named by string: the launcher starts the demo without importing it
DEMO_ENGINE = "shmstage.demo.engine:make_engine"
DEMO_SOURCE = "shmstage.demo.source:make_source"
ROLES = ("orchestrator", "trainer")
LAUNCHER = "launcher"
#: below it a directory per host but the first, whose trainer writes into OUT itself
HOSTS = "hosts"
#: what Ray would print
RAY_LOG = "ray.log"
STALE_ON_FRESH_START = (
    "steps.jsonl", "trainer_calls.jsonl", *(f"{role}.log" for role in ROLES), "weights.json", "hooks.jsonl",
    RAY_LOG,
)  # fmt: skip
STALE_DIRECTORIES = ("state", EVENTS, "profile", HOSTS)
FILES = (
    *STALE_ON_FRESH_START, "run.json", "summary.json", BEGUN, *(f"{role}.failure.json" for role in (LAUNCHER, *ROLES)),
)  # fmt: skip
DIRECTORIES = (*STALE_DIRECTORIES, "journal", "checkpoints")


def completed(settings: Settings) -> Settings:
    """Fill in what depends on the moment of the start: run id, OUT, demo input, default engine."""
    run = settings.run or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    changes: dict[str, object] = {"run": run, "out": (settings.out or Path("runs") / run).absolute()}
    if settings.bundle is not None:
        changes["bundle"] = settings.bundle.absolute()
    if settings.eval_bundle is not None:
        changes["eval_bundle"] = settings.eval_bundle.absolute()
    if settings.record is not None:
        changes["record"] = settings.record.absolute()
    if settings.bundle is None and not settings.source:
        changes["source"] = DEMO_SOURCE
    if settings.bundle is not None and settings.source:
        raise SettingsError(
            f"bundle = {named(str(settings.bundle), 1000)} and source = {named(settings.source, 1000)} are both given; "
            "keep the one to train"
        )
    if not settings.engine:
        changes["engine"] = DEMO_ENGINE
    return settings.model_copy(update=changes)


def find_run(name: str, runs: Path = Path("runs")) -> Path:
    """OUT of the run that ``name`` means: an OUT directory, a run id, or the beginning of one under ``runs``.

    Raises ``SettingsError`` if there is none or more than one.
    """
    if os.path.exists(os.path.join(name, "run.json")):  # unlike Path's it raises for no name, however long
        return Path(name)
    ids = {file.parent: str(_run_id(file.parent)) for file in sorted(runs.glob("*/run.json"))}
    exact = [out for out, run in ids.items() if run == name]
    found = exact or [out for out, run in ids.items() if run.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        why = "that directory holds no run.json" if os.path.isdir(name) else "there is no such directory"
        raise SettingsError(f"no run {shown(name)}: {why}, and no run in {runs}/ has an id that begins so")
    names = ", ".join(ids[out] for out in found)
    raise SettingsError(f"run {shown(name)} could be {names[:400]}; give more of the id, or the OUT directory")


def _run_id(out: Path) -> object:
    with contextlib.suppress(SettingsError):
        return run_file(out).get("run", "")
    return ""


def run_file(out: Path) -> dict[str, Any]:
    """The settings that ``out``'s run was started with; empty if no run was. Raises ``SettingsError`` if unreadable."""
    path = out / "run.json"
    try:
        settings = read_json(path).get("settings")
    except FileNotFoundError:
        return {}
    if type(settings) is not dict:
        raise SettingsError(f"{path}: settings is {shown(settings)}, want an object; choose another --out")
    return settings


def newest_checkpoint(out: Path, up_to: float = math.inf) -> int | None:
    """The highest step up to ``up_to`` with a complete checkpoint, ``12`` or ``12.npz``; ``None`` without any."""
    with contextlib.suppress(OSError):
        # not ``12.orbax-checkpoint-tmp``: what orbax has not finished carries the step, too
        found = [re.fullmatch(r"([0-9]+)(\.\w+)?", name) for name in _checkpoints(out)]
        return max((step for name in found if name and (step := int(name[1])) <= up_to), default=None)
    return None


def what_is_saved(out: Path, command: str) -> str:
    """Of a run that was stopped, in words, and how it goes on: ``command`` and ``--resume``."""
    again = f"`{command} --resume {shlex.quote(str(out))}`"
    reached = None
    with contextlib.suppress(SettingsError, OSError):  # a resume says what is wrong with the file
        reached = last_step(out / "steps.jsonl")
    saved = newest_checkpoint(out, math.inf if reached is None else reached)
    if saved:
        return f"saved up to step {saved}; {again} goes on"
    if not _checkpoints(out):
        return f"nothing was trained; {again if _is_journaled(out) else 'the same command'} starts it again"
    if saved == 0:
        return f"{'no step is saved' if reached else 'nothing was trained'}; {again} begins with step 1"
    return f"{again} goes on from its newest checkpoint"


@contextlib.contextmanager
def claimed(settings: Settings) -> Iterator[Path]:
    """Make OUT ours for the length of the run. Raises ``SettingsError`` if it is somebody's, or holds checkpoints.

    A run that ends for bad input before anything was trained leaves no OUT behind where there was none.
    """
    out = settings.out_dir
    is_new, parent_is_new = not os.path.exists(out), not os.path.exists(out.parent)  # Path's own raises for long names
    try:
        with _locked(settings, out):
            yield out
    except InputError:
        # a restart may run into bad input too, long after the first start: then there is something to keep
        if is_new and not _checkpoints(out):
            shutil.rmtree(out, ignore_errors=True)
            if parent_is_new:
                with contextlib.suppress(OSError):
                    out.parent.rmdir()  # runs/, if nothing else is in it
        raise


@contextlib.contextmanager
def _locked(settings: Settings, out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(f"out = {out}: {error.strerror}; choose a directory that can be written") from None
    try:
        if not lock_exclusively(lock):
            raise SettingsError(f"out = {out} is in use by a living run; choose another --out")
        _prepare(settings, out)
        yield
    finally:
        os.close(lock)


def _prepare(settings: Settings, out: Path) -> None:
    strangers = [p.name for p in out.iterdir() if p.name != ".lock"]
    if strangers and not (out / "run.json").exists():
        raise SettingsError(f"out = {out} is not empty and holds no run ({strangers[0]}, ...); choose another --out")
    for name in FILES:
        if (out / name).exists() and not (out / name).is_file():
            what = "a directory" if (out / name).is_dir() else "no regular file"
            raise SettingsError(f"{out / name} is {what} where a file belongs; remove it or choose another --out")
    for name in DIRECTORIES:
        if (out / name).exists() and not (out / name).is_dir():
            raise SettingsError(f"{out / name} is a file where a directory belongs; remove it or choose another --out")
    for run in {str(run_file(out).get("run", "")), settings.run} - {""}:
        _wait_for_predecessors(run, 2 * settings.stop_grace_s + POLL_S)
    if settings.record is not None and not settings.resume:
        check_is_free(settings.record)
    held, journaled = _checkpoints(out), _is_journaled(out)
    if held and not settings.resume and not journaled and _trained_nothing(out, held):
        raise SettingsError(
            f"out = {out} holds an earlier run that trained no step: remove {out} to start anew, or add --resume to "
            "the corrected command"
        )
    if held and not settings.resume:
        raise SettingsError(
            f"out = {out} holds {len(held)} checkpoint{'s' * (len(held) > 1)} of an earlier run; "
            "add --resume to continue it, or choose another --out"
        )
    if journaled and not settings.resume:
        raise SettingsError(
            f"out = {out} holds a journal of what a source gave that cannot be asked again; add --resume to train it, "
            "or choose another --out"
        )
    if settings.resume and not (held or journaled):
        raise SettingsError(f"--resume: out = {out} holds no checkpoint; start without --resume")
    for role in (LAUNCHER, *ROLES):
        failure_path(out, role).unlink(missing_ok=True)
    (out / "summary.json").unlink(missing_ok=True)  # of the run before: this one has to earn its own
    (out / BEGUN).unlink(missing_ok=True)
    if settings.resume:
        read_step_lines(out / "steps.jsonl")  # what cannot be relied on is said before anything is started
    else:
        for name in STALE_ON_FRESH_START:
            (out / name).unlink(missing_ok=True)
        for name in STALE_DIRECTORIES:
            shutil.rmtree(out / name, ignore_errors=True)


def _checkpoints(out: Path) -> list[str]:
    """Whatever the engine names them; what is not complete is hidden."""
    directory = out / "checkpoints"
    names = [entry.name for entry in directory.iterdir()] if os.path.isdir(directory) else []
    return [name for name in names if not name.startswith(".")]


def _is_journaled(out: Path) -> bool:
    return (out / "journal").is_dir() and any((out / "journal").iterdir())


def _trained_nothing(out: Path, held: list[str]) -> bool:
    lines = out / "steps.jsonl"
    return len(held) == 1 and newest_checkpoint(out) == 0 and not (lines.exists() and lines.stat().st_size)


def _wait_for_predecessors(run: str, timeout_s: float) -> None:
    """Until no process of the run's earlier start lives; what it left in shared memory is removed.

    Children of a launcher that was killed end by themselves, but not before they have finished what they were at, and
    until then they write into OUT. Raises ``SettingsError`` naming who is still there.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        sweep(run)
        living = [name for name in owned_objects(run) if name.endswith(LOCK_SUFFIX)]
        if not living:
            return
        if time.monotonic() > deadline:
            with contextlib.closing(PeerWatch(f"{SHM_DIR}/{living[0]}")) as watch:
                who = watch.describe()
            raise SettingsError(f"run {run}: {who} of an earlier start still runs; end it, or choose another --run")
        threading.Event().wait(POLL_S)

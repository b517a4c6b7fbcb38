"""``OUT``: whose it is, what lies in it, and what a fresh start may do to it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmstage.errors import InputError, SettingsError
from shmstage.events import failure_path
from shmstage.memory.sweep import sweep
from shmstage.settings import Settings

#: named by string: the launcher starts the demo without importing it
DEMO_ENGINE = "shmstage.demo.engine:make_engine"
DEMO_SOURCE = "shmstage.demo.source:make_source"
STALE_ON_FRESH_START = ("steps.jsonl", "trainer_calls.jsonl", "orchestrator.log", "trainer.log")


def completed(settings: Settings) -> Settings:
    """Fill in what depends on the moment of the start: run id, OUT, demo input, default engine."""
    run = settings.run or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    changes: dict[str, object] = {"run": run, "out": (settings.out or Path("runs") / run).absolute()}
    if settings.bundle is not None:
        changes["bundle"] = settings.bundle.absolute()
    if settings.bundle is None and not settings.source:
        changes["source"] = DEMO_SOURCE
    if settings.bundle is not None and settings.source:
        raise SettingsError(
            f"bundle = {settings.bundle} and source = {settings.source} are both given; keep the one to train"
        )
    if not settings.engine:
        changes["engine"] = DEMO_ENGINE
    return settings.model_copy(update=changes)


def run_file(out: Path) -> dict[str, Any]:
    """The settings that ``out``'s run was started with; empty if no run was. Raises ``SettingsError`` if unreadable."""
    path = out / "run.json"
    try:
        record = json.loads(path.read_text())
        return dict(record["settings"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}; choose another --out") from None


@contextlib.contextmanager
def claimed(settings: Settings) -> Iterator[Path]:
    """Make OUT ours for the length of the run. Raises ``SettingsError`` if it is somebody's, or holds checkpoints.

    A run that ends for bad input leaves no OUT behind where there was none.
    """
    out = settings.out_dir
    is_new = not out.exists()
    try:
        with _locked(settings, out):
            yield out
    except InputError:
        if is_new:
            shutil.rmtree(out, ignore_errors=True)
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"out = {out} is in use by a living run; choose another --out") from None
        _prepare(settings, out)
        yield
    finally:
        os.close(lock)


def _prepare(settings: Settings, out: Path) -> None:
    strangers = [p.name for p in out.iterdir() if p.name != ".lock"]
    if strangers and not (out / "run.json").exists():
        raise SettingsError(f"out = {out} is not empty and holds no run ({strangers[0]}, ...); choose another --out")
    before = run_file(out).get("run")
    if before:
        sweep(str(before))  # what a kill left in shared memory; the living are left alone
    checkpoints = out / "checkpoints"
    held = [p.name for p in checkpoints.iterdir() if p.name.isdigit()] if checkpoints.is_dir() else []
    if held and not settings.resume:
        raise SettingsError(
            f"out = {out} holds {len(held)} checkpoint{'s' * (len(held) > 1)} of an earlier run; "
            "add --resume to continue it, or choose another --out"
        )
    if settings.resume and not held:
        raise SettingsError(f"--resume: out = {out} holds no checkpoint; start without --resume")
    for role in ("orchestrator", "trainer"):
        failure_path(out, role).unlink(missing_ok=True)
    (out / "summary.json").unlink(missing_ok=True)  # of the run before: this one has to earn its own
    if not settings.resume:
        for name in STALE_ON_FRESH_START:
            (out / name).unlink(missing_ok=True)

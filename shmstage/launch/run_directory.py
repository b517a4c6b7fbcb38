"""``OUT``: whose it is, what lies in it, and what a fresh start may do to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from shmstage.errors import SettingsError
from shmstage.events import failure_path
from shmstage.settings import Settings

#: named by string: the launcher starts the demo without importing it
DEMO_ENGINE = "shmstage.demo.engine:make_engine"
DEMO_SOURCE = "shmstage.demo.source:make_source"
STALE_ON_FRESH_START = ("steps.jsonl", "summary.json", "trainer_calls.jsonl", "orchestrator.log", "trainer.log")


def completed(settings: Settings) -> Settings:
    """Fill in what depends on the moment of the start: run id, OUT, demo input, default engine."""
    run = settings.run or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    changes: dict[str, object] = {"run": run, "out": (settings.out or Path("runs") / run).absolute()}
    if settings.bundle is None and not settings.source:
        changes["source"] = DEMO_SOURCE
    if settings.bundle is not None and settings.source:
        raise SettingsError(
            f"bundle = {settings.bundle} and source = {settings.source} are both given; keep the one to train"
        )
    if not settings.engine:
        changes["engine"] = DEMO_ENGINE
    return settings.model_copy(update=changes)


@contextlib.contextmanager
def claimed(settings: Settings) -> Iterator[Path]:
    """Make OUT ours for the length of the run. Raises ``SettingsError`` if it is somebody's, or holds checkpoints."""
    out = settings.out_dir
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
        yield out
    finally:
        os.close(lock)


def _prepare(settings: Settings, out: Path) -> None:
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
    if not settings.resume:
        for name in STALE_ON_FRESH_START:
            (out / name).unlink(missing_ok=True)

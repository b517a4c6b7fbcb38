"""One run on one host: start orchestrator and trainer, watch them, stop them, say how it went."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from shmstage.errors import (
    InputError,
    PeerLostError,
    RunFailedError,
    ShmstageError,
    StoppedError,
    TrainerError,
)
from shmstage.events import read_failure, write_json
from shmstage.launch.processes import Child
from shmstage.launch.run_directory import claimed
from shmstage.memory.names import list_objects
from shmstage.memory.sweep import sweep
from shmstage.settings import Settings
from shmstage.transport.endpoint_lock import EndpointLock, clear_stale_endpoints
from shmstage.transport.endpoints import endpoint_for, socket_path

POLL_S = 0.1
#: how long one child may take to notice that the other has died, and to say what it knows of it
NOTICE_S = 2.0


class Progress(Protocol):
    """Somebody who wants to know how the run goes."""

    def poll(self) -> None:
        """Called about ten times a second while the run goes on; must not raise."""


def run(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run to the end and return the summary. ``settings`` is complete (``run_directory.completed``).

    Raises what ended the run: ``SettingsError``, ``BudgetError`` and the like for bad input, ``RunFailedError``,
    ``PeerLostError``, ``StoppedError``. No child and no pool outlives the call.
    """
    with claimed(settings) as out, _only_one(settings.run), _stop_signals() as stop:
        began = time.monotonic()
        children: dict[str, Child] = {}
        try:
            for role in ("trainer", "orchestrator"):
                arguments = ["--settings", settings.model_dump_json()]
                children[role] = Child(role, arguments, out / f"{role}.log")
            _write_run_file(out, settings, children)
            _watch(children, progress, stop, settings)
            failure = _failure(out, children)
        except StoppedError as stopped:
            failure = stopped
        finally:
            # the orchestrator first: it applies a deferred update and tells the trainer to end
            for role in ("orchestrator", "trainer"):
                if role in children:
                    children[role].end(settings.stop_grace_s)
            leaked = list_objects(settings.run)
            sweep(settings.run)
            clear_stale_endpoints([socket_path(endpoint_for(settings.run, "trainer"))])
        progress.poll()
        if failure is not None:
            raise failure
        return _complete_summary(out, settings, leaked, time.monotonic() - began)


@contextmanager
def _only_one(run_id: str) -> Iterator[None]:
    """A run id names sockets and pools: two living runs of the same id would talk to each other's processes."""
    lock = EndpointLock(socket_path(endpoint_for(run_id, "launcher")))
    try:
        yield
    finally:
        lock.release()


class _Stop:
    """Set by a signal, looked at by the launcher's loop: nothing is interrupted in the middle, not even clean-up."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def check(self) -> None:
        if self.signal is not None:
            raise StoppedError(f"stopped by {self.signal.name}")


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_run_file(out: Path, settings: Settings, children: dict[str, Child]) -> None:
    write_json(
        out / "run.json",
        {
            "run": settings.run,
            "epoch": 1,
            "pids": {"launcher": os.getpid(), **{role: child.pid for role, child in children.items()}},
            "settings": json.loads(settings.model_dump_json()),
        },
    )


def _watch(children: dict[str, Child], progress: Progress, stop: _Stop, settings: Settings) -> None:
    """Until both children have ended, or the one that is left has had the time it deserves.

    After an orderly end of one the other gets ``stop_grace_s``; after a death ``NOTICE_S``, to say what it knows.
    """
    deadline: float | None = None
    while True:
        codes = [child.exit_code() for child in children.values()]
        ended = [code for code in codes if code is not None]
        if len(ended) == len(codes):
            return
        if InputError.exit_code in ended:
            return  # nothing was begun, so there is nothing that the other one could add
        if ended and deadline is None:
            deadline = time.monotonic() + (settings.stop_grace_s if ended == [0] else NOTICE_S)
        if deadline is not None and time.monotonic() > deadline:
            return
        stop.check()
        progress.poll()
        running = children["orchestrator"] if codes[1] is None else children["trainer"]
        running.wait(POLL_S)


def _failure(out: Path, children: dict[str, Child]) -> ShmstageError | None:
    """Why the run failed, told by whoever knows best: a child's own words beat what its exit code says."""
    told = {role: error for role in children if (error := read_failure(out, role)) is not None}
    for role in ("trainer", "orchestrator"):
        if role in told and not isinstance(told[role], PeerLostError):
            return _with_log(told[role], out, role)
    for role, child in children.items():
        if child.exit_code():
            return told.get(role) or PeerLostError(f"the {role} (pid {child.pid}) {child.describe_end()}")
    for role, child in children.items():
        if child.exit_code() is None:
            return PeerLostError(f"the {role} (pid {child.pid}) did not end when the other one had; see {child.log}")
    return None


def _with_log(error: ShmstageError, out: Path, role: str) -> ShmstageError:
    """Add the log that says more, unless it is bad input (said in full) or a log is named already."""
    if isinstance(error, InputError) or ".log" in str(error):
        return error
    # what a command raised in the trainer, the orchestrator only passes on
    log = out / f"{'trainer' if isinstance(error, TrainerError) else role}.log"
    return type(error)(f"{error}; see {log}")


def _complete_summary(out: Path, settings: Settings, leaked: list[str], wall_s: float) -> dict[str, Any]:
    path = out / "summary.json"
    if not path.exists():
        raise RunFailedError(f"the orchestrator ended without a summary; see {out}/orchestrator.log")
    summary: dict[str, Any] = json.loads(path.read_text())
    summary.update(leaked_pools=len(leaked), leaked=leaked, wall_s=round(wall_s, 3), out=str(out))
    write_json(path, summary)
    return summary

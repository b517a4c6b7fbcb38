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

from shmstage.errors import PeerLostError, RunFailedError, ShmstageError, StoppedError, by_name
from shmstage.events import failure_path, write_json
from shmstage.launch.processes import Child
from shmstage.launch.run_directory import claimed
from shmstage.memory.sweep import list_objects, sweep
from shmstage.settings import Settings

POLL_S = 0.1
#: how long the second child may take to notice the death of the first before it is stopped
NOTICE_S = 2.0


class Progress(Protocol):
    """Somebody who wants to know how the run goes."""

    def poll(self) -> None:
        """Called about ten times a second while the run goes on."""


def run(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run to the end and return the summary. ``settings`` is complete (``run_directory.completed``).

    Raises what ended the run: ``SettingsError``, ``BudgetError`` and the like for bad input, ``RunFailedError``,
    ``PeerLostError``, ``StoppedError``. No child and no pool outlives the call.
    """
    with claimed(settings) as out, _signals_raise():
        began = time.monotonic()
        children: dict[str, Child] = {}
        try:
            for role in ("trainer", "orchestrator"):
                arguments = ["--settings", settings.model_dump_json()]
                children[role] = Child(role, arguments, out / f"{role}.log")
            _write_run_file(out, settings, children)
            _watch(children, progress)
            _settle(children, settings)
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
        progress.poll()
        if failure is not None:
            raise failure
        return _complete_summary(out, settings, leaked, time.monotonic() - began)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT and SIGTERM become ``StoppedError`` in the launcher's loop."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StoppedError(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
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


def _watch(children: dict[str, Child], progress: Progress) -> None:
    """Until one child has ended."""
    while all(child.exit_code() is None for child in children.values()):
        progress.poll()
        # returns at once when the orchestrator ends, which is the ordinary way
        children["orchestrator"].wait(POLL_S)


def _settle(children: dict[str, Child], settings: Settings) -> None:
    """The other child is given time to end by itself: it may know more about what happened."""
    orchestrator, trainer = children["orchestrator"], children["trainer"]
    if orchestrator.exit_code() == 0:
        trainer.wait(settings.stop_grace_s)
    elif orchestrator.exit_code() is None:
        orchestrator.wait(NOTICE_S)
    else:
        trainer.wait(NOTICE_S / 2)


def _failure(out: Path, children: dict[str, Child]) -> ShmstageError | None:
    """Why the run failed, told by whoever knows best: a child's own words beat what its exit code says."""
    told = {role: _told(out, role) for role in children}
    own = {role: error for role, error in told.items() if error is not None and not isinstance(error, PeerLostError)}
    for role in ("trainer", "orchestrator"):
        if role in own:
            return own[role]
    for role in ("trainer", "orchestrator"):
        code = children[role].exit_code()
        if code is not None and code != 0:
            return told[role] or PeerLostError(f"the {role} (pid {children[role].pid}) {children[role].describe_end()}")
    if children["orchestrator"].exit_code() is None:
        return PeerLostError(f"the trainer (pid {children['trainer'].pid}) ended early; see {children['trainer'].log}")
    return None


def _told(out: Path, role: str) -> ShmstageError | None:
    path = failure_path(out, role)
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    cls = by_name().get(record["kind"])
    if cls is None:
        return RunFailedError(f"{record['kind']}: {record['text']}; traceback in {out / role}.log")
    return cls(record["text"])


def _complete_summary(out: Path, settings: Settings, leaked: list[str], wall_s: float) -> dict[str, Any]:
    path = out / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text())
    summary.update(leaked_pools=len(leaked), leaked=leaked, wall_s=round(wall_s, 3), out=str(out))
    write_json(path, summary)
    return summary

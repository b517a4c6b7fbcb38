"""One run on one host: start orchestrator and trainer, keep them going, stop them, say how it went."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, final

from shmstage.budget.check import check_before_start
from shmstage.errors import (
    InputError,
    PeerLostError,
    RunFailedError,
    SettingsError,
    ShmstageError,
    StoppedError,
    TrainerError,
)
from shmstage.launch.keeper import ROLES, ChildProcess, Keeper
from shmstage.launch.metrics_server import Metrics, serving
from shmstage.launch.processes import Child
from shmstage.launch.run_directory import LAUNCHER, claimed, what_is_saved
from shmstage.launch.step_follower import StepFollower
from shmstage.memory.names import owned_objects
from shmstage.memory.sweep import sweep
from shmstage.records import failure_path, read_failure, read_json, write_failure, write_json
from shmstage.settings import Settings
from shmstage.transport.endpoint_lock import EndpointLock, clear_stale_endpoints
from shmstage.transport.endpoints import endpoint_for, socket_path

POLL_S = 0.05


class Progress(Protocol):
    """Somebody who wants to know how the run goes."""

    def poll(self) -> None:
        """Called about twenty times a second while the run goes on; must not raise."""


def run(settings: Settings, progress: Progress, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run to the end and return the summary. ``settings`` is complete (``run_directory.completed``).

    A child that dies is started again (``max_restarts``); ``say`` hears of it. Raises what ended the run:
    ``SettingsError``, ``BudgetError`` and the like for bad input, ``RunFailedError``, ``PeerLostError``,
    ``StoppedError``. No child and no pool outlives the call.
    """
    with only_one(settings.run), serving(settings, say) as metrics, claimed(settings) as out, stop_signals() as stop:
        metrics.begin()
        check_before_start(settings)  # what an earlier start of the run left is gone by now
        began = time.monotonic()
        host = _Host(settings, out, say, metrics)
        keeper = Keeper(
            host, max_restarts=settings.max_restarts, backoff_s=settings.restart_backoff_s,
            grace_s=settings.stop_grace_s, clock=time.monotonic,
        )  # fmt: skip
        failure: ShmstageError | None
        stopped: StoppedError | None = None
        try:
            keeper.begin()
            while not keeper.look():
                stop.check()
                progress.poll()
                metrics.poll()
                _wait_for_any(keeper.children)
            failure = failure_of(out, keeper.children, keeper.failure)
        except StoppedError as error:
            failure = stopped = error
        finally:
            keeper.end()
            left = owned_objects(settings.run)
            sweep(settings.run)
            # who was killed could not tidy up; that is what the sweep is for
            leaked = owned_objects(settings.run) if keeper.anyone_died else left
            clear_stale_endpoints([socket_path(endpoint_for(settings.run, "trainer"))])
        progress.poll()
        if stopped is not None:  # only now have the children saved what they could
            failure = StoppedError(f"{stopped}; {what_is_saved(out, 'shmstage run')}")
        if keeper.is_done:
            failure = host.complaint()
        if failure is not None:
            write_failure(out, LAUNCHER, failure)  # for ``status``: what the children say may be a part of it only
            raise failure
        return complete_summary(out, keeper.restarts, leaked, time.monotonic() - began)


@final
class _Host:
    """What the keeper acts on: real processes, real files."""

    def __init__(self, settings: Settings, out: Path, say: Callable[[str], None], metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._out = out
        self._follower = StepFollower(out / "steps.jsonl")
        self._reached = 0
        self._pids: dict[str, int] = {}
        self.say = say
        try:
            self._write_run_file({}, 1, dict.fromkeys(ROLES, 0))  # the children read their settings from it
        except OSError as error:
            raise SettingsError(f"{out}/run.json: {error.strerror}; choose another --out") from None

    def start(self, role: str, epoch: int) -> ChildProcess:
        failure_path(self._out, role).unlink(missing_ok=True)
        arguments = ["--settings-file", str(self._out / "run.json"), "--epoch", str(epoch)]
        try:
            child = Child(role, arguments, self._out / f"{role}.log")
        except OSError as error:
            raise RunFailedError(f"the {role} cannot be started: {error}") from None
        self._pids[role] = child.pid
        return child

    def told(self, role: str) -> ShmstageError | None:
        return read_failure(self._out, role, self._pids.get(role))

    def complaint(self) -> ShmstageError | None:
        """What a child said on its way out, when all there was to do is done."""
        told = [error for role in ROLES if (error := self.told(role)) is not None]
        return next((error for error in told if not isinstance(error, PeerLostError)), None)

    def is_complete(self) -> bool:
        return (self._out / "summary.json").exists()

    def reached(self) -> int:
        with suppress(ValueError, OSError):
            self._reached = max([self._reached, *(int(line["step"]) for line in self._follower.new())])
        return self._reached

    def changed(self, keeper: Keeper) -> None:
        self._metrics.children(keeper.pids, keeper.epoch, keeper.restarts)
        try:
            self._write_run_file(keeper.pids, keeper.epoch, keeper.restarts)
        except OSError as error:  # a full disk ends nothing that can go on without it
            self.say(f"{self._out}/run.json was not written: {error.strerror}")

    def _write_run_file(self, pids: Mapping[str, int | None], epoch: int, restarts: Mapping[str, int]) -> None:
        record = {
            "run": self._settings.run,
            "epoch": epoch,
            "pids": {"launcher": os.getpid(), **pids},
            "restarts": dict(restarts),
            "metrics": self._metrics.address,
            "settings": json.loads(self._settings.model_dump_json()),
        }
        write_json(self._out / "run.json", record, mode=0o600)  # settings of plug-ins may be nobody else's business


@contextmanager
def only_one(run_id: str) -> Iterator[None]:
    """A run id names sockets and pools: two living runs of the same id would talk to each other's processes."""
    lock = EndpointLock(socket_path(endpoint_for(run_id, "launcher")))
    try:
        yield
    finally:
        lock.release()


class Stop:
    """Set by a signal, looked at by the launcher's loop: nothing is interrupted in the middle, not even clean-up."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)

    def check(self) -> None:
        if self.signal is not None:
            raise StoppedError(f"stopped by {self.signal.name}")


@contextmanager
def stop_signals() -> Iterator[Stop]:
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_any(children: Mapping[str, ChildProcess]) -> None:
    """A moment, or until a child that is waited for ends."""
    for child in children.values():
        if child.exit_code() is None and isinstance(child, Child):
            child.wait(POLL_S)
            return
    threading.Event().wait(POLL_S)


def failure_of(out: Path, children: Mapping[str, ChildProcess], given_up: ShmstageError | None) -> ShmstageError | None:
    """Why the run failed, told by whoever knows best: a child's own words beat what its exit code says."""
    pids = {role: child.pid for role, child in children.items()}
    told = {role: error for role in ROLES if (error := read_failure(out, role, pids.get(role))) is not None}
    for role in ROLES:
        if role in told and not isinstance(told[role], PeerLostError):
            return with_log(told[role], out, role)
    if given_up is not None:
        return given_up
    for role, child in children.items():
        if child.exit_code():
            return told.get(role) or PeerLostError(f"the {role} (pid {child.pid}) {child.describe_end()}")
    return None


def with_log(error: ShmstageError, out: Path, role: str) -> ShmstageError:
    """Add the log that says more, unless it is bad input (said in full) or a log is named already."""
    if isinstance(error, InputError) or ".log" in str(error):
        return error
    # what a command raised in the trainer, the orchestrator only passes on
    log = out / f"{'trainer' if isinstance(error, TrainerError) else role}.log"
    return type(error)(f"{error}; see {log}")


def complete_summary(out: Path, restarts: Mapping[str, int], leaked: list[str], wall_s: float) -> dict[str, Any]:
    """What the orchestrator wrote and what only the launcher knows. Raises ``RunFailedError`` if there is nothing."""
    path = out / "summary.json"
    try:
        summary = read_json(path)
    except FileNotFoundError:
        raise RunFailedError(f"the orchestrator ended without a summary; see {out}/orchestrator.log") from None
    except SettingsError as error:
        raise RunFailedError(f"{error}; see {out}/orchestrator.log") from None
    summary.update(leaked_pools=len(leaked), leaked=leaked, wall_s=round(wall_s, 3), out=str(out))
    summary["restarts"] = dict(restarts)
    write_json(path, summary)
    return summary

"""One run on several hosts: a gang of trainers, agents and an orchestrator, attempt after attempt, and its summary."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from shmstage.errors import InputError, PeerLostError, SettingsError, ShmstageError, StoppedError, TrainerError
from shmstage.launch.cluster import Cluster, cluster, need_ray
from shmstage.launch.fleet import Fleet, GangBrokenError
from shmstage.launch.gang import Again, Ended, Gang, Over, Verdict
from shmstage.launch.host_environment import forwarded
from shmstage.launch.metrics_server import Metrics, serving
from shmstage.launch.processes import Child
from shmstage.launch.run_directory import LAUNCHER, RAY_LOG, claimed, what_is_saved
from shmstage.launch.single_host import Progress, Stop, complete_summary, only_one, stop_signals
from shmstage.launch.step_follower import StepFollower
from shmstage.launch.supervisor import ending_of
from shmstage.launch.watchdog import HANG_S, Watchdog
from shmstage.memory.identity import namespace_word
from shmstage.memory.names import owned_objects
from shmstage.memory.sweep import sweep
from shmstage.records import failure_path, read_failure, write_failure, write_json
from shmstage.settings import Settings
from shmstage.transport.curve import CurveKeys, new_keys
from shmstage.transport.endpoints import runtime_dir
from shmstage.transport.peers_file import HostPeers, HostsFile, write_hosts_file

ORCHESTRATOR = "orchestrator"
#: how long trainers may take to leave after an orchestrator that told them to
LEAVE_S = 15.0
#: how long those that are left of a broken gang may take to stop
BROKEN_GRACE_S = 2.0
POLL_S = 0.05


def launch(
    settings: Settings,
    hosts: int | None,
    address: str | None,
    progress: Progress,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run to the end on ``hosts`` hosts and return the summary. ``settings`` is complete (``run_directory.completed``).

    ``address``: of a Ray cluster; ``None``: a local one is made. ``hosts`` ``None``: as many as the cluster has nodes,
    2 of a local one. Raises what ``single_host.run`` raises, and ``MissingExtraError`` without Ray. Whatever was
    started is gone afterwards, and nothing is left in shared memory of a host that can be reached.
    """
    if settings.record is not None:
        raise SettingsError(
            f"record = {settings.record}: launch does not record, trajectories never come to its orchestrator; record "
            "with `shmstage run`"
        )
    need_ray()
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_one(settings.run))
        metrics = stack.enter_context(serving(settings, say))
        out = stack.enter_context(claimed(settings))
        stack.enter_context(_rays_words(out))
        stop = stack.enter_context(stop_signals())  # first: nobody may be cut off while raylets are started
        rays = stack.enter_context(cluster(address, hosts))
        metrics.begin()
        began = time.monotonic()
        nonce = stack.enter_context(_nonce(out))
        run = _Launch(settings, out, rays, nonce, stop, progress, metrics, say)
        run.watchdog = stack.enter_context(Watchdog(lambda: _end_hung(settings, out, rays, run)))
        failure: ShmstageError | None
        stopped: StoppedError | None = None
        leaked: set[str] = set()
        try:
            failure = run.to_the_end()
        except (StoppedError, KeyboardInterrupt) as error:
            failure = stopped = error if isinstance(error, StoppedError) else StoppedError("stopped by SIGINT")
        except ShmstageError as error:
            failure = error
        finally:
            leaked = run.close()
        progress.poll()
        if stopped is not None:  # only now have the trainers saved what they could
            failure = StoppedError(f"{stopped}; {what_is_saved(out, _command(hosts, address))}")
        if failure is not None:
            write_failure(out, LAUNCHER, failure)
            raise failure
        return complete_summary(out, run.gang.restarts, sorted(leaked), time.monotonic() - began)


def _command(hosts: int | None, address: str | None) -> str:
    """What started this launch, but for the settings: OUT keeps those."""
    where = "--local-cluster" if address is None else f"--address {shlex.quote(address)}"
    return f"shmstage launch {where}" + (f" --hosts {hosts}" if hosts is not None else "")


@contextlib.contextmanager
def _rays_words(out: Path) -> Iterator[None]:
    """Ray prints what its raylets tell to standard output, which is for the summary: it goes to a file of its own."""
    try:
        log = (out / RAY_LOG).open("a", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{out / RAY_LOG}: {error.strerror}; choose another --out") from None
    with log, contextlib.redirect_stdout(log):
        yield


@contextlib.contextmanager
def _nonce(out: Path) -> Iterator[tuple[str, str]]:
    """Name and content of a file in OUT: a host that finds it there shares the file system."""
    name, content = f".shared-{secrets.token_hex(8)}", secrets.token_hex(16)
    path = out / name
    try:
        path.write_text(content)
    except OSError as error:
        raise SettingsError(f"out = {out}: {error.strerror}; choose another --out") from None
    try:
        yield name, content
    finally:
        path.unlink(missing_ok=True)


def _end_hung(settings: Settings, out: Path, rays: Cluster, run: _Launch) -> None:
    """On the watchdog's thread. Ray ends the actors of a launcher that is gone, and they their trainers."""
    error = PeerLostError(
        f"the launcher waited {HANG_S:g} s inside Ray: the raylet of its own host is dead, or the head of the cluster; "
        f"start Ray again, then --resume; see {out / RAY_LOG}"
    )
    try:
        sys.stderr.write(f"{error}\n")
        write_failure(out, LAUNCHER, error)
        run.kill_orchestrator()
        rays.kill_local()
        sweep(settings.run)
    finally:
        os._exit(error.exit_code)


@final
class _Launch:
    """The attempts of one launch."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        rays: Cluster,
        nonce: tuple[str, str],
        stop: Stop,
        progress: Progress,
        metrics: Metrics,
        say: Callable[[str], None],
    ) -> None:
        self.gang = Gang(max_restarts=settings.max_restarts, backoff_s=settings.restart_backoff_s)
        self._settings = settings
        self._out = out
        self._cluster = rays
        self._stop = stop
        self._progress = progress
        self._metrics = metrics
        self._say = say
        self._keys: CurveKeys = new_keys()
        self._epoch = 0
        self._follower = StepFollower(out / "steps.jsonl")
        self._reached = 0
        self._orchestrator: Child | None = None
        self._orchestrator_noted = False
        self.watchdog: Watchdog | None = None
        given = forwarded(os.environ)
        self._fleet = Fleet(rays, settings, rays.hosts, client_key=self._keys.public, nonce=nonce, given=given)

    def to_the_end(self) -> ShmstageError | None:
        """Attempt after attempt until one is the last; why it failed, if it did."""
        try:
            self._write_run_file()
        except OSError as error:
            raise SettingsError(f"{self._out}/run.json: {error.strerror}; choose another --out") from None
        self._cluster.place(self._settings.start_timeout_s, self._look, self._say)
        while True:
            self._epoch += 1
            verdict = self._attempt()
            if isinstance(verdict, Over):
                return self._explained(verdict.failure)
            number, limit = verdict.restart.number, self.gang.limit
            self._say(f"{verdict.cause.describe()}; restarting all from the last checkpoint, {number} of {limit}")
            while time.monotonic() < verdict.restart.at_s:
                self._look()
                time.sleep(POLL_S)

    def close(self) -> set[str]:
        """End what is left; what lies in shared memory of any host after that."""
        self._end_attempt(0.0, BROKEN_GRACE_S)
        anyone_died = self.gang.anyone_died
        leaked = self._fleet.left_over(sweep=anyone_died)
        here = owned_objects(self._settings.run)
        sweep(self._settings.run)
        leaked |= set(owned_objects(self._settings.run) if anyone_died else here)
        self._fleet.close()
        self._cluster.close()
        return leaked

    # --- one attempt -------------------------------------------------------------------------------------------

    def _attempt(self) -> Again | Over:
        self.gang.begin()
        self._orchestrator, self._orchestrator_noted = None, False
        patience_s, grace_s = 0.0, BROKEN_GRACE_S
        try:
            with contextlib.ExitStack() as stack:
                try:
                    self._fleet.start_agents(self._epoch, self._look)
                    peers = self._fleet.start_trainers(self._look)
                    self._start_orchestrator(stack.enter_context(self._hosts_file(peers)))
                except GangBrokenError as broken:
                    for ended in broken.ended:
                        self.gang.note(ended)
                verdict = self._verdict()
                while verdict is None:
                    self._look()
                    self._fleet.wait(POLL_S)
                    for ended in self._ended():
                        self.gang.note(ended)
                    verdict = self._verdict()
            if isinstance(verdict, Over) and verdict.failure is None:
                patience_s, grace_s = LEAVE_S, self._settings.stop_grace_s
            return verdict
        except StoppedError:
            # in good order: a deferred update is applied, and trainers are told to end
            patience_s, grace_s = LEAVE_S, self._settings.stop_grace_s
            raise
        finally:
            self._end_attempt(patience_s, grace_s)

    def _start_orchestrator(self, hosts_file: Path) -> None:
        failure_path(self._out, ORCHESTRATOR).unlink(missing_ok=True)
        files = ["--settings-file", str(self._out / "run.json"), "--peers-file", str(hosts_file)]
        # it knows no Ray, and nothing that opens a cluster
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        arguments = [*files, "--epoch", str(self._epoch)]
        log = self._out / f"{ORCHESTRATOR}.log"
        self._orchestrator = Child(ORCHESTRATOR, arguments, log, environment=environment)
        self._changed()

    @contextlib.contextmanager
    def _hosts_file(self, peers: list[HostPeers]) -> Iterator[Path]:
        """Where everybody is, with the orchestrator's key, for its eyes only."""
        path = runtime_dir() / f"hosts-{secrets.token_hex(8)}.json"
        try:
            write_hosts_file(path, HostsFile(hosts=peers, client=self._keys))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _end_attempt(self, patience_s: float, grace_s: float) -> None:
        if self._orchestrator is not None:
            self._orchestrator.end(grace_s)  # the first to end: it tells the trainers
        self._fleet.end(patience_s if self._orchestrator is not None else 0.0, grace_s)
        self._orchestrator = None

    # --- looking -----------------------------------------------------------------------------------------------

    def kill_orchestrator(self) -> None:
        """From any thread: there is nobody to end it in good order."""
        if self._orchestrator is not None:
            self._orchestrator.end(0.0)

    def _look(self) -> None:
        if self.watchdog is not None:
            self.watchdog.beat()
        self._stop.check()
        self._progress.poll()
        self._metrics.poll()

    def _ended(self) -> list[Ended]:
        found = self._fleet.poll()
        child = self._orchestrator
        code = child.exit_code() if child is not None else None
        if child is not None and code is not None and not self._orchestrator_noted:
            self._orchestrator_noted = True
            told = read_failure(self._out, ORCHESTRATOR, child.pid)
            found.append(
                Ended(
                    ORCHESTRATOR, "", child.describe_end(), ending_of(code, told), time.monotonic(), pid=child.pid,
                    told=told, exit_code=code,
                )
            )  # fmt: skip
        return found

    def _verdict(self) -> Verdict:
        with suppress(ValueError, OSError):
            self._reached = max([self._reached, *(int(line["step"]) for line in self._follower.new())])
        complete = (self._out / "summary.json").exists()
        return self.gang.judge(time.monotonic(), self._reached, is_complete=complete)

    def _explained(self, failure: ShmstageError | None) -> ShmstageError | None:
        """With the log to look at, unless it is said in full."""
        if failure is None or isinstance(failure, InputError | PeerLostError) or ".log" in str(failure):
            return failure
        where = "trainer.log and hosts/*/trainer.log" if isinstance(failure, TrainerError) else "orchestrator.log"
        return type(failure)(f"{failure}; see {self._out}/{where}")

    def _changed(self) -> None:
        pids = self._pids()
        self._metrics.children(pids, self._epoch, self.gang.restarts)
        try:
            self._write_run_file()
        except OSError as error:  # a full disk ends nothing that can go on without it
            self._say(f"{self._out}/run.json was not written: {error.strerror}")

    def _pids(self) -> dict[str, int | None]:
        orchestrator = self._orchestrator.pid if self._orchestrator is not None else None
        return {"trainer": self._fleet.pid_here("trainer", namespace_word()), ORCHESTRATOR: orchestrator}

    def _write_run_file(self) -> None:
        record = {
            "run": self._settings.run,
            "epoch": max(1, self._epoch),
            "pids": {"launcher": os.getpid(), **self._pids()},
            "restarts": self.gang.restarts,
            "metrics": self._metrics.address,
            "hosts": self._fleet.records,
            "settings": json.loads(self._settings.model_dump_json()),
        }
        write_json(self._out / "run.json", record, mode=0o600)

"""The trainer of one host, a child of its agent: started with keys of its own, watched, ended, cleaned up after."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shmstage.errors import SettingsError, ShmstageError
from shmstage.launch.processes import Child
from shmstage.memory.identity import read_start_ticks
from shmstage.memory.names import run_hash
from shmstage.records import failure_path, read_failure, read_json
from shmstage.transport.curve import new_keys
from shmstage.transport.endpoints import runtime_dir
from shmstage.transport.peers_file import Door, HostFile, write_host_file

ROLE = "trainer"


@final
@dataclass(frozen=True, slots=True)
class TrainerState:
    """How the trainer is. ``exit_code`` ``None``: it runs. ``told``: what it left as the reason of its end."""

    pid: int
    start_ticks: int
    door: Door | None
    exit_code: int | None = None
    how_it_ended: str = ""
    told: ShmstageError | None = None


@final
class HostTrainer:
    """One trainer process. ``state`` may be asked by any thread; ``ended`` is set as soon as it has ended."""

    def __init__(
        self,
        run: str,
        run_file: Path,
        *,
        rank: int,
        hosts: int,
        name: str,
        epoch: int,
        coordinator: str,
        bind: str,
        allowed: list[str],
        directory: Path,
        environment: Mapping[str, str],
    ) -> None:
        """Starts it. Raises ``SettingsError`` if its directory or its log cannot be made."""
        self.ended = threading.Event()
        self._directory = directory
        self._keys = new_keys()
        tag = f"{_tag(run, rank)}-{secrets.token_hex(6)}"
        self._peers_file = runtime_dir() / f"trainer-{tag}.json"
        self._endpoint_file = runtime_dir() / f"endpoint-{tag}.json"
        self._door: Door | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            failure_path(directory, ROLE).unlink(missing_ok=True)
            write_host_file(
                self._peers_file,
                HostFile(
                    rank=rank, hosts=hosts, name=name, coordinator=coordinator, bind=bind, keys=self._keys,
                    allowed=allowed, directory=str(directory), endpoint_file=str(self._endpoint_file),
                ),
            )  # fmt: skip
            arguments = [
                "--settings-file", str(run_file), "--epoch", str(epoch), "--peers-file", str(self._peers_file),
            ]  # fmt: skip
            with _signals_open():
                self._child = Child(ROLE, arguments, directory / f"{ROLE}.log", environment=environment)
        except SettingsError:
            self._remove_files()
            raise
        except OSError as error:
            self._remove_files()
            raise SettingsError(f"{name}: the trainer cannot be started in {directory}: {error.strerror}") from None
        self._start_ticks = read_start_ticks(self._child.pid)
        _judge_as(self._child.pid, os.getppid())
        threading.Thread(target=self._watch, name="trainer watch", daemon=True).start()

    def state(self) -> TrainerState:
        """Its door once it has bound it; how and why it ended once it has."""
        code = self._child.exit_code()
        if code is None:
            return TrainerState(self._child.pid, self._start_ticks, self._bound())
        told = read_failure(self._directory, ROLE, self._child.pid)
        return TrainerState(self._child.pid, self._start_ticks, self._door, code, self._child.describe_end(), told)

    def lost(self) -> str | None:
        """In words why it is no more; ``None`` while it runs."""
        if self._child.exit_code() is None:
            return None
        return f"the trainer (pid {self._child.pid}) {self._child.how_it_ended()}"

    def end(self, patience_s: float, grace_s: float) -> None:
        """Wait ``patience_s`` for it to end by itself, then interrupt it, and kill it after ``grace_s`` more."""
        if patience_s > 0:
            self._child.wait(patience_s)
        self._child.end(grace_s)
        self._remove_files()

    def _bound(self) -> Door | None:
        if self._door is None:
            with contextlib.suppress(FileNotFoundError):
                found = read_json(self._endpoint_file, "start anew")
                if found.get("pid") == self._child.pid:
                    self._door = Door(str(found["endpoint"]), self._keys.public)
                    self._remove_files()  # read by now: a secret lies about no longer than it must
        return self._door

    def _watch(self) -> None:
        while self._child.wait(3600.0) is None:
            pass
        self.ended.set()

    def _remove_files(self) -> None:
        for file in (self._peers_file, self._endpoint_file):
            file.unlink(missing_ok=True)


def remove_left_files(run: str, rank: int) -> None:
    """What an agent of this host that was killed could not remove; its trainer is dead, too."""
    for file in runtime_dir().glob(f"*-{_tag(run, rank)}-*.json"):
        file.unlink(missing_ok=True)


def _tag(run: str, rank: int) -> str:
    return f"{run_hash(run)}-{rank}"


@contextlib.contextmanager
def _signals_open() -> Iterator[None]:
    """Ray blocks SIGINT in its workers, and a child inherits what its parent's thread has blocked."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _judge_as(pid: int, model: int) -> None:
    """Ray offers its workers to the kernel as the first to be killed for memory, and as the last to run.

    The trainer is no such thing: as far as this user may, it is treated as the raylet itself.
    """
    with contextlib.suppress(OSError):
        score = Path(f"/proc/{model}/oom_score_adj").read_text()
        Path(f"/proc/{pid}/oom_score_adj").write_text(score)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, model))

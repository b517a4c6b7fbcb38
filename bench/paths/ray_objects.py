"""Ray: the dict of arrays is put, an actor on the same node gets it (views of the object store)."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path as FilePath
from typing import Any

import ray

from paths import Path
from paths.ends import DEADLINE_S, Arrays
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from paths.peer import received
from shmstage.memory.layout import Layout

#: Ray takes no smaller object store
_LEAST_STORE_NBYTES = 80 << 20
#: memory once touched stays with the object store: from here on the cluster is started anew for each round
_KEPT_UP_TO_NBYTES = 1_500_000_000


class Peer:
    """A local cluster of one core with one actor, started on first use."""

    def __init__(self, path: Path, largest_nbytes: int) -> None:
        self.name = path.name
        self._store_nbytes = max(int(2.2 * largest_nbytes), _LEAST_STORE_NBYTES)
        self._directory = ""
        self._actor: Any = None
        self._pids: list[int] = []
        self._layout: Layout | None = None
        self._answer: Any = None

    def begin(self) -> None:
        if self._actor is not None:
            return
        self._directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets lie below it
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._start()
        except Exception:  # Ray gives its own processes 30 s, which is little on a busy machine
            ray.shutdown()
            self._start()
        finally:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own there
        self._actor = ray.remote(Actor).options(num_cpus=0).remote()
        self._pids = [ray.get(self._actor.pid.remote(), timeout=DEADLINE_S), *_raylets()]

    def _start(self) -> None:
        ray.init(
            num_cpus=1, object_store_memory=self._store_nbytes, include_dashboard=False, log_to_driver=False,
            logging_level=logging.ERROR, _temp_dir=self._directory,
        )  # fmt: skip

    def pids(self) -> list[int]:
        """The actor's and the raylet's, which holds the object store."""
        return self._pids

    def open(self, layout: Layout, said: Any) -> None:
        self.begin()
        self._layout = layout

    def take(self, ref: Any) -> None:
        self._answer = self._actor.take.remote([ref])  # in a list: the actor gets the reference, not the value

    def expect(self) -> None:
        """An actor always waits for calls."""

    def report(self) -> dict[str, Any]:
        answer, self._answer = self._answer, None
        return dict(ray.get(answer, timeout=DEADLINE_S))

    def close(self) -> None:
        if self._layout is not None and self._layout.payload_nbytes > _KEPT_UP_TO_NBYTES:
            self.stop()

    def stop(self) -> None:
        self._actor = self._answer = None
        try:
            if ray.is_initialized():
                ray.shutdown()
        finally:
            if self._directory:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = ""


class Actor:
    def pid(self) -> int:
        return os.getpid()

    def take(self, refs: list[Any]) -> dict[str, Any]:
        return received(Receiver(refs[0]))


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: Any, peer: Peer) -> None:
        self._views = layout.views(private, 0)
        self._peer = peer

    def said(self) -> None:
        return None

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        return self._views, True

    def send(self) -> None:
        self._peer.take(ray.put(self._views))

    def close(self) -> None:
        pass


class Receiver(ReceiverEnd):
    """Lives for one micro-batch: what arrives is the call's argument."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def receive(self) -> tuple[Arrays, int]:
        arrays = ray.get(self._ref, timeout=DEADLINE_S)
        return arrays, time.monotonic_ns()

    def release(self) -> None:
        self._ref = None

    def close(self) -> None:
        pass


def _raylets() -> list[int]:
    """Of this process."""
    children = [each for task in FilePath("/proc/self/task").iterdir() for each in _read(task / "children").split()]
    return [int(pid) for pid in children if _read(FilePath("/proc", pid, "comm")).strip() == "raylet"]


def _read(path: FilePath) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

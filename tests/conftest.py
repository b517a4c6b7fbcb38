"""What every test owes: nothing of it survives in /dev/shm, in the runtime directory, as a thread or as a process."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SHM = Path("/dev/shm")
TESTS = Path(__file__).parent
LONG = ("multihost/", "ecosystem/", "test_bench")
# where the tests are started in the background the shell has SIGINT ignored, and so would every child of theirs
signal.signal(signal.SIGINT, signal.default_int_handler)
#: threads of libraries that live as long as the process; none of them is ours
FOREIGN_THREADS = ("pytest_timeout", "ThreadPoolExecutor", "asyncio", "metadata_store", "execnet", "base_pytree")


def shared_memory_objects() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith("shmstage.")}


def own_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.name.startswith(FOREIGN_THREADS) and t.is_alive()}


def child_pids() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes each go first: at the end one worker would sit in them while the others have nothing."""
    items.sort(key=lambda item: not str(item.path.relative_to(TESTS)).startswith(LONG))


@pytest.fixture(autouse=True)
def nothing_survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fails a test that leaves a pool, a lock file, a socket, a thread or a process behind."""
    # a runtime directory of the test's own, with a path short enough for sockets to live in it
    runtime = Path(tempfile.mkdtemp(prefix="rt"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    before_shm, before_threads, before_children = shared_memory_objects(), own_threads(), child_pids()
    yield runtime
    left = [f"/dev/shm/{name}" for name in _leaked(before_shm)]
    left += [f"file {p}" for p in runtime.rglob("*") if not p.is_dir()]
    shutil.rmtree(runtime, ignore_errors=True)
    left += [f"thread {t.name}" for t in own_threads() - before_threads if not _ends(t)]
    left += [f"process {pid}" for pid in child_pids() - before_children if not _is_helper(pid)]
    assert not left, f"left behind: {', '.join(left)}"


def _ends(thread: threading.Thread) -> bool:
    # a thread that was told to stop may still be on its way out
    thread.join(2.0)
    return not thread.is_alive()


def _is_helper(pid: int) -> bool:
    try:
        return "resource_tracker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return True


def _leaked(before: set[str]) -> set[str]:
    """What is new and stays. What another test worker's or run's children left is swept there, within its test."""
    deadline = time.monotonic() + 30.0
    while True:
        left = {name for name in shared_memory_objects() - before if not _is_held_elsewhere(name)}
        if not left or time.monotonic() >= deadline:
            return left
        threading.Event().wait(0.1)


def _is_held_elsewhere(name: str) -> bool:
    """Whether a process other than this one maps or has open what is called so: under xdist that is no leak."""
    path = str(SHM / name)
    for process in psutil.process_iter(["pid"]):
        if process.pid == os.getpid():
            continue
        try:
            if any(path in m.path for m in process.memory_maps()) or any(f.path == path for f in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue
    return not (SHM / name).exists()

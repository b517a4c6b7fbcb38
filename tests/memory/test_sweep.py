"""What a sweep takes and what it leaves, in one process; killed owners are in test_processes."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator

import pytest
from pool_making import LAYOUT, RUN, Ends
from skipping import skip_unless_ci

from shmstage.memory import sweep as sweep_module
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import SweepReport, list_objects, sweep, sweep_with_reasons


@pytest.fixture
def leave_file() -> Iterator[Callable[..., str]]:
    paths: list[str] = []

    def leave(name: str, content: bytes = b"") -> str:
        paths.append(os.path.join(SHM_DIR, name))
        with open(paths[-1], "wb") as file:
            file.write(content)
        return name

    yield leave
    for path in paths:
        if os.path.lexists(path):
            os.unlink(path)


def test_an_abandoned_lock_and_a_half_made_pool_are_swept(leave_file: Callable[..., str]) -> None:
    """S11"""
    lock, empty, short = new_name(RUN) + LOCK_SUFFIX, new_name(RUN), new_name(RUN)
    for name, content in ((lock, b""), (empty, b""), (short, b"\0" * 5000)):
        leave_file(name, content)
    swept = {one.name: one.reason for one in sweep(RUN)}
    assert swept.keys() == {lock, empty, short}
    assert swept[empty] == swept[short] == "half made, and nobody is making it"
    assert sweep(RUN) == []


def test_what_someone_is_making_or_sweeping_right_now_is_skipped(leave_file: Callable[..., str]) -> None:
    name = leave_file(new_name(RUN))
    with open(os.path.join(SHM_DIR, name), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(RUN) == []
    assert [one.name for one in sweep(RUN)] == [name]


def test_foreign_names_links_and_directories_are_left_alone(leave_file: Callable[..., str]) -> None:
    """S1, S7"""
    theirs = leave_file("psm_shmstage_test")
    target = leave_file("shmstage_test_target")
    link = new_name(RUN)
    os.symlink(os.path.join(SHM_DIR, target), os.path.join(SHM_DIR, link))
    directory = os.path.join(SHM_DIR, new_name(RUN))
    os.mkdir(directory)
    try:
        assert sweep(RUN) == []
        assert theirs in os.listdir(SHM_DIR) and target in os.listdir(SHM_DIR)
    finally:
        os.unlink(os.path.join(SHM_DIR, link))
        os.rmdir(directory)


def test_another_users_file_is_skipped_not_fatal(
    leave_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S39"""
    name = leave_file(new_name(RUN))
    os_open = os.open

    def refused(path: str, *more: int) -> int:
        if path.endswith(name):
            raise PermissionError(13, "Permission denied")
        return os_open(path, *more)

    monkeypatch.setattr(os, "open", refused)
    assert sweep(RUN) == []
    monkeypatch.undo()
    if os.getuid():
        skip_unless_ci("giving a file to another user needs root")
    os.chown(os.path.join(SHM_DIR, name), 54321, -1)
    assert sweep(RUN) == []  # a name may say anything; the file's owner decides


def test_a_sweep_of_one_run_leaves_other_runs_alone(leave_file: Callable[..., str]) -> None:
    """S7"""
    other = leave_file(new_name(RUN + "-other"))
    assert sweep(RUN) == []
    assert list_objects(RUN) == [] and list_objects(RUN + "-other") == [other]
    assert [one.name for one in sweep(RUN + "-other")] == [other]


def test_the_pool_of_a_living_process_survives_the_loss_of_its_lock_file(ends: Ends) -> None:
    # A tidy-up script removed it. The process in the header still runs, so its death is not proven.
    os.unlink(ends.reader.owner.lock_path)
    assert sweep(RUN) == []
    assert list_objects(RUN) == [ends.pool.name[1:]]


def test_a_pool_that_outlived_its_identity_in_another_life_is_swept(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S42"""
    monkeypatch.setattr(identity, "start_ticks", identity.start_ticks + 1)  # this pid, but an earlier process
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    assert sweep(RUN) == []
    identity.close()
    assert [one.name for one in sweep(RUN)] == [pool.name[1:]]
    pool.close()


def test_a_fifo_with_our_name_does_not_hang_the_sweep() -> None:
    name = new_name(RUN)
    path = os.path.join(SHM_DIR, name)
    os.mkfifo(path)
    try:
        assert name not in [item.name for item in sweep(RUN)]
    finally:
        os.unlink(path)


@pytest.mark.parametrize("word", [0, 12345])
def test_a_pid_from_who_knows_where_proves_no_death_once_the_lock_is_gone(ends: Ends, word: int) -> None:
    """S43: here nobody has that pid; but is it a pid of here?"""
    with open(SHM_DIR + ends.pool.name, "r+b") as file:
        here = os.pread(file.fileno(), 8, 88)
        os.pwrite(file.fileno(), struct.pack("<I", (1 << 22) + 1), 72)
        os.pwrite(file.fileno(), struct.pack("<Q", word), 88)
        os.unlink(ends.reader.owner.lock_path)
        assert sweep(RUN) == [] and list_objects(RUN) == [ends.pool.name[1:]]
        os.pwrite(file.fileno(), here, 88)
    assert [one.name for one in sweep(RUN)] == [ends.pool.name[1:]]


@pytest.fixture
def while_judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """while_judged(act): ``act`` happens between a sweep's judgement of a pool and what the sweep does about it."""

    def arrange(act: Callable[[], object]) -> None:
        judge = sweep_module._judge_pool

        def slow(descriptor: int) -> tuple[bool, str]:
            verdict = judge(descriptor)
            act()
            return verdict

        monkeypatch.setattr(sweep_module, "_judge_pool", slow)

    return arrange


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_owner_that_ends_in_order_while_it_is_judged_has_left_nothing(
    leave_file: Callable[..., str], while_judged: Callable[[Callable[[], object]], None], dry_run: bool
) -> None:
    """S7: its pool is gone before its lock is, so that a sweep may find it dead and the pool removed."""
    name = leave_file(new_name(RUN))
    while_judged(lambda: os.unlink(os.path.join(SHM_DIR, name)))
    assert sweep_with_reasons(RUN, dry_run=dry_run) == SweepReport((), ())


def test_what_is_dead_and_cannot_be_removed_is_left_alone_with_the_reason(
    leave_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, goes = (leave_file(name) for name in sorted(new_name(RUN) for _ in range(2)))
    unlink = os.unlink

    def refused(path: str) -> None:
        if path.endswith(stays):
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refused)
        report = sweep_with_reasons(RUN)
    assert [(left.name, left.reason) for left in report.left_alone] == [
        (stays, "cannot be removed: Operation not permitted")
    ]
    assert [swept.name for swept in report.removed] == [goes]


def test_what_lost_its_name_before_it_was_locked_is_not_judged(
    leave_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: two sweeps at once: the second has opened what the first removes."""
    name = leave_file(new_name(RUN))
    flock = fcntl.flock

    def too_late(descriptor: int, how: int) -> None:
        os.unlink(os.path.join(SHM_DIR, name))
        flock(descriptor, how)

    judged: list[int] = []
    monkeypatch.setattr(sweep_module, "_judge_pool", lambda descriptor: (not judged.append(descriptor), "dead"))
    monkeypatch.setattr(fcntl, "flock", too_late)
    assert sweep_with_reasons(RUN) == SweepReport((), ())
    assert judged == []


def test_a_dry_run_removes_nothing(leave_file: Callable[..., str]) -> None:
    name = leave_file(new_name(RUN))
    assert [one.name for one in sweep(RUN, dry_run=True)] == [name]
    assert list_objects(RUN) == [name]

"""gc frees what the dead left, says why, and leaves the living alone; the dead here were really killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import finish, pids, run_json, start, wait_for_step, wait_until_gone
from skipping import skip_unless_ci

from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, list_objects, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.sweep import BUSY, SweepReport, sweep, sweep_with_reasons
from shmstage.operate.gc_command import collect, in_words, main
from shmstage.operate.run_status import status_of
from shmstage.transport import endpoint_lock
from shmstage.transport.endpoint_lock import EndpointLock
from shmstage.transport.endpoints import endpoint_for, socket_path

RUN = f"gc-test-{os.getpid()}"
LAYOUT = Layout.of({"tokens": ("int32", (2, 8))})


@pytest.mark.slow
def test_a_run_killed_whole_can_be_looked_at_and_its_memory_freed(tmp_path: Path) -> None:
    """S1, S3, S5: all three killed at once; what gc did is proven by looking at /dev/shm."""
    out = tmp_path / "o"
    process = start(
        "run", "--run", RUN, "--out", "o", "--steps", "500", "--weight-sync", "async", "--checkpoint-every", "1",
        cwd=tmp_path,
    )  # fmt: skip
    wait_for_step(process, 2)
    killed = pids(out)
    assert sorted(killed) == ["launcher", "orchestrator", "trainer"]
    for pid in killed.values():
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(*killed.values())
    finish(process)
    left = set(list_objects(RUN))
    assert sum(not name.endswith(LOCK_SUFFIX) for name in left) == 2  # micro-batches and weights

    (found,) = run_json("status", "o", cwd=tmp_path)["runs"]
    assert found["verdict"]["state"] == "killed"
    assert {p["role"]: (p["pid"], p["alive"]) for p in found["processes"]} == {r: (p, False) for r, p in killed.items()}
    assert {pool["owner"]["role"] for pool in found["pools"]} == {"orchestrator", "trainer"}
    assert all(pool["owner"]["alive"] is False and not pool["problem"] for pool in found["pools"])
    assert found["progress"]["last"]["step"] >= 2 and found["checkpoint"] >= 1
    assert any("shmstage gc" in remedy for remedy in found["verdict"]["remedies"])
    code, text, _ = finish(start("status", "o", cwd=tmp_path))
    assert code == 0 and "killed" in text and f"`shmstage run --resume {out}`" in text
    same = status_of(RUN)  # where no OUT is known, shared memory still is
    assert same.out is None and same.verdict.state == "killed" and len(same.pools) == 2

    dry = run_json("gc", "--dry-run", cwd=tmp_path)
    assert dry["dry_run"] is True
    assert left <= {item["name"] for item in dry["removed"]}
    assert set(list_objects(RUN)) == left
    assert finish(start("gc", "o", cwd=tmp_path))[0] == 0
    assert list_objects(RUN) == []
    assert collect(RUN, dry_run=False) == SweepReport((), ())
    assert status_of(str(out)).verdict.state == "ended"


def test_what_lives_is_left_alone_and_named(identity_and_pool: tuple[ProcessIdentity, Pool]) -> None:
    identity, pool = identity_and_pool
    report = sweep_with_reasons(RUN)
    assert report.removed == ()
    assert {item.name: item.reason for item in report.left_alone} == {
        pool.name[1:]: f"its owner, orchestrator {os.getpid()}, is alive",
        os.path.basename(identity.lock_path): f"held by orchestrator {os.getpid()}, which is alive",
    }
    assert set(list_objects(RUN)) == {item.name for item in report.left_alone}


def test_what_is_no_file_of_this_users_is_left_alone_and_named() -> None:
    """S39: foreign-owned names are skipped, never fatal."""
    link, directory, foreign, strange = (Path(SHM_DIR, new_name(RUN)) for _ in range(4))
    strange = strange.with_name(strange.name + ".old")
    link.symlink_to("/etc/passwd")
    directory.mkdir()
    foreign.touch()
    strange.touch()
    try:
        os.chown(foreign, 54321, -1)
        reasons = {item.name: item.reason for item in sweep_with_reasons(RUN).left_alone}
        assert reasons == {
            link.name: "a symbolic link", directory.name: "not a regular file", foreign.name: "belongs to user 54321",
        }  # fmt: skip
        every = {item.name: item.reason for item in sweep_with_reasons(dry_run=True).left_alone}
        assert every[strange.name] == "not a name that a process of this user gives"
    except PermissionError:
        skip_unless_ci("giving a file to another user needs root")
    finally:
        for path in (link, foreign, strange):
            path.unlink(missing_ok=True)
        directory.rmdir()


def test_a_pool_whose_owner_cannot_be_seen_is_left_alone(identity_and_pool: tuple[ProcessIdentity, Pool]) -> None:
    """S43: unknown is not dead."""
    identity, pool = identity_and_pool
    path = Path(SHM_DIR, pool.name[1:])
    content = bytearray(path.read_bytes())
    os.unlink(identity.lock_path)
    content[88:96] = b"\x01" * 8  # the owner's pid namespace is another one
    path.write_bytes(bytes(content))
    (left,) = sweep_with_reasons(RUN).left_alone
    assert "nothing proves its death" in left.reason


def test_two_sweeps_at_once_remove_everything_once() -> None:
    """S7: exclusive and idempotent: each file is removed by exactly one of them."""
    names = [new_name(RUN) for _ in range(40)]
    for name in names:
        Path(SHM_DIR, name).touch()
    gate = threading.Barrier(4)
    reports: list[SweepReport] = []

    def work() -> None:
        gate.wait()
        reports.append(sweep_with_reasons(RUN))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    removed = [item.name for report in reports for item in report.removed]
    assert sorted(removed) == sorted(names)
    assert {item.reason for report in reports for item in report.left_alone} <= {BUSY}
    assert sweep(RUN) == []


def test_sockets_of_the_living_are_left_and_of_the_dead_removed() -> None:
    """S85: a socket file is removed only if nobody owns it."""
    living = EndpointLock(socket_path(endpoint_for(RUN, "launcher")))
    dead = socket_path(endpoint_for(RUN, "trainer"))
    locks = [path.with_name(path.name + ".lock") for path in (dead, socket_path(endpoint_for(RUN, "launcher")))]
    locks[0].touch()
    try:
        for run_id in (None, RUN):
            report = collect(run_id, dry_run=True)
            removed = [(item.name, item.reason) for item in report.removed if item.name.startswith("/")]
            assert removed == [(str(locks[0]), "no living process holds the lock")]  # there is no socket to name
            left = [(item.name, item.reason) for item in report.left_alone if item.name.startswith("/")]
            assert left == [(str(locks[1]), "a living process holds the lock")]
        collect(RUN, dry_run=False)
        assert not locks[0].exists()
    finally:
        living.release()


def test_a_socket_with_its_lock_is_named_as_the_socket() -> None:
    path = socket_path(endpoint_for(RUN, "trainer"))
    path.with_name(path.name + ".lock").touch()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as left_behind:
        left_behind.bind(str(path))
    assert [item.name for item in collect(RUN, dry_run=False).removed] == [str(path)]
    assert not path.exists() and not path.with_name(path.name + ".lock").exists()


def leave_plain_file(path: Path) -> None:
    path.touch()
    path.with_name(path.name + ".lock").touch()


def leave_lock_that_is_a_directory(path: Path) -> None:
    path.with_name(path.name + ".lock").mkdir()


def leave_lock_that_is_a_link(path: Path) -> None:
    path.with_name(path.name + ".lock").symlink_to("elsewhere")


def leave_socket_that_answers(path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(1)
    _open.append(listening)


_open: list[socket.socket] = []


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (leave_plain_file, "exists and is not a socket"),
        (leave_lock_that_is_a_directory, "its lock cannot be opened: Is a directory"),
        (leave_lock_that_is_a_link, "its lock cannot be opened: Too many levels of symbolic links"),
        (leave_socket_that_answers, "somebody answers on"),
    ],
)
def test_a_dry_run_and_a_real_one_say_the_same_of_what_is_no_stale_socket(
    leave: Callable[[Path], None], reason: str
) -> None:
    """S85: left alone by both, for the same reason, which is not that it lives unless it does."""
    path = socket_path(endpoint_for(RUN, "trainer"))
    leave(path)
    try:
        before = sorted(path.parent.iterdir())
        dry, real = (collect(RUN, dry_run=dry_run) for dry_run in (True, False))
        assert dry == real and dry.removed == ()
        (left,) = dry.left_alone
        there = path if path.exists() else path.with_name(path.name + ".lock")
        assert left.name == str(there) and reason in left.reason
        assert sorted(path.parent.iterdir()) == before
    finally:
        while _open:
            _open.pop().close()
        for each in (path, path.with_name(path.name + ".lock")):
            each.rmdir() if each.is_dir() else each.unlink(missing_ok=True)


def test_a_socket_that_came_to_life_after_the_look_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """S85"""
    path = socket_path(endpoint_for(RUN, "trainer"))
    path.with_name(path.name + ".lock").touch()
    look = endpoint_lock.look_at_endpoint
    owners: list[EndpointLock] = []

    def slow(one: Path) -> endpoint_lock.EndpointLook | None:
        found = look(one)
        if one == path:
            owners.append(EndpointLock(path))
        return found

    monkeypatch.setattr(endpoint_lock, "look_at_endpoint", slow)
    report = collect(RUN, dry_run=False)
    assert report.removed == () and "is owned by a living process" in report.left_alone[0].reason
    owners[0].release()


def test_lines_say_what_was_removed_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    name = new_name(RUN)
    Path(SHM_DIR, name).write_bytes(b"x" * 8192)
    lines = in_words(collect(RUN, dry_run=True), dry_run=True)
    assert list_objects(RUN) == [name]
    assert lines == [
        f"would remove {name} (8.19 kB): half made, and nobody is making it",
        "would remove 1 file, 8.19 kB of shared memory",
    ]
    sweep(RUN)
    assert in_words(SweepReport((), ()), dry_run=False) == ["nothing to remove"]


def test_json_is_one_object_of_fixed_keys(
    identity_and_pool: tuple[ProcessIdentity, Pool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([RUN, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"dry_run", "removed", "left_alone"}
    assert all(set(item) == {"name", "reason"} for item in found["left_alone"]) and len(found["left_alone"]) == 2


@pytest.fixture
def identity_and_pool(request: pytest.FixtureRequest) -> tuple[ProcessIdentity, Pool]:
    identity = ProcessIdentity.create(RUN, "orchestrator")
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    closers: list[Callable[[], None]] = [identity.close, pool.close]
    for close in closers:
        request.addfinalizer(close)
    return identity, pool

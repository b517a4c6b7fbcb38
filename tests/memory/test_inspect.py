"""Looking at pools from outside: what a reading says of each state, and that odd files are said, not raised."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_making import LAYOUT, RUN, Child, Ends
from skipping import skip_unless_ci

from shmstage import _native
from shmstage.memory import inspect
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.inspect import UNFINISHED, PoolSnapshot, ProcessSnapshot, process_state, read_pools, read_processes
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.memory.sweep import sweep
from shmstage.operate.run_verdict import judge

SHM = Path(SHM_DIR)
#: offsets from native/slot_header.h
ABI, RUN_ID, ERROR, SLOT_COUNT, STRIDE, OWNER_PID = 8, 256, 512, 48, 40, 72

KILLED_OWNER = """
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.handle import Handle
identity = ProcessIdentity.create(RUN, "orchestrator")
pool = Pool.create(RUN, epoch=4, layouts=[LAYOUT], slots=2, aux_slots=1, identity=identity)
pool.heartbeat(time.monotonic_ns())
pool.record_error("the feeder: bundle x: shard 3 is cut off")
pool.acquire(LAYOUT, timeout_s=1).publish(step=7, index=2)
pool.acquire(LAYOUT, timeout_s=1)
print(pool.name, flush=True)
sys.stdin.read()
""".replace("from shmstage", "import time\nfrom shmstage", 1)


@pytest.fixture
def leave_pool(ends: Ends) -> Iterator[Callable[..., str]]:
    """leave(offset=bytes, ...) → the name of a copy of a sound pool with these bytes changed."""
    left: list[Path] = []

    def leave(change: dict[int, bytes], *, cut_to: int | None = None) -> str:
        content = bytearray((SHM / ends.pool.name[1:]).read_bytes())
        for offset, new in change.items():
            content[offset : offset + len(new)] = new
        left.append(SHM / new_name(RUN))
        left[-1].write_bytes(bytes(content[:cut_to]))
        return left[-1].name

    yield leave
    for path in left:
        path.unlink(missing_ok=True)


def one(name: str) -> PoolSnapshot:
    return {pool.name: pool for pool in read_pools()}[name.removeprefix("/")]


def test_a_reading_shows_who_has_each_slot_and_since_when(ends: Ends) -> None:
    writing = ends.pool.acquire(LAYOUT, timeout_s=1)
    published = ends.pool.acquire(LAYOUT, timeout_s=1)
    published.publish(step=3, index=1)
    (found,) = read_pools(RUN)
    assert (found.name, found.run_id, found.epoch, found.problem) == (ends.pool.name[1:], RUN, 1, "")
    assert (found.owner.pid, found.owner.role, found.owner.alive) == (os.getpid(), "orchestrator", True)
    assert found.owner.state == "running"
    assert found.nbytes == found.allocated_nbytes == ends.pool.nbytes
    assert [slot.state for slot in found.slots] == ["writing", "published"]
    assert [slot.generation for slot in found.slots] == [1, 2]
    assert (found.slots[1].step, found.slots[1].index) == (3, 1)
    (holder,) = found.slots[1].holders
    assert (holder.consumer, holder.pid, holder.alive) == (0, os.getpid(), True)
    assert all(slot.seconds is not None and 0 <= slot.seconds < 60 for slot in found.slots)
    assert found.counters is not None and found.counters["published"] == 1
    writing.abandon()
    ends.reader.end_lease(1, 2)
    assert [slot.state for slot in read_pools(RUN)[0].slots] == ["free", "free"]


def test_the_choice_of_memory_and_the_aux_slots_are_shown(identity: ProcessIdentity, ends: Ends) -> None:
    """S33: which NUMA policy a pool was made with can be read."""
    content = _native.Headers(bytearray(8192), 2, 1, 1)
    content.write_geometry(
        pool_nbytes=0, payload_offset=0, slot_stride=0, aux_slot_count=0, payload_shift=0, interleaved=True
    )
    assert not one(ends.pool.name).huge_pages and one(ends.pool.name).numa == "first touch"
    other = Pool.create(RUN, epoch=2, layouts=[LAYOUT], slots=1, aux_slots=2, identity=identity)
    with open(SHM / other.name[1:], "r+b") as file:
        file.seek(76)
        file.write(struct.pack("<I", 3))
    found = one(other.name)
    assert found.huge_pages and found.numa == "interleaved"
    assert [slot.aux for slot in found.slots] == [False, True, True]
    other.close()


def test_readers_cells_show_which_version_each_reads(ends: Ends, identity: ProcessIdentity) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    slot.publish(step=5)
    ends.pool.cells.announce(slot.index)
    cell = ends.reader.claim_cell(identity)
    assert cell.take() == slot.index
    found = one(ends.pool.name)
    assert found.newest_slot == slot.index
    (shown,) = found.cells
    assert (shown.slot, shown.reader.pid, shown.reader.alive) == (slot.index, os.getpid(), True)
    cell.release()


@pytest.mark.slow
def test_a_killed_owners_pool_can_be_read_and_says_that_it_is_dead(start_child: Callable[..., Child]) -> None:
    """S1: the lock of a killed process is free, whatever its pid names now."""
    owner = start_child(KILLED_OWNER)
    name = owner.line()
    before = one(name)
    assert before.owner.alive and before.owner.state == "running"
    os.kill(owner.pid, signal.SIGKILL)
    owner.kill()
    found = one(name)
    assert (found.owner.pid, found.owner.alive, found.owner.state) == (owner.pid, False, "")
    assert found.last_error == "the feeder: bundle x: shard 3 is cut off"
    assert found.heartbeat_s is not None
    assert [slot.state for slot in found.slots] == ["published", "writing", "free"]
    (holder,) = found.slots[0].holders
    assert (holder.pid, holder.alive) == (0, None)  # nobody ever attached
    assert [process.alive for process in read_processes(RUN) if process.pid == owner.pid] == [False]
    assert {swept.name for swept in sweep(RUN)} >= {name[1:]}


@pytest.mark.slow
def test_a_stopped_process_is_alive_and_said_to_be_stopped(start_child: Callable[..., Child]) -> None:
    owner = start_child(KILLED_OWNER)
    name = owner.line()
    os.kill(owner.pid, signal.SIGSTOP)
    while process_state(owner.pid) != "stopped":
        os.sched_yield()
    found = one(name)
    assert (found.owner.alive, found.owner.state) == (True, "stopped")
    assert sweep(RUN) == []
    owner.kill()
    sweep(RUN)


@pytest.mark.slow
def test_a_killed_consumer_is_shown_as_the_dead_holder_of_its_slot(
    ends: Ends, start_child: Callable[..., Child]
) -> None:
    """S50: who holds a slot can be read, and whether it still lives."""
    child = start_child(
        "from shmstage.memory.identity import ProcessIdentity\n"
        "identity = ProcessIdentity.create(RUN, 'trainer')\n"
        "reader = PoolReader.attach(arguments[0], run_id=RUN, epoch=1)\n"
        "print('attached', flush=True)\n"
        "sys.stdin.read()\n",
        ends.pool.name,
    )
    assert child.line() == "attached"
    ends.pool.acquire(LAYOUT, timeout_s=1).publish(step=1)
    assert [(h.pid, h.alive) for h in one(ends.pool.name).slots[0].holders] == [(child.pid, True)]
    child.kill()
    assert [(h.pid, h.alive) for h in one(ends.pool.name).slots[0].holders] == [(child.pid, False)]
    sweep(RUN)
    assert [(h.pid, h.alive) for h in one(ends.pool.name).slots[0].holders] == [(child.pid, False)]


def test_a_living_process_with_a_consumers_number_but_no_lock_proves_nothing(ends: Ends) -> None:
    """S44: a number alone is not an identity."""
    ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    with open(SHM / ends.pool.name[1:], "r+b") as file:
        file.seek(768)
        file.write(struct.pack("<I", os.getppid()))
    assert [(h.pid, h.alive) for h in one(ends.pool.name).slots[0].holders] == [(os.getppid(), None)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({0: b"NOTAPOOL"}, UNFINISHED),
        ({12: b"\0\0\0\0"}, UNFINISHED),
        ({ABI: struct.pack("<I", 99)}, "made by another version: its layout is 99, ours 2"),
        ({SLOT_COUNT: struct.pack("<I", 0xFFFFFFFF)}, "contradicts its size"),
        ({STRIDE: struct.pack("<Q", 1 << 63)}, "contradicts its size"),
        ({56: struct.pack("<I", 0)}, "contradicts its size"),
        ({RUN_ID: b"\xff\xfe" * 4}, "is not UTF-8"),
        ({384: b"/etc/passwd\0"}, "contradicts its size"),
    ],
    ids=["no magic", "not ready", "other version", "slots", "stride", "consumers", "run id", "lock path"],
)
def test_a_header_that_lies_is_said_not_raised(
    leave_pool: Callable[..., str], change: dict[int, bytes], problem: str
) -> None:
    """S11: what another layout or a half-made file says is never taken for a living peer."""
    found = one(leave_pool(change))
    assert problem in found.problem
    assert found.slots == ()


@pytest.mark.parametrize("nbytes", [0, 100, 4095, 4096, 5000])
def test_a_file_cut_off_anywhere_is_said_not_raised(leave_pool: Callable[..., str], nbytes: int) -> None:
    found = one(leave_pool({}, cut_to=nbytes))
    assert found.problem and found.nbytes == nbytes


def test_a_pool_that_is_being_made_is_told_from_one_that_was_given_up(leave_pool: Callable[..., str]) -> None:
    name = leave_pool({12: b"\0\0\0\0"})
    with open(SHM / name, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert one(name).problem == "being made, or being removed, right now"
    assert one(name).problem == UNFINISHED


@pytest.mark.slow
def test_a_pool_that_its_dead_owner_had_not_finished_is_half_made(start_child: Callable[..., Child]) -> None:
    """S11: its owner's death is proven, so nothing is left open."""
    owner = start_child(KILLED_OWNER)
    name = owner.line()
    owner.kill()
    with open(SHM / name[1:], "r+b") as file:
        os.pwrite(file.fileno(), b"\0\0\0\0", 12)
    assert one(name).problem == "half made, and its owner is dead"
    assert "and had not finished making it" in {swept.name: swept.reason for swept in sweep(RUN)}[name[1:]]


def test_between_making_a_file_and_locking_it_nobody_is_called_dead() -> None:
    """S11: a file without a lock and without a header is one moment in the life of every pool."""
    made = SHM / new_name(RUN)
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        pools = read_pools(RUN)
        assert [pool.problem for pool in pools] == [UNFINISHED]
        launcher = ProcessSnapshot("launcher", 1, False, "", "")
        for known in ([], [launcher]):
            verdict = judge(known, pools)
            assert verdict.state in ("unclear", "ended") and UNFINISHED in verdict.text
            assert "left nothing" not in verdict.text and "shmstage gc" in verdict.remedies[0]
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # and it goes on
        assert os.fstat(descriptor).st_nlink == 1
    finally:
        os.close(descriptor)
        made.unlink()


def test_a_pool_that_was_not_reserved_is_told_so_and_not_that_its_header_lies(ends: Ends) -> None:
    """S18: the reason is the one that a reader would be given."""
    sparse = SHM / new_name(RUN)
    content = (SHM / ends.pool.name[1:]).read_bytes()
    sparse.write_bytes(content[:8192])
    os.truncate(sparse, len(content))
    try:
        assert "it was not reserved" in one(sparse.name).problem
    finally:
        sparse.unlink()


def test_what_was_written_into_a_header_cannot_steer_a_terminal(leave_pool: Callable[..., str]) -> None:
    found = one(leave_pool({ERROR: b"\x1b[2Jgone\n\xff\0"}))
    assert found.last_error == "�[2Jgone��"


def test_odd_files_under_our_prefix_are_said_not_raised() -> None:
    """S39: what belongs to somebody else is named and left alone."""
    link, directory, fifo, foreign = (SHM / new_name(RUN) for _ in range(4))
    link.symlink_to("/etc/passwd")
    directory.mkdir()
    os.mkfifo(fifo)
    foreign.write_bytes(b"x" * 8192)
    try:
        assert one(link.name).problem == "a symbolic link"
        assert one(directory.name).problem == one(fifo.name).problem == "not a regular file"
        if os.getuid():
            skip_unless_ci("giving a file to another user needs root")
        os.chown(foreign, 54321, -1)
        assert one(foreign.name).problem == "belongs to user 54321"
    finally:
        for path in (link, fifo, foreign):
            path.unlink(missing_ok=True)
        directory.rmdir()


def test_a_file_that_vanishes_while_the_list_is_read_is_said_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = new_name(RUN)
    monkeypatch.setattr(inspect, "list_objects", lambda run_id: [gone])
    assert [pool.problem for pool in read_pools(RUN)] == ["removed while it was looked at"]


def test_a_pool_whose_owner_ends_in_order_while_it_is_read_is_not_one_of_the_dead(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S50: "killed" is said of nobody who ended in order."""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    look = inspect.look_at_process

    def late(*claims: object) -> ProcessSnapshot:
        pool.close()
        identity.close()
        return look(*claims)  # type: ignore[arg-type]

    monkeypatch.setattr(inspect, "look_at_process", late)
    (found,) = read_pools(RUN)
    assert (found.problem, found.owner) == ("removed while it was looked at", inspect.NOBODY)
    assert judge([], [found]).state != "killed"


def test_reading_changes_nothing(ends: Ends) -> None:
    ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    path = SHM / ends.pool.name[1:]
    before = path.read_bytes()
    read_pools(RUN)
    assert path.read_bytes() == before


def test_a_run_with_the_same_hash_is_not_taken_for_this_one(leave_pool: Callable[..., str]) -> None:
    name = leave_pool({RUN_ID: b"another-run\0"})
    assert name in {pool.name for pool in read_pools()}
    assert name not in {pool.name for pool in read_pools(RUN)}


def test_a_lock_of_nobody_is_a_dead_process() -> None:
    path = SHM / (new_name(RUN) + LOCK_SUFFIX)
    path.write_text("role=trainer\npid=notanumber\nstart_ticks=x\n")
    try:
        (found,) = read_processes(RUN)
        assert (found.role, found.pid, found.alive) == ("trainer", 0, False)
    finally:
        path.unlink()


def test_a_reader_that_attached_is_not_disturbed_by_a_reading(ends: Ends) -> None:
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    with ends.reader.lease(handle) as lease:
        read_pools(RUN)
        lease.check()
    assert isinstance(ends.reader, PoolReader) and not ends.reader.owner.dead()

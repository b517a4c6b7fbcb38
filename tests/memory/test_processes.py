"""Pools across real processes, and processes that die. Children are started afresh, never forked."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest
from pool_making import LAYOUT, RUN, Child

from shmstage.errors import PeerLostError, PoolError, StaleHandleError
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.names import SHM_DIR
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.memory.sweep import list_objects, sweep

pytestmark = pytest.mark.slow
StartChild = Callable[..., Child]

OWNER = """
from shmstage.memory.identity import ProcessIdentity
identity = ProcessIdentity.create(RUN, "orchestrator")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
print(pool.name, identity.lock_path, flush=True)
for line in sys.stdin:
    value, step = map(int, line.split())
    slot = pool.acquire(LAYOUT, timeout_s=30)
    slot.views["tokens"][...] = value
    handle = slot.publish(step=step)
    print(handle.slot, handle.generation, flush=True)
pool.close()
identity.close()
"""

CONSUMER = """
from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
identity = ProcessIdentity.create(RUN, "trainer")
reader = PoolReader.attach(arguments[0], run_id=RUN, epoch=1)
reader.register(LAYOUT)
print(identity.lock_path, flush=True)
for line in sys.stdin:
    slot, generation = map(int, line.split())
    with reader.lease(Handle(slot, generation, LAYOUT.layout_id)) as lease:
        print(int(lease.views["tokens"].sum()), flush=True)
        lease.check()
        sys.stdin.readline()
    print("ended", flush=True)
reader.close()
identity.close()
"""


def test_what_one_process_publishes_another_leases(start_child: StartChild, identity: ProcessIdentity) -> None:
    owner = start_child(OWNER)
    name, _ = owner.line().split()
    reader = PoolReader.attach(name, run_id=RUN, epoch=1)
    reader.register(LAYOUT)
    for step in range(1, 7):
        owner.go_on(f"{step} {step}")
        slot, generation = map(int, owner.line().split())
        with reader.lease(Handle(slot, generation, LAYOUT.layout_id)) as lease:
            assert np.all(lease.views["tokens"] == step)
    reader.close()
    assert owner.end() == 0
    assert not os.path.exists(SHM_DIR + name)


def test_ending_a_lease_in_one_process_wakes_the_producer_in_another(
    start_child: StartChild, identity: ProcessIdentity
) -> None:
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    consumer = start_child(CONSUMER, pool.name)
    watch = PeerWatch(consumer.line())
    slot = pool.acquire(LAYOUT, timeout_s=1)
    slot.views["tokens"][...] = 3
    handle = slot.publish()
    consumer.go_on(f"{handle.slot} {handle.generation}")
    assert consumer.line() == str(3 * 16)
    asked = threading.Event()
    got: list[int] = []

    def stop() -> bool:
        asked.set()
        return False

    def wait() -> None:
        got.append(pool.acquire(LAYOUT, timeout_s=60, peers=[watch], stop=stop).publish().generation)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert asked.wait(30)
    consumer.go_on()
    assert consumer.line() == "ended"
    waiter.join(30)
    assert got == [4]
    assert consumer.end() == 0
    assert watch.dead()
    watch.close()
    pool.close()


def test_a_killed_consumer_is_noticed_by_the_waiting_producer(
    start_child: StartChild, identity: ProcessIdentity
) -> None:
    """S47, S50"""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    consumer = start_child(CONSUMER, pool.name)
    lock_path = consumer.line()
    watch = PeerWatch(lock_path)
    assert not watch.dead() and watch.pid == consumer.pid
    handle = pool.acquire(LAYOUT, timeout_s=1).publish(step=5)
    consumer.go_on(f"{handle.slot} {handle.generation}")
    consumer.line()
    caught: list[BaseException] = []
    asked = threading.Event()

    def stop() -> bool:
        asked.set()
        return False

    def wait() -> None:
        try:
            pool.acquire(LAYOUT, timeout_s=60, peers=[watch], stop=stop)
        except PeerLostError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert asked.wait(30)
    consumer.kill()
    waiter.join(30)
    assert len(caught) == 1
    for part in ("trainer", f"{consumer.pid}", "slot 0 generation 2 (micro-batch 5.0)"):
        assert part in str(caught[0])
    pool.end_leases_of(0)
    assert pool.acquire(LAYOUT, timeout_s=0, peers=[watch]).publish().generation == 4
    watch.close()
    pool.close()
    assert [swept.name for swept in sweep(RUN)] == [os.path.basename(lock_path)]


def test_a_killed_owners_pool_is_swept_and_a_living_ones_is_not(
    start_child: StartChild, identity: ProcessIdentity
) -> None:
    """S1"""
    mine = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    living, killed = start_child(OWNER), start_child(OWNER)
    living_name, living_lock = living.line().split()
    killed_name, killed_lock = killed.line().split()
    reader = PoolReader.attach(killed_name, run_id=RUN, epoch=1)
    reader.register(LAYOUT)
    killed.go_on("7 1")
    slot, generation = map(int, killed.line().split())
    lease = reader.lease(Handle(slot, generation, LAYOUT.layout_id))
    assert sweep(RUN) == [] and not reader.owner.dead()
    killed.kill()
    assert reader.owner.dead()
    dead = {killed_name[1:], os.path.basename(killed_lock)}
    assert {swept.name for swept in sweep(RUN, dry_run=True)} == dead
    assert dead < set(list_objects(RUN))  # a dry run removes nothing
    swept = sweep(RUN)
    assert {one.name for one in swept} == dead
    assert f"process {killed.pid}, is dead" in swept[0].reason and swept[0].nbytes >= mine.nbytes
    assert sweep(RUN) == []
    assert np.all(lease.views["tokens"] == 7)  # who has it mapped keeps it
    for name in (living_name[1:], mine.name[1:], os.path.basename(living_lock), os.path.basename(identity.lock_path)):
        assert name in list_objects(RUN)
    del lease
    reader.close()
    assert living.end() == 0
    mine.close()


def test_attaching_never_unlinks(start_child: StartChild, identity: ProcessIdentity) -> None:
    """S13"""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    for end in ("", "sys.exit(3)", "os._exit(0)"):
        child = start_child("reader = PoolReader.attach(arguments[0], run_id=RUN, epoch=1)\n" + end, pool.name)
        child.end()
        assert pool.name[1:] in list_objects(RUN)
    killed = start_child(CONSUMER, pool.name)
    killed.line()
    killed.kill()
    assert pool.name[1:] in list_objects(RUN)
    sweep(RUN)
    assert pool.name[1:] in list_objects(RUN)
    pool.close()


def test_a_normal_exit_without_close_leaves_nothing_and_says_nothing(start_child: StartChild) -> None:
    child = start_child(OWNER.replace("for line in sys.stdin", "raise SystemExit(0)\nfor line in sys.stdin"))
    name, lock_path = child.line().split()
    assert child.end() == 0
    assert not os.path.exists(SHM_DIR + name) and not os.path.exists(lock_path)


def test_an_owner_killed_while_making_its_pool_leaves_something_that_is_swept(start_child: StartChild) -> None:
    """S11"""
    # Killed before the header knows its owner, and after.
    for where in ("_native.Headers", "reservation._prefault"):
        child = start_child(f"""
from shmstage import _native
from shmstage.memory import reservation
from shmstage.memory.identity import ProcessIdentity
identity = ProcessIdentity.create(RUN, "orchestrator")
def killed(*a):
    print("half made", flush=True)
    sys.stdin.readline()
{where} = killed
Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
""")
        assert child.line() == "half made"
        (name,) = [name for name in list_objects(RUN) if not name.endswith(".lock")]
        with pytest.raises(PoolError, match=r"half made|not yet one"):
            PoolReader.attach("/" + name, run_id=RUN, epoch=1)
        assert sweep(RUN) == []  # being made
        child.kill()
        assert len(sweep(RUN)) == 2 and list_objects(RUN) == []


def test_a_stopped_owner_is_alive(start_child: StartChild) -> None:
    owner = start_child(OWNER)
    _, lock_path = owner.line().split()
    os.kill(owner.pid, signal.SIGSTOP)
    watch = PeerWatch(lock_path)
    assert not watch.dead() and sweep(RUN) == []
    os.kill(owner.pid, signal.SIGKILL)
    owner.kill()
    assert watch.dead()
    watch.close()
    assert len(sweep(RUN)) == 2


def test_endpoints_refuse_use_in_a_forked_child(start_child: StartChild) -> None:
    """S61"""
    # Forked inside a child of ours, which has no threads, so that the test process itself is never forked.
    child = start_child("""
from shmstage.errors import ForkedError
from shmstage.memory.identity import ProcessIdentity, PeerWatch
identity = ProcessIdentity.create(RUN, "orchestrator")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
reader.register(LAYOUT)
handle = pool.acquire(LAYOUT, timeout_s=1).publish()
lease = reader.lease(handle)
acts = [lambda: pool.acquire(LAYOUT, timeout_s=1), pool.free_slot_count, pool.counters, pool.close,
        lambda: pool.withdraw(handle), lambda: pool.end_leases_of(0), lambda: pool.heartbeat(1),
        lambda: pool.register(LAYOUT), lambda: reader.lease(handle), lambda: reader.end_lease(0, 2), lease.end,
        lease.check, reader.close, lambda: reader.register(LAYOUT),
        lambda: Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)]
if (brief := os.fork()) == 0:
    sys.exit(0)  # a normal exit: finalizers run, and must leave the parent's files alone
os.waitpid(brief, 0)
read, write = os.pipe()
parent_lives, held_by_parent = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    os.close(held_by_parent)
    refused = 0
    for act in acts:
        try:
            act()
        except ForkedError:
            refused += 1
    identity.close()
    os.write(write, f"{refused} of {len(acts)}".encode())
    os.close(write)
    os.read(parent_lives, 1)
    os.read(0, 1)
    os._exit(0)
print(os.read(read, 100).decode(), pid, identity.lock_path, pool.name, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
""")
    refused, of, count, _, lock_path, name = child.line().split()
    assert (refused, of) == (count, "of")
    watch = PeerWatch(lock_path)
    assert not watch.dead() and os.path.exists(SHM_DIR + name)
    child.go_on()
    assert child._process.wait(30) == -9
    # The forked child still lives and still maps the pool, but it does not keep its parent alive.
    assert watch.dead()
    watch.close()
    child.end()
    assert len(sweep(RUN)) == 2


def test_a_handle_from_before_an_owners_restart_is_refused(start_child: StartChild) -> None:
    first = start_child(OWNER)
    name, _ = first.line().split()
    reader = PoolReader.attach(name, run_id=RUN, epoch=1)
    reader.register(LAYOUT)
    for _ in range(2):
        first.go_on("1 1")
        slot, generation = map(int, first.line().split())
        reader.end_lease(slot, generation)
    first.go_on("1 1")
    first.line()
    with pytest.raises(StaleHandleError):
        reader.lease(Handle(slot, generation, LAYOUT.layout_id))
    reader.close()
    assert first.end() == 0
    with pytest.raises(PoolError):
        PoolReader.attach(name, run_id=RUN, epoch=1)

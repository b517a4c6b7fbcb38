"""Who is alive, with real namespaces, recycled pids, other users and processes killed at any moment."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest
from namespaces import PRELUDE, on_mount, run_on_mount
from pool_making import LAYOUT, RUN, Child

from shmstage.errors import PeerLostError, ProtocolError, StaleHandleError
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.names import list_objects
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.memory.sweep import sweep

pytestmark = pytest.mark.slow
StartChild = Callable[..., Child]

# A process that owns a pool, says where, and waits to be killed.
OWNS = """
def owns():
    identity = ProcessIdentity.create(RUN, "orchestrator")
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    pool.acquire(LAYOUT, timeout_s=0).publish()
    print(os.getpid(), pool.name, identity.lock_path, flush=True)
    return identity, pool
"""
# Starts OWNS as its child and as a pid of our choice; for the first process of a pid namespace.
CONTAINER = (
    OWNS
    + """
import json, subprocess
from shmstage.memory.identity import PeerWatch, read_start_ticks
from shmstage.memory.sweep import sweep, list_objects

def spawn(code, pid=0):
    if pid:
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(pid - 1))
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1] + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return child, child.stdout.readline().decode().split()

def end(child):
    child.kill(); child.wait(); child.stdin.close(); child.stdout.close()
"""
)


def in_a_container(code: str) -> list[str]:
    """What ``code`` prints as the first process of a pid namespace with a /dev/shm of its own."""
    unshare = ("--mount", "--pid", "--fork", "--mount-proc")
    return run_on_mount("size=20m", CONTAINER + code, PRELUDE + OWNS, unshare=unshare)


def test_a_pid_that_another_process_has_now_keeps_nobody_alive() -> None:
    """S44: the very same number, given to a process of another program; with the lock there and with it gone."""
    if not os.access("/proc/sys/kernel/ns_last_pid", os.W_OK):
        # also in CI: a kernel may be built without it, and a container may have /proc/sys read-only
        pytest.skip("needs a kernel and a user that may say which pid comes next")
    lines = in_a_container("""
for lock_gone in (False, True):
    owner, (pid, pool, lock) = spawn("kept = owns()\\nsys.stdin.read()", pid=300)
    watch = PeerWatch(lock)
    print(pid, watch.dead(), watch.pid)
    end(owner)
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write("299")
    impostor = subprocess.Popen(["sleep", "60"])
    print(impostor.pid, watch.dead(), PeerWatch(lock).dead())
    if lock_gone:
        os.unlink(lock)
    print(sorted(swept.name for swept in sweep(RUN)) == sorted(
        [pool[1:]] + ([] if lock_gone else [os.path.basename(lock)])), list_objects(RUN))
    print(impostor.poll())
    impostor.kill(); impostor.wait()
""")
    assert lines == ["300 False 300", "300 True True", "True []", "None"] * 2


def test_the_pool_of_a_living_process_survives_the_loss_of_its_lock_while_its_pid_is_its_own() -> None:
    """S44"""
    lines = in_a_container("""
owner, (pid, pool, lock) = spawn("kept = owns()\\nsys.stdin.read()")
watch = PeerWatch(lock)
os.unlink(lock)
print(watch.dead(), sweep(RUN), list_objects(RUN) == [pool[1:]])
end(owner)
print(watch.dead(), [swept.name for swept in sweep(RUN)] == [pool[1:]])
""")
    assert lines == ["False [] True", "True True"]


def test_a_restarted_container_in_which_every_pid_is_the_same_frees_what_it_left() -> None:
    """S8, S42: /dev/shm outlives the pid namespace; the new owner has the old one's pid, and often its start time."""
    first = PRELUDE + OWNS + "kept = owns()\nsys.stdin.read()\n"
    second = (
        PRELUDE
        + """
from shmstage.memory.sweep import sweep
before = sorted(os.listdir("/dev/shm"))
swept = sorted(one.name for one in sweep(RUN))
print(os.getpid(), swept == before, len(before), os.listdir("/dev/shm"))
"""
    )
    both = f"""
import subprocess
def container(code):
    return subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
one = container({first!r})
pid = one.stdout.readline().split()[0]
one.kill()
one.stdout.read()  # until the last process in it is gone
one.communicate()
two = container({second!r})
print(pid, one.returncode, two.communicate()[0])
"""
    assert run_on_mount("size=20m", both)[0] == "1 -9 1 True 2 []"


def test_a_living_owner_in_another_pid_namespace_is_not_judged_by_its_number() -> None:
    """S43: seen from a sibling container, where its pid is nobody or somebody else; also when its lock file is gone."""
    owner = PRELUDE + OWNS + "kept = owns()\nsys.stdin.readline()\nprint('alive', flush=True)\n"
    look = PRELUDE + "from shmstage.memory.sweep import sweep, list_objects\n" + """
print(os.path.exists("/proc/" + sys.argv[1]), sweep(RUN), len(list_objects(RUN)), flush=True)
"""
    code = f"""
import subprocess
alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
owner = subprocess.Popen([*alone, {owner!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
pid, pool, lock = owner.stdout.readline().split()
def look(pid):
    print(subprocess.run([*alone, {look!r}, pid], capture_output=True, text=True).stdout.strip())
look("1")
os.unlink(lock)
look("1")
look("77777")
owner.stdin.write("\\n"); owner.stdin.flush()
print(owner.stdout.readline().strip())
owner.wait()
owner.stdin.close(); owner.stdout.close()
print(os.listdir("/dev/shm"))
"""
    lines = run_on_mount("size=20m", code)
    # pid 1 is there in every container and is another process in each
    assert lines == ["True [] 2", "True [] 1", "False [] 1", "alive", "[]"]


def test_what_another_user_left_is_skipped_and_never_fatal() -> None:
    """S38, S39: root's and nobody's objects side by side; names of one user that belong to the other."""
    lines = run_on_mount(
        "size=20m,mode=1777",
        """
from shmstage.memory.names import new_name, list_objects, LOCK_SUFFIX
from shmstage.memory.sweep import sweep
from shmstage import Producer, Consumer
import tempfile
identity = ProcessIdentity.create(RUN, "orchestrator")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
real, os.getuid = os.getuid, lambda: 65534
foreign = new_name(RUN)                       # nobody's name, made by root and dead as can be
os.getuid = real
for name in (foreign, foreign[:-1] + "x" + LOCK_SUFFIX):
    with open("/dev/shm/" + name, "wb") as file:
        file.write(bytes(5000))
    os.chmod("/dev/shm/" + name, 0o600)
mine = sorted(os.listdir("/dev/shm"))
child = os.fork()
if child == 0:
    os.setgid(65534)
    os.setuid(65534)
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp()
    code = 1
    try:
        print(sweep(RUN), sweep(), flush=True)
        with Producer(RUN, {"x": ("uint8", (9,))}) as producer:
            pass
        print(sorted(os.listdir("/dev/shm")) == mine, flush=True)
        try:
            PoolReader.attach(pool.name, run_id=RUN, epoch=1)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        code = 0
    finally:
        os._exit(code)
print(os.waitpid(child, 0)[1], sorted(os.listdir("/dev/shm")) == mine)
pool.close()
identity.close()
""",
    )
    assert lines[0] == "[] []" and lines[1] == "True"
    assert lines[2].startswith("PoolError") and "not the name of a pool of this user" in lines[2]
    assert lines[3] == "0 True"


def test_endpoints_left_open_at_the_end_of_the_interpreter_say_nothing_and_leave_nothing() -> None:
    """S15, S5: every kind of endpoint, alive in globals, in cycles and in a thread's frame; /dev/shm is looked at."""
    lines = run_on_mount(
        "size=20m",
        f"""
import subprocess
code = {PRELUDE!r} + '''
from shmstage import Producer, Consumer
from shmstage.memory.identity import PeerWatch
import threading
identity = ProcessIdentity.create(RUN, "orchestrator")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1, writes_late=True)
reader.register(LAYOUT)
watch = PeerWatch(identity.lock_path)
published = pool.acquire(LAYOUT, timeout_s=0)
view = published.views["tokens"][1]
lease = reader.lease(published.publish())
late = lease.late_views["logps"]
writing = pool.acquire(LAYOUT, timeout_s=0)
class Cycle: pass
for thing in (pool, reader, lease, writing, watch, identity):
    cycle = Cycle(); cycle.me, cycle.thing = cycle, thing
producer = Producer("open", {{"x": ("uint8", (9,))}})
consumer = Consumer("open", timeout_s=20)
slot = producer.acquire(0)
import builtins
builtins.kept = (pool, reader, lease)       # outlives the modules
print(len(os.listdir("/dev/shm")))
'''
for end in ("", "sys.exit(0)", "raise SystemExit"):
    done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, text=True)
    print(done.returncode, done.stdout.strip(), repr(done.stderr), os.listdir("/dev/shm"))
""",
    )
    assert lines == ["0 5 '' []"] * 3


def test_consumers_killed_at_any_moment_never_stop_the_producer(
    start_child: StartChild, identity: ProcessIdentity
) -> None:
    """S47, S48, S50: whatever word they were writing, every slot is had again once their death is noticed."""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    code = """
from shmstage import _native
identity = ProcessIdentity.create(RUN, "trainer")
reader = PoolReader.attach(arguments[0], run_id=RUN, epoch=1)
print(identity.lock_path, flush=True)
while True:  # as fast as it goes, so that a kill lands anywhere in it
    for slot in (0, 1):
        generation = reader._headers.generation(slot)
        if generation and not generation % 2:
            reader._headers.lease_state(slot, generation, 0, 0)
            reader._headers.end_lease(slot, generation, 0)
"""
    code = "from shmstage.memory.identity import ProcessIdentity\n" + code
    for round_ in range(6):
        consumer = start_child(code, pool.name)
        with_lock = consumer.line()
        watch = PeerWatch(with_lock)
        for number in range(200 + 37 * round_):
            with pool.acquire(LAYOUT, timeout_s=30, peers=[watch]) as slot:
                slot.views["tokens"][...] = number
                slot.publish(step=number)
        consumer.kill()
        with pytest.raises(PeerLostError) as caught:
            for _ in range(3):  # the dead one ends no more leases: at the latest the third finds no slot
                pool.acquire(LAYOUT, timeout_s=30, peers=[watch]).publish(step=7)
        assert f"trainer {consumer.pid}" in str(caught.value) and "is held by consumer 0" in str(caught.value)
        assert "slot 0" in pool.held_by(0) and "slot 1" in pool.held_by(0)
        pool.end_leases_of(0)
        assert pool.held_by(0) == "" and pool.free_slot_count() == 2
        watch.close()
    pool.close()
    assert len(sweep(RUN)) == 6


def test_an_owner_killed_at_any_moment_leaves_nothing_that_could_be_taken_for_whole(start_child: StartChild) -> None:
    """S47, S48: it writes the same number everywhere; a lease that stands its check never shows two."""
    code = """
from shmstage.memory.identity import ProcessIdentity
identity = ProcessIdentity.create(RUN, "orchestrator")
layout = Layout.of({"x": ("int64", (1 << 19,))})
pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=1, identity=identity)
print(pool.name, flush=True)
number = 0
while True:
    with pool.acquire(layout, timeout_s=30) as slot:
        number += 1
        slot.views["x"][...] = number
        slot.publish(step=number)
    if number % 3:
        pool.end_leases_of(0)   # as if the reader were dead: the slot is rewritten under it
"""
    layout = Layout.of({"x": ("int64", (1 << 19,))})

    def read(reader: PoolReader) -> str:
        try:
            lease = reader.lease(reader.published_in(0))
            seen = lease.views["x"].copy()
            lease.check()
            lease.end()
        except (StaleHandleError, ProtocolError):
            return "refused"
        assert seen.min() == seen.max() > 0
        return "whole"

    for _ in range(5):
        owner = start_child(code)
        reader = PoolReader.attach(owner.line(), run_id=RUN, epoch=1)
        reader.register(layout)
        seen = Counter[str]()
        deadline = time.monotonic() + 60.0
        while min(seen["whole"], seen["refused"]) < 3:  # both happened beside it, however the machine shares its cores
            assert time.monotonic() < deadline, seen
            seen[read(reader)] += 1
        owner.kill()
        assert reader.owner.dead()
        read(reader)  # what it left is either whole or refused
        assert reader.held_by_owner() == "" or "slot 0" in reader.held_by_owner()
        reader.close()
    assert len(sweep(RUN)) == 10 and list_objects(RUN) == []


def test_a_death_is_noticed_within_a_second_by_whoever_waits(
    start_child: StartChild, identity: ProcessIdentity
) -> None:
    """S50: the median of five kills, because the machine may be busy with something else during one or two."""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    code = """
from shmstage.memory.identity import ProcessIdentity
identity = ProcessIdentity.create(RUN, "trainer")
reader = PoolReader.attach(arguments[0], run_id=RUN, epoch=1)
print(identity.lock_path, flush=True)
sys.stdin.readline()
"""
    noticed_s = []
    for _ in range(5):
        consumer = start_child(code, pool.name)
        watch = PeerWatch(consumer.line())
        pool.acquire(LAYOUT, timeout_s=0).publish(step=3, index=1)
        os.kill(consumer.pid, 9)
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match=r"slot 0 generation \d+ \(micro-batch 3\.1\) is held by consumer 0"):
            pool.acquire(LAYOUT, timeout_s=60, peers=[watch])
        noticed_s.append(time.monotonic() - begin)
        watch.close()
        pool.end_leases_of(0)
        consumer.kill()
    assert statistics.median(noticed_s) < 1.0, noticed_s
    pool.close()
    sweep(RUN)


def test_a_test_that_leaves_something_in_shared_memory_fails(tmp_path: str) -> None:
    """S5: the guard of all tests looks at /dev/shm itself; that a close was called proves nothing."""
    root = os.path.dirname(os.path.dirname(__file__))
    test = os.path.join(str(tmp_path), "test_leaks.py")
    with open(test, "w") as file:
        file.write(
            "import os\nfrom shmstage.memory.names import new_name\n"
            "def test_leaks():\n    open('/dev/shm/' + new_name('leaked'), 'w').close()\n"
            "def test_does_not():\n    pass\n"
        )
    with open(os.path.join(str(tmp_path), "conftest.py"), "w") as file, open(os.path.join(root, "conftest.py")) as ours:
        file.write(ours.read())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = on_mount("size=20m", command)
    assert "left behind: /dev/shm/shmstage." in done.stdout
    assert "2 passed, 1 error" in done.stdout


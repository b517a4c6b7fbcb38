"""Space, for real: small mounts, a memory cgroup, limits of a process. What does not fit is an error, no signal."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from namespaces import PRELUDE, environment, memory_cgroup, on_mount, run_on_mount
from pool_making import LAYOUT, RUN, Child, Ends
from skipping import skip_unless_ci

from shmstage import _native
from shmstage.errors import PeerLostError, PoolError
from shmstage.memory import limits as limits_module
from shmstage.memory import reservation
from shmstage.memory.facts import read_facts
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.limits import Limit, read_limits
from shmstage.memory.mounts import huge_choice, huge_pages_of, mount_of
from shmstage.memory.names import SHM_DIR, list_objects
from shmstage.memory.pool import Pool

StartChild = Callable[..., Child]


# --- mounts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_start_frees_the_pool_of_the_dead_before_it_asks_for_its_own() -> None:
    """S1, S3, S7, S8: on this mount there is room for one pool only, and what others left there stays."""
    lines = run_on_mount(
        "size=3m",
        """
import subprocess
from shmstage import Producer
from shmstage.errors import BudgetError
first = "from shmstage import Producer; p = Producer('stream', {'x': ('uint8', (900_000,))}, slots=2); print(1)"
killed = subprocess.Popen([sys.executable, "-c", first + "; import time; time.sleep(99)"], stdout=subprocess.PIPE)
killed.stdout.readline()
killed.kill()
killed.wait()
open("/dev/shm/psm_of_another_program", "w").write("x")
before = sorted(os.listdir("/dev/shm"))
used = os.statvfs("/dev/shm")
print(len(before), used.f_bavail * used.f_frsize < 2_000_000)
# another run of this user leaves it alone, and is told that there is no room
try:
    Producer("another", {"x": ("uint8", (900_000,))}, slots=2)
except BudgetError as error:
    print("the mount /dev/shm" in str(error), set(before) <= set(os.listdir("/dev/shm")))
with Producer("stream", {"x": ("uint8", (900_000,))}, slots=2):
    print(len(os.listdir("/dev/shm")), "psm_of_another_program" in os.listdir("/dev/shm"))
print(os.listdir("/dev/shm"))
""",
    )
    # a pool and a lock of the dead, a file of others; then a pool and a lock of the living
    assert lines == ["3 True", "True True", "3 True", "['psm_of_another_program']"]


@pytest.mark.slow
def test_a_small_mount_is_found_at_the_start_with_the_way_to_enlarge_it(tmp_path: Path) -> None:
    """S20, S21: 64 MB, as docker gives. One clear failure: exit 2, nobody is started again, nothing is left."""
    command = [
        sys.executable, "-m", "shmstage.cli", "run", "--rows", "4096", "--tokens", "1024", "--json",
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    script = '"$@"; code=$?; ls -A /dev/shm >&2; exit $code'
    done = on_mount("size=64m", ["sh", "-c", script, "sh", *command], cwd=str(tmp_path))
    assert done.returncode == 2, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "BudgetError"
    for part in ("/dev/shm", "--shm-size", "emptyDir"):
        assert part in error["text"]
    # nobody was started again, and /dev/shm is empty: the last line is what was said, not the name of a file
    assert "restart" not in done.stderr and "shmstage." not in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_mount_without_any_room_is_told_as_such_by_everyone_who_asks_it_for_some() -> None:
    """S21, S30: a lifetime lock is the first thing a process makes; the mount and its figures are named."""
    lines = run_on_mount(
        "size=64k",
        """
from shmstage.errors import BudgetError
from shmstage.memory.limits import Limit
early = ProcessIdentity.create(RUN, "early")
try:
    with open("/dev/shm/full", "wb") as file:
        file.write(bytes(1 << 20))
except OSError:
    pass
for act in (
    lambda: ProcessIdentity.create(RUN, "late"),
    lambda: Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=early, limits=[Limit("x", 1 << 30)]),
):
    try:
        act()
    except BudgetError as error:
        print(error)
print(len(os.listdir("/dev/shm")))
early.close()
""",
    )
    assert len(lines) == 3 and lines[2] == "2"
    for line in lines[:2]:
        assert "No space left on device (the mount /dev/shm has 0 B of 65.5 kB left)" in line
    assert "shmstage gc" in lines[0] and "fewer slots" in lines[1]


@pytest.mark.slow
def test_the_limit_that_was_really_hit_is_named_although_bytes_are_left() -> None:
    """S30: out of inodes; a limit of the process on file sizes."""
    lines = run_on_mount(
        "size=100m,nr_inodes=3",
        """
import resource
from shmstage.errors import BudgetError
identity = ProcessIdentity.create(RUN, "owner")
def attempt():
    try:
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity).close()
        print("made")
    except BudgetError as error:
        print(error)
attempt()
open("/dev/shm/other", "w").close()
attempt()
os.unlink("/dev/shm/other")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
attempt()
print(os.listdir("/dev/shm") == [os.path.basename(identity.lock_path)])
identity.close()
""",
    )
    assert lines[0] == "made" and lines[3] == "True"
    assert "the mount /dev/shm has no inode left of 3" in lines[1]
    assert "ulimit -f, is 4096 bytes" in lines[2] and "fewer rows" in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "huge"), [("always", True), ("advise", True), ("never", False)])
def test_huge_pages_are_taken_where_the_mount_gives_them_and_the_choice_is_reported(option: str, huge: bool) -> None:
    """S24: in the pool, in its header, and as the kernel counts it."""
    lines = run_on_mount(
        f"size=40m,huge={option}",
        """
from shmstage.memory.facts import read_facts
identity = ProcessIdentity.create(RUN, "owner")
layout = Layout.of({"x": ("uint8", (8 << 20,))})
pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=1, identity=identity)
with open("/dev/shm" + pool.name, "rb") as file:
    print(pool.backing.directory, pool.backing.huge_pages, read_facts(file.fileno())["huge_pages"])
print(pool.backing.huge_nbytes >= 4 << 20, pool.backing.huge_nbytes)
slot = pool.acquire(layout, timeout_s=0)
slot.views["x"][...] = 7
reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
reader.register(layout)
with reader.lease(slot.publish()) as lease:
    print(int(lease.views["x"].min()))
reader.close()
pool.close()
identity.close()
""",
    )
    assert lines[0] == f"/dev/shm {huge} {huge}"
    if huge and lines[1].startswith("False"):
        # also in CI: a container has the kernel, and the free memory, of the machine below it
        pytest.skip(f"this kernel gives no huge pages to a tmpfs with huge={option}")
    assert lines[1].startswith(str(huge)) and lines[2] == "7"


def test_the_mount_that_lies_on_top_says_whether_there_are_huge_pages(tmp_path: Path) -> None:
    """S24"""
    (tmp_path / "proc/self").mkdir(parents=True)

    def option(*rows: str) -> str:
        (tmp_path / "proc/self/mounts").write_text("".join(f"{row}\n" for row in rows))
        return huge_pages_of("/dev/shm", root=tmp_path)

    under = "tmpfs /dev/shm tmpfs rw,huge=advise 0 0"
    assert option(under) == "advise"
    assert option(under, "tmpfs /dev/shm tmpfs rw,size=64k 0 0") == "never"
    assert option("tmpfs /dev/shm/inner tmpfs rw,huge=always 0 0", "odd") == "never"
    assert huge_pages_of("/dev/shm", root=tmp_path / "absent") == "never"
    odd = r"tmpfs /mnt/a\040b tmpfs rw,huge=within_size 0 0"
    option("none / overlay rw 0 0", under, odd, "none /dev/shmoo nfs rw 0 0")
    assert mount_of("/mnt/a b/c", root=tmp_path) == ("tmpfs", ("rw", "huge=within_size"))
    assert mount_of("/dev/shm", root=tmp_path)[0] == "tmpfs" and mount_of("/home", root=tmp_path)[0] == "overlay"


@pytest.mark.parametrize(
    ("option", "policy", "choice"),
    [
        ("advise", "never", "advise"), ("always", "advise", "always"), ("", "always", "never"), ("never", "", "never"),
        ("always", "deny", "never"), ("advise", "deny", "never"), ("never", "force", "always"), ("", "force", "always"),
    ],
)  # fmt: skip
def test_of_the_kernels_policies_deny_and_force_overrule_the_mount(option: str, policy: str, choice: str) -> None:
    """S24"""
    assert huge_choice(option, policy) == choice


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "huge"), [("deny", False), ("force", True)])
def test_a_pool_says_what_the_doctor_says_where_the_kernel_overrules_the_mount(
    policy: str, huge: bool, tmp_path: Path
) -> None:
    """S24: header, the pool's own word and the doctor's are one, whatever huge= the mount has."""
    enabled = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    if not os.path.exists(enabled):
        pytest.skip("this kernel knows no huge pages for shared memory")  # also in CI: the machine's kernel
    (tmp_path / "enabled").write_text(f"always within_size advise never [{policy}]\n")
    code = """
from shmstage.memory.facts import read_facts
from shmstage.memory.machine import read_machine
from shmstage.operate.machine_checks import check_machine
identity = ProcessIdentity.create(RUN, "owner")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
with open("/dev/shm" + pool.name, "rb") as file:
    print(pool.backing.huge_pages, read_facts(file.fileno())["huge_pages"])
print({finding.check: finding.level for finding in check_machine(read_machine())}["huge pages"])
pool.close()
identity.close()
"""
    option = "never" if huge else "always"
    command = [sys.executable, "-c", PRELUDE + code]
    done = on_mount(f"size=20m,huge={option}", command, before=f"mount --bind {tmp_path}/enabled {enabled}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{huge} {huge}", "ok" if huge else "note"]


def test_without_shared_memory_there_is_no_pool_anywhere_else(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S24: no fallback to a directory on a disk."""
    monkeypatch.setattr(reservation, "SHM_DIR", str(tmp_path / "absent"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(PoolError, match="cannot make a pool in .*/absent: No such file or directory"):
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity, limits=[Limit("x", 1 << 30)])
    assert list(tmp_path.iterdir()) == []


# --- cgroups -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pool_beyond_the_memory_cgroup_is_refused_where_its_first_touch_would_be_the_end() -> None:
    """S25, S26, S28, L1: the mount has room and so has the machine; the real controller binds."""
    limit_nbytes = 256 << 20
    if min(limit.available_nbytes for limit in read_limits()) < 1 << 30:
        skip_unless_ci("needs 1 GB of free memory, for the group to be what binds")
    code = """
from shmstage.errors import BudgetError
from shmstage.memory.limits import read_limits
identity = ProcessIdentity.create(RUN, "owner")
print(min(read_limits(), key=lambda limit: limit.available_nbytes).kind)
for megabytes in (400, 40):
    layout = Layout.of({"x": ("uint8", (megabytes << 20,))})
    try:
        pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=1, identity=identity)
        left = min(read_limits(), key=lambda limit: limit.available_nbytes)
        print("made", left.kind, left.available_nbytes < (256 - 40 << 20))
        pool.close()
    except BudgetError as error:
        print(error)
identity.close()
"""
    with memory_cgroup(limit_nbytes) as group:
        enter = 'echo $$ > "$0"/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, str(group), sys.executable, "-c", PRELUDE + code]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    binds, refused, made = done.stdout.splitlines()
    assert binds == "cgroup"
    assert "1 slots of 419 MB need 419 MB; the cgroup /" in refused and group.name in refused
    assert made == "made cgroup True"  # the pool's own bytes count in the group


@pytest.mark.slow
def test_a_limit_that_cannot_be_read_ends_the_command_with_exit_code_3(tmp_path: Path) -> None:
    """L4: the kernel's files are hidden behind ones that say nothing; a guess could get the run killed."""
    membership = Path("/proc/self/cgroup").read_text()
    path = next(line.split(":", 2)[2] for line in membership.splitlines() if line.startswith("0::"))
    fake = (
        "mount -t tmpfs none /sys/fs/cgroup && "
        f"mkdir -p /sys/fs/cgroup{path} && echo nonsense > /sys/fs/cgroup{path}/memory.max"
    )
    command = [sys.executable, "-m", "shmstage.cli", "run", "--steps", "1", "--json", "--out", str(tmp_path / "out")]
    done = on_mount("size=1g", command, before=fake, cwd=str(tmp_path))
    assert done.returncode == 3, done.stderr
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("LimitUnreadableError", 3)
    assert "cgroup" in error["text"]


# --- NUMA --------------------------------------------------------------------------------------------------------


def test_pages_spread_over_the_nodes_are_what_the_kernel_notes_and_the_header_says(identity: ProcessIdentity) -> None:
    """S33"""
    numa_maps = Path("/proc/self/numa_maps")
    if not numa_maps.exists():
        pytest.skip("this kernel knows no NUMA")  # also in CI: a container cannot choose its kernel
    for numa, policy in (("default", "default"), ("interleave", "interleave:")):
        pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity, numa=numa)  # type: ignore[arg-type]
        (line,) = [line for line in numa_maps.read_text().splitlines() if pool.name in line]
        assert line.split()[1].startswith(policy)
        with open(SHM_DIR + pool.name, "rb") as file:
            facts = read_facts(file.fileno())
        assert facts is not None and facts["interleaved"] == (numa == "interleave")
        assert (pool.backing.numa, pool.backing.numa_nodes > 0) == (numa, numa == "interleave")
        pool.close()


def test_a_kernel_that_cannot_spread_pages_is_not_passed_over_in_silence(
    identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S33"""
    monkeypatch.setattr(_native, "interleave", lambda mapping: -errno.ENOSYS)
    with pytest.raises(PoolError, match='the kernel refuses, Function not implemented; use numa = "default"'):
        Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity, numa="interleave")
    assert [name for name in list_objects(RUN) if not name.endswith(".lock")] == []


# --- limits of a process -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mapping_that_fails_half_way_is_undone_and_both_sides_hear_of_it(start_child: StartChild) -> None:
    """S36: the payload can be mapped, the headers after it cannot; the producer learns that its consumer is gone."""
    from shmstage.transport.producer import Producer

    with pytest.raises(PeerLostError), Producer("limited", {"x": ("uint8", (32 << 20,))}, slots=1) as producer:
        child = start_child("""
from pathlib import Path
from shmstage import Consumer
from shmstage.errors import PoolError
from shmstage.memory import mapping
real, left = mapping.mmap.mmap, [1]
def mmap(*a, **k):
    if not left:
        import resource
        now = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now, before[1]))
        try:
            return real(*a, **k)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    left.pop()
    return real(*a, **k)
files = len(os.listdir("/proc/self/fd"))
class mmap_with_a_limit:
    PROT_READ, PROT_WRITE, MAP_SHARED = mapping.mmap.PROT_READ, mapping.mmap.PROT_WRITE, mapping.mmap.MAP_SHARED
    mmap = staticmethod(mmap)
mapping.mmap = mmap_with_a_limit
try:
    Consumer("limited", timeout_s=20)
except PoolError as error:
    pools = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    print(error, flush=True)
    print(len(pools), len(os.listdir("/proc/self/fd")) - files, flush=True)
    sys.stdin.readline()
""")
        assert "cannot map" in (text := child.line()) and "Cannot allocate memory" in text and "ulimit -v" in text
        maps, files = map(int, child.line().split())
        assert maps == 0
        assert files <= 2  # of zmq's own, none of ours: its context lives as long as the process
        producer.acquire(20.0).publish()  # nobody is there any more: what was said of the consumer is raised
    child.go_on()
    child.end()


@pytest.mark.slow
def test_too_many_open_files_is_said_with_the_limit_and_the_remedy(start_child: StartChild) -> None:
    """S63: whichever file cannot be opened."""
    child = start_child("""
import resource
from shmstage.errors import PoolError
from shmstage.memory.identity import ProcessIdentity, PeerWatch
identity = ProcessIdentity.create(RUN, "owner")
pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
first = max(map(int, os.listdir("/proc/self/fd"))) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (first, first))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for act in (
    lambda: ProcessIdentity.create(RUN, "late"),
    lambda: PeerWatch(identity.lock_path),
    lambda: Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity, limits=[Limit("x", 1 << 30)]),
    lambda: PoolReader.attach(pool.name, run_id=RUN, epoch=1),
    (lambda: os.close(held.pop()), lambda: PoolReader.attach(pool.name, run_id=RUN, epoch=1)),
):
    try:
        for step in act if isinstance(act, tuple) else (act,):
            step()
        print("done")
    except PoolError as error:
        print(error)
for descriptor in held:
    os.close(descriptor)
print(first, flush=True)
pool.close()
identity.close()
""".replace("import resource", "import resource\nfrom shmstage.memory.limits import Limit", 1))
    said = [child.line() for _ in range(5)]
    limit = child.line()
    for line in said:
        assert "Too many open files" in line or "cannot map" in line, line
        assert f"this process may have {limit} files open: raise ulimit -n" in line, line
    assert child.end() == 0


def test_slots_and_hand_offs_cost_neither_descriptors_nor_mappings(make_ends: Callable[..., Ends]) -> None:
    """S62, S63: a micro-batch is one slot of one file, whatever it has of arrays; late regions are mapped once."""

    def held() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/shmstage.")
        return len(os.listdir("/proc/self/fd")), maps, len(list_objects(RUN))

    def grown(slots: int) -> tuple[int, int, int]:
        before = held()
        make_ends(slots=slots)
        return tuple(now - then for now, then in zip(held(), before, strict=True))  # type: ignore[return-value]

    assert grown(1) == grown(64)
    ends = make_ends(slots=2, reader={"writes_late": True})

    def hand_over() -> None:
        with ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=0).publish()) as lease:
            lease.late_views["logps"][...] = 1

    for _ in range(2):
        hand_over()
    before = held()
    for _ in range(50):
        hand_over()
    assert held() == before


# --- trees that a machine could have -----------------------------------------------------------------------------


def _tree(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def _found(root: Path) -> dict[str, int]:
    limits = read_limits(proc_root=str(root / "proc"), cgroup_root=str(root / "cgroup"))
    return {limit.name: limit.available_nbytes for limit in limits if limit.kind == "cgroup"}


def test_in_a_hybrid_tree_both_hierarchies_count(tmp_path: Path) -> None:
    """L1: memory may be bounded in the old hierarchy and in the unified one at once."""
    _tree(tmp_path, {
        "proc/self/cgroup": "3:memory:/a/b\n1:name=systemd:/a\n0::/u\n",
        "cgroup/memory/a/memory.limit_in_bytes": "9000", "cgroup/memory/a/memory.usage_in_bytes": "1000",
        "cgroup/memory/a/memory.stat": "total_inactive_file 100\n",
        "cgroup/memory/a/b/memory.limit_in_bytes": str((1 << 63) - 4096),
        "cgroup/memory/a/b/memory.usage_in_bytes": "5", "cgroup/memory/a/b/memory.stat": "",
        "cgroup/unified/u/memory.max": "7000", "cgroup/unified/u/memory.current": "500",
        "cgroup/unified/u/memory.stat": "inactive_file 0\n",
    })  # fmt: skip
    assert _found(tmp_path) == {"the cgroup /a": 8100, "the cgroup /u": 6500}


@pytest.mark.parametrize("path", ["/../other", "/kubepods/../..", "/not/there"])
def test_a_path_that_leads_out_of_the_mount_falls_back_to_its_root(tmp_path: Path, path: str) -> None:
    """L4: in a cgroup namespace the kernel writes /.. for what lies above."""
    _tree(tmp_path, {
        "proc/self/cgroup": f"0::{path}\n",
        "cgroup/memory.max": "4000", "cgroup/memory.current": "1000", "cgroup/memory.stat": "",
        "other/memory.max": "1", "other/memory.current": "1", "other/memory.stat": "",
        "memory.max": "2", "memory.current": "1", "memory.stat": "",
    })  # fmt: skip
    assert _found(tmp_path) == {"the cgroup /": 3000}


@pytest.mark.parametrize("line", ["nonsense", "4:memory", "\udcff"])
def test_a_membership_that_makes_no_sense_is_never_guessed_at(tmp_path: Path, line: str) -> None:
    """L4"""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(os.fsencode(line + "\n"))
    with pytest.raises(limits_module.LimitUnreadableError, match="cgroup"):
        _found(tmp_path)


def test_available_memory_that_cannot_be_read_is_never_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """L4"""

    def unreadable() -> None:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(limits_module.psutil, "virtual_memory", unreadable)
    with pytest.raises(limits_module.LimitUnreadableError, match=r"available RAM.*Permission denied"):
        read_limits()

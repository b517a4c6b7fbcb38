"""Who is alive: locks held for life, and what other processes make of them."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import stat

import pytest
from pool_making import RUN

from shmstage.errors import PoolError
from shmstage.memory import identity as identities
from shmstage.memory.identity import PeerWatch, ProcessIdentity, read_start_ticks
from shmstage.memory.names import is_ours, new_name


def test_names_have_at_most_thirty_characters_with_the_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """S38, S41"""
    for uid in (0, 1000, 2**32 - 2):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        name = new_name("a run id of any length " * 10)
        assert len("/" + name) <= 30
        assert re.fullmatch(r"shmstage\.[0-9a-z]{1,7}\.[0-9a-z]{6}\.[0-9a-z]{5}", name)
        assert is_ours(name) and is_ours(name, "a run id of any length " * 10) and not is_ours(name, "another")


def test_another_users_names_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """S38"""
    name = new_name(RUN)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert not is_ours(name)


@pytest.mark.parametrize("name", ["psm_1234", "shmstage", "shmstage.0.abcdef", "shmstage.0.abcdef.12345.lock.x", "x"])
def test_foreign_names_are_not_ours(name: str) -> None:
    assert not is_ours(name)


def test_the_lock_file_is_private_and_locked_for_life(identity: ProcessIdentity) -> None:
    assert stat.S_IMODE(os.stat(identity.lock_path).st_mode) == 0o600
    with open(identity.lock_path, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_every_identity_has_a_token_of_its_own(identity: ProcessIdentity) -> None:
    """S42"""
    other = ProcessIdentity.create(RUN, "orchestrator")
    assert re.fullmatch("[0-9a-f]{32}", identity.token) and other.token != identity.token
    assert other.lock_path != identity.lock_path
    other.close()


def test_a_watch_on_a_living_process_reads_who_it_is(identity: ProcessIdentity) -> None:
    watch = PeerWatch(identity.lock_path)
    assert not watch.dead() and not watch.dead()
    assert (watch.pid, watch.start_ticks, watch.role) == (os.getpid(), read_start_ticks(os.getpid()), "orchestrator")
    assert f"orchestrator {os.getpid()}" in watch.describe()
    watch.close()
    watch.close()


def test_two_watches_do_not_take_each_other_for_the_owner() -> None:
    identity = ProcessIdentity.create(RUN, "trainer")
    watches = [PeerWatch(identity.lock_path) for _ in range(2)]
    os.close(identity._descriptor)  # as the kernel does at its death
    identity._finalizer.detach()
    fcntl.flock(watches[0].fileno_for_lock(), fcntl.LOCK_SH)  # the first is just now trying
    assert watches[1].dead()
    for watch in watches:
        watch.close()
    os.unlink(identity.lock_path)


def test_a_closed_identity_is_dead_to_its_watchers() -> None:
    identity = ProcessIdentity.create(RUN, "trainer")
    watch = PeerWatch(identity.lock_path)
    identity.close()
    identity.close()
    assert watch.dead() and not os.path.exists(identity.lock_path)
    assert PeerWatch(identity.lock_path).dead()  # gone from the start
    watch.close()
    assert watch.dead()


def test_a_collected_identity_removes_its_file() -> None:
    path = ProcessIdentity.create(RUN, "trainer").lock_path
    gc.collect()
    assert not os.path.exists(path)


def test_a_recycled_pid_does_not_keep_a_dead_owner_alive(identity: ProcessIdentity) -> None:
    """S44"""
    # The pid lives, but it is not the process that the watch was told of: its lock alone decides.
    watch = PeerWatch(identity.lock_path, os.getpid(), identity.start_ticks + 1)
    assert watch._pidfd == -1 and not watch.dead()
    watch.close()


def test_a_pid_is_not_compared_across_namespaces(identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """S43"""
    comparable = PeerWatch(identity.lock_path)
    assert comparable._pidfd >= 0
    comparable.close()
    monkeypatch.setattr(identities, "_namespace_facts", lambda: {"boot_id": "b", "pid_namespace": "pid:[1]"})
    foreign = PeerWatch(identity.lock_path)
    assert foreign._pidfd == -1 and not foreign.dead()
    foreign.close()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/dev/shm/../../etc/shmstage.0.abcdef.12345.lock", "", "/dev/shm/x.lock"]
)
def test_nothing_but_a_lifetime_lock_of_ours_is_ever_opened(path: str) -> None:
    with pytest.raises(PoolError, match="not a lifetime lock of this user"):
        PeerWatch(path)


def test_the_start_time_of_an_unknown_process_is_unknown() -> None:
    assert read_start_ticks(2**22 + 1) == 0


def test_identities_and_watches_leak_no_descriptor() -> None:
    """S63"""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        identity = ProcessIdentity.create(RUN, "trainer")
        watch = PeerWatch(identity.lock_path)
        watch.dead()
        watch.close()
        identity.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_whose_lock_lost_its_name_is_alive(identity: ProcessIdentity) -> None:
    """S43, S44: somebody tidied /dev/shm up; the lock is held all the same."""
    watch = PeerWatch(identity.lock_path)
    os.unlink(identity.lock_path)
    assert not watch.dead()
    identity.close()
    assert watch.dead()
    watch.close()

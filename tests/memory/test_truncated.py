"""Somebody shrinks a pool's file under its users: an error with the pool's name and size, where it was SIGBUS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from pool_making import LAYOUT, RUN, Ends

from shmstage import _native
from shmstage.errors import PoolError
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.mapping import Mapping
from shmstage.memory.names import SHM_DIR
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.transport.weights_reader import WeightsReader

SHRUNK = r"pool /shmstage\.\S+ was shrunk to {} bytes under its users, who map \d+"


@pytest.mark.parametrize("nbytes", [0, 4096, 8192])
def test_every_use_of_a_shrunk_pool_is_an_error_that_names_it_and_its_size(ends: Ends, nbytes: int) -> None:
    """S31: header pages may be gone too; reader and owner look at the size before they touch anything."""
    pool, reader = ends.pool, ends.reader
    writing = pool.acquire(LAYOUT, timeout_s=0)
    handle = pool.acquire(LAYOUT, timeout_s=0).publish()
    lease = reader.lease(handle)
    os.truncate(SHM_DIR + pool.name, nbytes)
    for use in (
        lambda: reader.lease(handle), lease.check, lambda: lease.late_version("logps"), lease.end,
        lambda: reader.end_lease(handle.slot, handle.generation), reader.held_by_owner,
        lambda: reader.published_in(0), lambda: reader.register(LAYOUT), writing.publish,
        lambda: pool.acquire(LAYOUT, timeout_s=0), lambda: pool.withdraw(handle), lambda: pool.end_leases_of(0),
        lambda: pool.held_by(0), pool.free_slot_count, pool.counters, lambda: pool.heartbeat(1),
        lambda: pool.record_error("x"), lambda: pool.commit_late(handle, "logps"),
    ):  # fmt: skip
        with pytest.raises(PoolError, match=SHRUNK.format(nbytes)):
            use()
    reader.close()
    pool.close()  # gives back the slot in hand without touching it
    assert not os.path.exists(SHM_DIR + pool.name)


def test_a_wait_for_a_slot_of_a_shrunk_pool_ends(make_ends: Callable[..., Ends]) -> None:
    """S31"""
    pool = make_ends(slots=1).pool
    pool.acquire(LAYOUT, timeout_s=0)
    asked = threading.Event()
    caught: list[str] = []

    def stop() -> bool:
        asked.set()
        return False

    def wait() -> None:
        try:
            pool.acquire(LAYOUT, timeout_s=60, stop=stop)
        except PoolError as error:
            caught.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert asked.wait(10)
    os.truncate(SHM_DIR + pool.name, 8192)  # the headers stay: futex and words can be touched
    waiter.join(10)
    assert len(caught) == 1 and "was shrunk to 8192 bytes" in caught[0]


def test_a_copy_whose_source_or_target_is_lost_says_so_and_the_process_lives_on(identity: ProcessIdentity) -> None:
    """S31: the file is cut after the size was looked at."""
    layout = Layout.of({"x": ("uint8", (1 << 20,))})
    pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=1, identity=identity)
    reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
    reader.register(layout)
    slot = pool.acquire(layout, timeout_s=0)
    slot.views["x"][...] = 3
    source, target = slot.views["x"], aligned_buffer(1 << 20)
    lease = reader.lease(slot.publish())
    assert _native.copy_guarded(target, lease.views["x"]) and target.min() == 3
    os.truncate(SHM_DIR + pool.name, 1 << 19)
    for _ in range(3):
        assert not _native.copy_guarded(target, lease.views["x"])
    mine = np.empty(1 << 20, np.uint8)
    assert _native.copy_guarded(mine, target)  # what is not lost is copied as before
    del source, slot, lease
    pool._mapping.close()
    reader.close()
    pool.close()


@pytest.mark.slow
def test_a_file_cut_in_the_middle_of_copies_never_ends_the_process() -> None:
    """S31: four threads copy while the file shrinks and grows; each copy is whole or said to have failed."""
    descriptor = os.memfd_create("cut")
    nbytes = 4 << 20
    os.ftruncate(descriptor, nbytes)
    mapping = Mapping(descriptor, nbytes, writable=True)
    assert mapping.array is not None
    source = mapping.array
    over = threading.Event()
    outcomes: list[bool] = []

    def copy() -> None:
        target = np.empty(nbytes, np.uint8)
        while not over.is_set():
            outcomes.append(_native.copy_guarded(target, source))

    copiers = [threading.Thread(target=copy) for _ in range(4)]
    for copier in copiers:
        copier.start()
    while outcomes.count(False) < 20 or outcomes.count(True) < 20:
        os.ftruncate(descriptor, 4096)
        os.ftruncate(descriptor, nbytes)
    over.set()
    for copier in copiers:
        copier.join()
    os.close(descriptor)
    mapping.close()


def run(code: str) -> subprocess.CompletedProcess[str]:
    prelude = """
import mmap, os, signal, sys
import numpy as np
from shmstage import _native
def lost():
    descriptor = os.memfd_create("lost")
    os.ftruncate(descriptor, 8192)
    memory = np.frombuffer(mmap.mmap(descriptor, 8192), np.uint8)
    os.ftruncate(descriptor, 0)
    return memory
"""
    command = [sys.executable, "-c", prelude + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_a_bus_error_outside_a_guarded_copy_is_left_to_whoever_it_belonged_to_before() -> None:
    """S31: the default ends the process, and a handler that was there is called."""
    done = run("assert not _native.copy_guarded(np.empty(8192, np.uint8), lost())\nprint(1, flush=True)\nlost().sum()")
    assert (done.stdout, done.returncode) == ("1\n", -signal.SIGBUS)
    done = run(
        "import faulthandler\n"
        "for _ in range(2):\n"
        "    faulthandler.enable()\n"
        "    print(_native.copy_guarded(np.empty(8192, np.uint8), lost()), flush=True)\n"
        "lost().sum()"
    )
    assert (done.stdout, done.returncode) == ("False\nFalse\n", -signal.SIGBUS)
    assert "Bus error" in done.stderr and "Current thread" in done.stderr


def test_a_guarded_copy_wants_equal_sizes_and_takes_none() -> None:
    with pytest.raises(ValueError, match="copy of 4 bytes into 3"):
        _native.copy_guarded(bytearray(3), b"1234")
    with pytest.raises(BufferError):
        _native.copy_guarded(b"123", b"123")
    assert _native.copy_guarded(bytearray(), b"")


def test_readers_of_the_newest_publication_and_their_owner_are_told_too(ends: Ends, identity: ProcessIdentity) -> None:
    """S31: a weights pool is read and written through cells in its header."""
    pool = ends.pool
    with pool.acquire(LAYOUT, timeout_s=0) as slot:
        slot.publish(step=1)
    pool.cells.announce(slot.index)
    published = {"run_id": RUN, "pool": pool.name, "epoch": 1, "layout": LAYOUT.to_wire()}
    with WeightsReader(published, identity=identity) as reader:
        with reader.take() as weights:
            assert weights.version == 1
        taken = reader.take()
        os.truncate(SHM_DIR + pool.name, 0)
        taken.end()
        for use in (
            reader.take, pool.cells.readers, pool.cells.newest_slot, pool.cells.announce_nothing,
            lambda: pool.cells.announce(0),
        ):  # fmt: skip
            with pytest.raises(PoolError, match=SHRUNK.format(0)):
                use()

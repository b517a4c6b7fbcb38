"""Making and closing pools: files, modes, views that outlive them, descriptors."""

from __future__ import annotations

import gc
import os
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pool_making import LAYOUT, RUN, Ends

from shmstage.errors import InputError, PoolError
from shmstage.memory import reader as readers
from shmstage.memory import reservation
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.facts import read_facts
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.limits import Limit
from shmstage.memory.names import SHM_DIR
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader


def test_a_pool_is_one_private_file_of_the_announced_size(ends: Ends) -> None:
    status = os.stat(SHM_DIR + ends.pool.name)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == ends.pool.nbytes
    assert status.st_blocks * 512 >= ends.pool.nbytes  # reserved, not sparse
    assert ends.pool.name.startswith("/shmstage.") and len(ends.pool.name) <= 30


def test_slots_hold_the_largest_layout(identity: ProcessIdentity) -> None:
    small, big = Layout.of({"x": ("int8", (1,))}), Layout.of({"x": ("int8", (100_000,))})
    pool = Pool.create(RUN, epoch=1, layouts=[small, big], slots=1, identity=identity)
    assert set(pool.layouts) == {small.layout_id, big.layout_id}
    pool.acquire(big, timeout_s=0).views["x"][...] = 1
    pool.close()


def test_closing_removes_the_file_and_twice_is_harmless(identity: ProcessIdentity) -> None:
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    pool.close()
    pool.close()
    assert not os.path.exists(SHM_DIR + pool.name)
    with pytest.raises(PoolError, match="closed"):
        pool.acquire(LAYOUT, timeout_s=0)
    with pytest.raises(PoolError, match="closed"):
        pool.counters()


def test_closing_a_pool_with_live_views_is_a_clean_error_and_the_views_stay_mapped(identity: ProcessIdentity) -> None:
    """S56"""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    slot = pool.acquire(LAYOUT, timeout_s=0)
    view = slot.views["tokens"]
    view[...] = 5
    with pytest.raises(PoolError, match="still alive"):
        pool.close()
    assert not os.path.exists(SHM_DIR + pool.name)
    assert view.sum() == 80
    del view
    pool.close()


def test_closing_a_reader_with_live_views_is_a_clean_error_and_the_views_stay_mapped(ends: Ends) -> None:
    """S56"""
    slot = ends.pool.acquire(LAYOUT, timeout_s=0)
    slot.views["tokens"][...] = 6
    lease = ends.reader.lease(slot.publish())
    row = lease.views["tokens"][1]  # a view of a view
    with pytest.raises(PoolError, match="still alive"):
        ends.reader.close()
    with pytest.raises(PoolError):
        ends.reader.close()
    lease.end()
    ends.pool.close()
    assert row.sum() == 48
    del row
    ends.reader.close()
    ends.reader.close()


def test_a_view_keeps_the_memory_of_a_forgotten_reader_mapped(identity: ProcessIdentity) -> None:
    """S56"""
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
    slot = pool.acquire(LAYOUT, timeout_s=0)
    slot.views["mask"][...] = 2
    reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
    reader.register(LAYOUT)
    view = reader.lease(slot.publish()).views["mask"]
    mapping = weakref.ref(reader._payload.mmap)
    del reader
    pool.close()
    gc.collect()
    assert mapping() is not None and view.sum() == 32
    del view
    gc.collect()
    assert mapping() is None


def test_a_collected_pool_removes_its_file(identity: ProcessIdentity) -> None:
    name = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity).name
    gc.collect()
    assert not os.path.exists(SHM_DIR + name)


def test_closing_releases_a_waiting_thread(make_ends: Callable[..., Ends]) -> None:
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
    pool.close()
    waiter.join(10)
    assert len(caught) == 1 and "closed while" in caught[0]


def test_a_reader_may_close_before_and_after_the_pool(identity: ProcessIdentity) -> None:
    for reader_first in (True, False):
        pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, identity=identity)
        reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
        reader.register(LAYOUT)
        lease = reader.lease(pool.acquire(LAYOUT, timeout_s=0).publish())
        del lease
        for end in (reader, pool) if reader_first else (pool, reader):
            end.close()
        with pytest.raises(PoolError, match="closed"):
            reader.end_lease(0, 2)


def test_ending_a_lease_after_the_reader_was_closed_only_lets_go_of_it(ends: Ends) -> None:
    lease = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=0).publish())
    with pytest.raises(PoolError, match="still alive"):
        ends.reader.close()
    lease.end()
    ends.reader.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"layouts": []}, {"slots": 0}, {"slots": -1}, {"aux_slots": -1}, {"consumers": 0}, {"consumers": 25},
        {"epoch": -1}, {"payload_shift": 3}, {"run_id": "r" * 200},
    ],
)  # fmt: skip
def test_counts_out_of_range_are_refused_and_leave_nothing(
    identity: ProcessIdentity, arguments: dict[str, Any]
) -> None:
    good: dict[str, Any] = {"run_id": RUN, "epoch": 1, "layouts": [LAYOUT], "slots": 1, "identity": identity}
    with pytest.raises(InputError):
        Pool.create(**{**good, **arguments})


def test_pools_and_readers_leak_no_descriptor(make_ends: Callable[..., Ends]) -> None:
    """S63"""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ends = make_ends(reader={"writes_late": True})
        for _ in range(4):
            lease = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=0).publish())
            lease.late_views["logps"][...] = 1
            lease.end()
        ends.reader.close()
        ends.pool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_failed_attach_leaks_no_descriptor(ends: Ends) -> None:
    """S63"""
    before = len(os.listdir("/proc/self/fd"))
    for arguments in ({"run_id": "other", "epoch": 1}, {"run_id": RUN, "epoch": 1, "consumer": 7}):
        with pytest.raises((PoolError, InputError)):
            PoolReader.attach(ends.pool.name, **arguments)  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_header_shows_a_heartbeat_and_the_last_error_to_anyone(ends: Ends) -> None:
    ends.pool.heartbeat(12345)
    ends.pool.record_error("ö" * 300)
    with open(SHM_DIR + ends.pool.name, "rb") as file:
        facts = read_facts(file.fileno())
    assert facts is not None
    assert (facts["heartbeat_ns"], facts["owner_pid"]) == (12345, os.getpid())
    assert facts["last_error"].decode() == "ö" * 125


def test_slots_beyond_two_gigabytes_are_found(identity: ProcessIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    """S74"""
    # Sparse: the reservation is left out, so only touched pages exist.
    monkeypatch.setattr(reservation, "_reserve", lambda *a: None)
    monkeypatch.setattr(reservation, "_prefault", lambda *a: None)
    monkeypatch.setattr(readers, "_prefault_for_reading", lambda *a: None)
    layout = Layout.of({"x": ("uint8", ((1 << 31) + 1,)), "late": ("uint8", (9,))}, late=["late"])
    pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=3, identity=identity, limits=[Limit("nothing", 1 << 62)])
    with monkeypatch.context() as as_if_reserved:  # else it is not attached, for what its missing pages would take
        really = os.fstat
        blocks = {"st_blocks": pool.nbytes // 512}
        as_if_reserved.setattr(os, "fstat", lambda file: os.stat_result(tuple(really(file)), blocks))
        reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1, writes_late=True)
    reader.register(layout)
    slots = [pool.acquire(layout, timeout_s=0) for _ in range(3)]
    for slot in slots:
        slot.views["x"][-1] = slot.index + 1
        slot.views["late"][-1] = slot.index + 11
    for handle in [slot.publish() for slot in slots]:
        with reader.lease(handle) as lease:
            assert lease.views["x"][-1] == handle.slot + 1 and lease.views["x"][0] == 0
            assert lease.late_views["late"][-1] == handle.slot + 11
    with open(SHM_DIR + pool.name, "rb") as file:  # where the header says, not only where both ends agree on
        facts = read_facts(file.fileno())
        assert facts is not None and facts["slot_stride"] > 1 << 31
        ends = [facts["payload_offset"] + slot * facts["slot_stride"] + (1 << 31) for slot in range(3)]
        assert [os.pread(file.fileno(), 1, end) for end in ends] == [b"\1", b"\2", b"\3"]
    assert pool.nbytes > 6 << 30 and os.stat(SHM_DIR + pool.name).st_blocks * 512 < 1 << 20
    del slot, slots, lease
    reader.close()
    pool.close()


def test_an_aligned_buffer_has_the_asked_address_and_is_zero() -> None:
    for nbytes in (0, 1, 100_000):
        for alignment, offset in ((64, 0), (64, 4), (4096, 0), (64, 63)):
            buffer = aligned_buffer(nbytes, alignment, offset)
            assert buffer.nbytes == nbytes and buffer.dtype == np.uint8 and not buffer.any()
            assert buffer.ctypes.data % alignment == offset or nbytes == 0


def test_memory_that_a_driver_may_have_registered_stays_mapped_until_it_lets_go(ends: Ends) -> None:
    """S35: whoever holds an export, as a driver's registration does, decides; closing says so and unmaps nothing."""

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum(ends.pool.name in line for line in maps)

    slot = ends.pool.acquire(LAYOUT, timeout_s=0)
    slot.views["tokens"][...] = 9
    lease = ends.reader.lease(slot.publish())
    registration = memoryview(lease.views["tokens"]).cast("B")
    lease.end()
    both = mapped()
    for _ in range(2):
        with pytest.raises(PoolError, match="still alive"):
            ends.reader.close()
        ends.pool._unlink()
    assert mapped() == both - 1  # the headers went, the payload did not
    assert bytes(registration) == np.full(16, 9, np.int32).tobytes()
    registration.release()
    ends.reader.close()
    assert mapped() == both - 2

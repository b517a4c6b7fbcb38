"""A simulated device states its own idle: by computed stamps, whatever its threads do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shmstage.testing.fake_clock import FakeClock
from shmstage.testing.simulated_device import (
    CHUNK_NBYTES,
    Boundary,
    Operation,
    SimulatedDevice,
    begin_of,
    boundaries_of,
)

MS = 1_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def device(clock: FakeClock) -> Iterator[SimulatedDevice]:
    """Nothing is slept through: every stamp is what the device computes."""
    made = SimulatedDevice(clock_ns=lambda: clock.now_ns, sleep_until=lambda ns: None)
    yield made
    made.close()


def stamps(operation: Operation) -> tuple[float, float]:
    operation.block_until_ready()
    return operation.begin_ns / MS, operation.end_ns / MS


def test_work_begins_when_it_is_enqueued_or_when_the_work_before_it_ends(
    clock: FakeClock, device: SimulatedDevice
) -> None:
    first = device.compute("fwd_bwd", 1, 0, 0.100)
    clock.advance(0.010)
    behind = device.compute("fwd_bwd", 1, 1, 0.100)
    clock.advance(0.290)
    late = device.compute("update", 1, -1, 0.015)
    assert [stamps(each) for each in (first, behind, late)] == [(0, 100), (100, 200), (300, 315)]


def test_work_begins_no_earlier_than_the_upload_it_reads_has_ended(clock: FakeClock) -> None:
    device = SimulatedDevice(upload_gbps=0.001, clock_ns=lambda: clock.now_ns, sleep_until=lambda ns: None)
    upload, _ = device.upload({"x": np.zeros(40_000, np.uint8)})  # 40 ms at 1 MB/s
    second, _ = device.upload({"x": np.zeros(10_000, np.uint8)})
    reads = device.compute("fwd_bwd", 1, 0, 0.100, needs=second)
    assert [stamps(each) for each in (upload, second, reads)] == [(0, 40), (40, 50), (50, 150)]
    device.close()


def test_a_copy_that_does_not_keep_the_pace_is_over_when_it_is_over(clock: FakeClock) -> None:
    device = SimulatedDevice(
        upload_gbps=1.0, clock_ns=lambda: clock.now_ns, sleep_until=lambda ns: clock.advance(0.025)
    )
    upload, _ = device.upload({"x": np.zeros(1000, np.uint8)})
    assert upload.block_until_ready().end_ns == 25 * MS
    device.close()


def test_an_upload_reads_its_source_piece_by_piece_at_its_pace_and_not_before() -> None:
    going_on = threading.Semaphore(1)
    device = SimulatedDevice(upload_gbps=1.0, sleep_until=lambda ns: going_on.acquire() and None)
    source = np.zeros(2 * CHUNK_NBYTES, np.uint8)
    upload, copies = device.upload({"x": source})
    source[CHUNK_NBYTES:] = 7  # the second piece has not been asked for
    assert not upload.is_ready()
    going_on.release(3)
    upload.block_until_ready()
    assert copies["x"][-1] == 7
    source[:] = 9
    assert copies["x"].max() == 7  # once it is over, the source is nobody's any more
    device.close()


def test_work_that_raises_fails_and_so_does_what_reads_a_failed_upload(device: SimulatedDevice) -> None:
    def broken() -> None:
        raise ValueError("seeded")

    failed = device.compute("fwd_bwd", 1, 0, 0.0, act=broken)
    with pytest.raises(RuntimeError, match="seeded"):
        failed.block_until_ready()
    upload = Operation("upload", 0, 0, 0, 0, error="lost")
    upload.tell(0)
    with pytest.raises(RuntimeError, match="lost"):
        device.compute("fwd_bwd", 1, 1, 0.0, needs=upload).block_until_ready()


def test_the_idle_of_a_boundary_counts_what_lies_before_a_late_update_and_after_it(
    clock: FakeClock, device: SimulatedDevice
) -> None:
    for step in (1, 2):
        device.compute("fwd_bwd", step, 0, 0.100)
        clock.advance(0.103)
        device.compute("update", step, -1, 0.010)  # 3 ms late
        clock.advance(0.015)  # and what follows 5 ms later
    device.compute("fwd_bwd", 3, 0, 0.100).block_until_ready()
    found = device.boundaries()
    assert found == [Boundary(1, 8 * MS, 3 * MS, 5 * MS, 0, 0), Boundary(2, 8 * MS, 3 * MS, 5 * MS, 0, 118 * MS)]


def test_the_part_of_an_idle_that_an_upload_accounts_for_is_told_apart() -> None:
    upload = Operation("upload", 0, 0, 0, 0, end_ns=30)
    works = [
        Operation("fwd_bwd", 1, 0, 0, 10, begin_ns=0, end_ns=10),
        Operation("update", 1, -1, 0, 5, begin_ns=10, end_ns=15),
        Operation("fwd_bwd", 2, 0, 22, 10, needs=upload, begin_ns=begin_of(22, 15, 30), end_ns=40),
    ]
    assert boundaries_of(works) == [Boundary(1, 15, 0, 15, upload_ns=8, step_ns=0)]


def test_a_boundary_of_work_that_was_enqueued_in_time_has_no_idle_at_all(device: SimulatedDevice) -> None:
    for step in (1, 2):
        device.compute("fwd_bwd", step, 0, 0.100)
        device.compute("update", step, -1, 0.010)
    device.compute("fwd_bwd", 3, 0, 0.0).block_until_ready()
    assert [b.idle_ns for b in device.boundaries()] == [0, 0]

"""The native header map: bounds are checked against the mapping, never taken from shared memory."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from shmstage import _native

NBYTES = _native.POOL_HEADER_NBYTES + 3 * _native.SLOT_HEADER_NBYTES


def _headers(slots: int = 3, consumers: int = 2) -> _native.Headers:
    return _native.Headers(bytearray(NBYTES), slots, consumers, 1)


@pytest.mark.parametrize(("nbytes", "slots", "consumers"), [(100, 0, 0), (NBYTES - 1, 3, 1), (NBYTES, 3, 25)])
def test_a_mapping_too_small_for_its_headers_is_refused(nbytes: int, slots: int, consumers: int) -> None:
    with pytest.raises(ValueError):
        _native.Headers(bytearray(nbytes), slots, consumers, 1)


def test_slots_and_consumers_out_of_range_are_refused() -> None:
    headers = _headers()
    for act in (
        lambda: headers.generation(3), lambda: headers.publish(3, 1, 1, 1, 0, 0), lambda: headers.discard(3, 1),
        lambda: headers.lease_state(0, 2, 1, 2), lambda: headers.end_lease(0, 2, 2), lambda: headers.claim(0, 4, 0),
        lambda: headers.claim(2, 1, 0), lambda: headers.late_version(0, 16), lambda: headers.consumer_pid(2),
    ):  # fmt: skip
        with pytest.raises(IndexError):
            act()


def test_headers_hold_their_mapping_until_released() -> None:
    memory = mmap.mmap(-1, 8192)
    headers = _native.Headers(memory, 1, 1, 1)
    with pytest.raises(BufferError):
        memory.close()
    headers.release()
    headers.release()
    memory.close()
    with pytest.raises(RuntimeError, match="after release"):
        headers.generation(0)


def test_only_one_of_many_threads_claims_a_slot() -> None:
    headers = _headers()
    begin = threading.Barrier(4)
    claimed: list[int] = []

    def claim() -> None:
        begin.wait()
        for _ in range(50):
            slot = headers.claim(0, 3, 1_000_000)
            if slot >= 0:
                claimed.append(slot)
                assert headers.publish(slot, headers.generation(slot), 1, 0b1, 0, 0)

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        for slot in range(3):
            headers.end_lease(slot, headers.generation(slot) & ~1, 0)
    for thread in threads:
        thread.join()
    # Every claim moved exactly one slot on by one generation pair.
    assert sum(headers.generation(slot) // 2 for slot in range(3)) == len(claimed) >= 3


def test_ending_a_lease_wakes_a_claim_that_sleeps_in_the_kernel() -> None:
    headers = _headers()
    assert headers.publish(headers.claim(0, 1, 0), 1, 1, 0b1, 0, 0) == 2
    claimed: list[int] = []
    sleeper = threading.Thread(target=lambda: claimed.append(headers.claim(0, 1, 600_000_000_000)))
    sleeper.start()
    while not headers.waiter_count():
        os.sched_yield()
    headers.end_lease(0, 2, 0)
    sleeper.join(20)
    woken = not sleeper.is_alive()
    headers.wake_all()
    sleeper.join()
    assert woken and claimed == [0] and headers.waiter_count() == 0


def test_a_claim_times_out_when_nothing_is_freed() -> None:
    headers = _headers()
    headers.claim(0, 1, 0)
    assert headers.claim(0, 1, 1_000_000) == -1
    assert headers.counters()[4] == 1 and headers.counters()[5] >= 1_000_000


def test_a_mask_is_seen_with_its_generation() -> None:
    headers = _headers()
    slot = headers.claim(0, 1, 0)
    assert headers.generation(slot) == 1 and not headers.is_free(slot)
    assert headers.publish(slot, 1, 77, 0b10, 5, 6) == 2
    assert headers.slot_state(slot) == (2, 0b10, 77, 5, 6, [0, 0])
    assert headers.publish(slot, 1, 77, 0b10, 5, 6) == 0  # not being written any more
    assert not headers.is_free(slot)
    headers.end_lease(slot, 2, 0)  # another consumer's end does not free it
    assert not headers.is_free(slot)
    headers.end_lease(slot, 2, 1)
    assert headers.is_free(slot)

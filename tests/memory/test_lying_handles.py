"""Handles and headers that lie are refused; nothing is read, nothing is freed."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pool_making import LAYOUT, RUN, Ends

from shmstage.errors import InputError, PoolError, ProtocolError, StaleHandleError
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.memory.names import SHM_DIR
from shmstage.memory.reader import PoolReader

OTHER = Layout.of({"x": ("int64", (4,))})


@pytest.mark.parametrize(
    "lie",
    [
        {"slot": 2}, {"slot": -1}, {"slot": 1 << 31}, {"slot": 1 << 32}, {"slot": 1 << 64}, {"slot": -(1 << 70)},
        {"slot": "0"}, {"slot": None}, {"slot": 0.0},
        {"generation": 0}, {"generation": 1}, {"generation": 3}, {"generation": 4}, {"generation": -2},
        {"generation": (1 << 64) - 2}, {"generation": 1 << 64}, {"generation": None},
        {"layout_id": 0}, {"layout_id": 12345}, {"layout_id": OTHER.layout_id}, {"layout_id": 1 << 32},
        {"layout_id": -1}, {"layout_id": [1]}, {"layout_id": None},
        {"slot": 1},  # exists, but never published
    ],
)  # fmt: skip
def test_a_lying_handle_is_a_protocol_error(ends: Ends, lie: dict[str, Any]) -> None:
    """S75"""
    ends.reader.register(OTHER)
    true = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    with pytest.raises(ProtocolError):
        ends.reader.lease(replace(true, **lie))
    ends.reader.lease(true).end()


@pytest.mark.parametrize("generation", [3, 4, 1 << 62, (1 << 64) - 2, 1 << 64, -2, None, 1])
def test_ending_a_lease_that_never_was_frees_nothing(ends: Ends, generation: Any) -> None:
    """S75"""
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    with pytest.raises(ProtocolError):
        ends.reader.end_lease(handle.slot, generation)
    with pytest.raises(ProtocolError):
        ends.reader.end_lease(9, 2)
    assert ends.pool.free_slot_count() == 1
    ends.reader.lease(handle).check()


def _patched(make_ends: Callable[..., Ends], offset: int, value: bytes) -> str:
    name = make_ends().pool.name
    with open(SHM_DIR + name, "r+b") as file:
        file.seek(offset)
        file.write(value)
    return name


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, b"SHMSTAGX", "not a pool"),
        (8, struct.pack("<I", 99), "version 99"),
        (12, struct.pack("<I", 0), "half made"),
        (16, struct.pack("<Q", 5), "epoch 5"),
        (32, struct.pack("<Q", 0), "contradicts"),
        (32, struct.pack("<Q", (1 << 64) - 4096), "contradicts"),
        (40, struct.pack("<Q", 1 << 63), "contradicts"),
        (40, struct.pack("<Q", 0), "contradicts"),
        (48, struct.pack("<I", 0xFFFFFFFF), "contradicts"),
        (48, struct.pack("<I", 0), "contradicts"),
        (56, struct.pack("<I", 25), "contradicts"),
        (56, struct.pack("<I", 0), "contradicts"),
        (60, struct.pack("<I", 8), "contradicts"),
        (256, b"another run\0", "another run"),
        (384, b"/etc/passwd\0", "contradicts"),
        (384, b"/dev/shm/../../etc/passwd\0", "contradicts"),
    ],
)
def test_a_header_that_lies_is_not_attached(
    make_ends: Callable[..., Ends], offset: int, value: bytes, reason: str
) -> None:
    """S75"""
    name = _patched(make_ends, offset, value)
    with pytest.raises(PoolError, match=reason):
        PoolReader.attach(name, run_id=RUN, epoch=1)


def test_a_pool_shorter_than_its_header_says_is_not_attached(make_ends: Callable[..., Ends]) -> None:
    """S75"""
    name = make_ends().pool.name
    os.truncate(SHM_DIR + name, 8192)
    with pytest.raises(PoolError, match="contradicts its size of 8192"):
        PoolReader.attach(name, run_id=RUN, epoch=1)
    os.truncate(SHM_DIR + name, 100)
    with pytest.raises(PoolError, match="not a pool"):
        PoolReader.attach(name, run_id=RUN, epoch=1)


@pytest.mark.parametrize("name", ["", "/", "/etc/passwd", "/shmstage.x", "/../etc/passwd", "/shmstage.0.abcdef.none1"])
def test_a_name_that_is_no_pool_of_ours_is_not_opened(name: str) -> None:
    with pytest.raises(PoolError):
        PoolReader.attach(name, run_id=RUN, epoch=1)


def test_a_lock_file_is_not_a_pool(ends: Ends) -> None:
    with pytest.raises(PoolError, match="not the name of a pool"):
        PoolReader.attach(os.path.basename(ends.reader.owner.lock_path), run_id=RUN, epoch=1)


def test_an_unknown_consumer_another_run_and_another_epoch_are_refused(ends: Ends) -> None:
    for consumer in (1, -1, 24):
        with pytest.raises(InputError):
            PoolReader.attach(ends.pool.name, run_id=RUN, epoch=1, consumer=consumer)
    with pytest.raises(PoolError, match="belongs to run"):
        PoolReader.attach(ends.pool.name, run_id="other", epoch=1)
    with pytest.raises(PoolError, match="epoch 1, not 2"):
        PoolReader.attach(ends.pool.name, run_id=RUN, epoch=2)


def test_a_handle_is_stale_once_the_header_says_another_epoch(make_ends: Callable[..., Ends]) -> None:
    """S52"""
    ends = make_ends()
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    with open(SHM_DIR + ends.pool.name, "r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", 2))
    with pytest.raises(StaleHandleError, match="epoch"):
        ends.reader.lease(handle)


def test_handles_of_many_numbers_never_crash_the_reader(ends: Ends) -> None:
    """S75"""
    ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    numbers = [-(1 << 64), -1, 0, 1, 2, 3, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 64) - 1, 1 << 64]
    for slot in numbers:
        for generation in numbers:
            handle = Handle(slot, generation, LAYOUT.layout_id)
            if (slot, generation) == (0, 2):
                continue
            with pytest.raises(ProtocolError):
                ends.reader.lease(handle)

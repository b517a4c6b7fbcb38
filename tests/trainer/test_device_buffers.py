from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from shmstage.errors import CancelledError, StaleHandleError, TrainerError, WaitTimeoutError
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.trainer import aliasing
from shmstage.trainer.device_buffers import DeviceBuffers
from shmstage.trainer.placement import Placement
from shmstage.trainer.tokens import TokenWatcher

LAYOUT = Layout.of({"x": ("float32", (4, 16)), "late": ("float32", (4,))}, late=["late"])
DEADLINE_S = 30.0


class Lease:
    """A slot in private memory; it turns stale at the ``stale_at``-th check."""

    def __init__(self, index: int = 0, *, stale_at: int = 0, offset: int = 0) -> None:
        self.handle = Handle(0, 2, LAYOUT.layout_id, step=1, index=index)
        memory = aligned_buffer(LAYOUT.nbytes, 64, offset)
        self.views = LAYOUT.views(memory, 0, late=False)
        self.late_views = LAYOUT.views(memory, 0, late=True)
        self.views["x"].fill(index)
        self.late_views["late"].fill(-index)
        self.log: list[str] = []
        self._stale_at = stale_at

    def check(self) -> None:
        self.log.append("check")
        if self.log.count("check") == self._stale_at:
            raise StaleHandleError("the slot has moved on")

    def end(self) -> None:
        self.log.append("end")


@pytest.fixture
def watcher() -> Iterator[TokenWatcher]:
    watcher = TokenWatcher("test", at_once=True)
    yield watcher
    watcher.close()


def buffers_of(watcher: TokenWatcher, count: int = 2, **options: Any) -> DeviceBuffers:
    return DeviceBuffers(count, watcher.watch, **{"timeout_s": DEADLINE_S, **options})


@pytest.fixture
def shardings() -> dict[str, jax.sharding.Sharding]:
    return dict.fromkeys(("x", "late"), SingleDeviceSharding(jax.local_devices()[0]))


Shardings = dict[str, jax.sharding.Sharding]


def test_all_fields_arrive_late_ones_last(watcher: TokenWatcher, shardings: Shardings) -> None:
    arrays = buffers_of(watcher).upload(Lease(3), shardings).take()
    assert list(arrays) == ["x", "late"]
    assert np.array_equal(arrays["x"], np.full((4, 16), 3))
    assert np.array_equal(arrays["late"], np.full(4, -3))


def test_the_generation_is_checked_before_and_after_the_copy_and_then_the_lease_ends(
    watcher: TokenWatcher, shardings: Shardings
) -> None:
    """S58"""
    lease = Lease()
    buffers_of(watcher).upload(lease, shardings)
    assert lease.log == ["check", "check", "end"]


@pytest.mark.parametrize("stale_at", [1, 2])
def test_a_slot_that_moves_on_while_it_is_copied_stages_nothing(
    watcher: TokenWatcher, shardings: Shardings, stale_at: int
) -> None:
    buffers = buffers_of(watcher, 1)
    lease = Lease(stale_at=stale_at)
    with pytest.raises(StaleHandleError):
        buffers.upload(lease, shardings)
    assert "end" not in lease.log
    assert np.array_equal(buffers.upload(Lease(5), shardings).take()["x"], np.full((4, 16), 5))


def test_where_uploads_read_the_slot_the_lease_ends_on_readiness(
    watcher: TokenWatcher, shardings: Shardings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S58"""
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    lease, over = Lease(4, offset=4), threading.Event()
    batch = buffers_of(watcher).upload(lease, shardings, lambda ready_ns, error: over.set())
    assert over.wait(DEADLINE_S)
    assert lease.log == ["check", "check", "end"]
    lease.views["x"].fill(99)
    assert np.array_equal(batch.take()["x"], np.full((4, 16), 4))


@pytest.mark.parametrize("reads_slot", [False, True])
def test_the_part_of_one_of_several_hosts_goes_either_way_in_one_call(
    watcher: TokenWatcher, shardings: Shardings, monkeypatch: pytest.MonkeyPatch, reads_slot: bool
) -> None:
    if reads_slot:
        monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    calls: list[int] = []
    device_put = jax.device_put

    def counted(leaves: Any, devices: Any) -> Any:
        calls.append(len(leaves))
        return device_put(leaves, devices)

    def own_put(views: Any, shardings: Any) -> Any:
        raise AssertionError("an engine's own way knows nothing of other hosts")

    monkeypatch.setattr(jax, "device_put", counted)
    lease, over = Lease(5, offset=4 if reads_slot else 0), threading.Event()
    spread = Placement(LAYOUT, LAYOUT, shardings).spread
    assert spread is not None
    buffers = buffers_of(watcher, put=own_put)
    batch = buffers.upload(lease, shardings, lambda ready_ns, error: over.set(), spread=spread)
    assert over.wait(DEADLINE_S)
    assert lease.log == ["check", "check", "end"]
    assert calls == [2]
    for view in (lease.views["x"], lease.late_views["late"]):
        view.fill(99)  # the slot is free now
    arrays = batch.take()
    assert np.array_equal(arrays["x"], np.full((4, 16), 5))
    assert np.array_equal(arrays["late"], np.full(4, -5))
    assert arrays["x"].sharding == shardings["x"]


def test_where_uploads_read_the_slot_a_stale_one_is_reported(
    watcher: TokenWatcher, shardings: Shardings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    errors: list[str] = []
    buffers_of(watcher).upload(Lease(stale_at=2, offset=4), shardings, lambda ready_ns, error: errors.append(error))
    watcher.drain(DEADLINE_S)
    assert errors == ["the slot has moved on"]


def test_where_uploads_read_the_slot_a_lease_that_cannot_be_ended_is_reported(
    watcher: TokenWatcher, shardings: Shardings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    monkeypatch.setattr(Lease, "end", lambda lease: (_ for _ in ()).throw(ValueError("unmapped")))
    errors: list[str] = []
    buffers_of(watcher).upload(Lease(offset=4), shardings, lambda ready_ns, error: errors.append(error))
    watcher.drain(1.0)
    assert errors == ["ValueError: unmapped"]


def test_a_kept_lease_is_the_callers_to_end(watcher: TokenWatcher, shardings: Shardings) -> None:
    lease = Lease()
    buffers_of(watcher).upload(lease, shardings, keep_lease=True)
    assert "end" not in lease.log


def test_a_place_is_free_when_settled_resolved_and_dropped_in_any_order(
    watcher: TokenWatcher, shardings: Shardings
) -> None:
    """S58"""
    def settle() -> None:
        buffers.settled(0)

    def resolve() -> None:
        resolver()

    def drop() -> None:
        arrays.clear()

    for order in ((settle, resolve, drop), (drop, settle, resolve), (resolve, drop, settle)):
        buffers = buffers_of(watcher, 1)
        batch = buffers.upload(Lease(), shardings)
        resolver, arrays = buffers.resolver(0), batch.take()
        for act in order:
            assert buffers.retired() == []
            act()
            aliasing.nudge()
        assert buffers.retired() == [0]


def test_a_replayed_places_first_token_does_not_free_it(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1)
    batch = buffers.upload(Lease(), shardings)
    first = buffers.resolver(0)
    batch.take()
    aliasing.nudge()
    first()
    replay = buffers.resolver(0)
    buffers.settled(0)
    first()  # told twice
    assert buffers.retired() == []
    replay()
    assert buffers.retired() == [0]


def test_late_news_of_an_earlier_use_retires_nothing(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1)
    first = buffers.upload(Lease(), shardings)
    stale_resolver = buffers.resolver(0)
    buffers.discard(first)
    second = buffers.upload(Lease(), shardings)
    buffers.settled(0)
    second.take()
    aliasing.nudge()
    stale_resolver()
    assert buffers.retired() == []


def test_a_discarded_batch_frees_its_place(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1)
    for index in range(3):
        buffers.discard(buffers.upload(Lease(index), shardings))


def test_waiting_in_vain_is_noticed_at_once(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1)
    batch = buffers.upload(Lease(7), shardings)
    with pytest.raises(TrainerError, match=r"1\.7@0:2 is not trained or not settled"):
        buffers.upload(Lease(), shardings)
    buffers.discard(batch)


def test_a_place_still_computing_is_named_at_the_deadline(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1, timeout_s=0.01)
    buffers.upload(Lease(7), shardings).take()
    buffers.settled(0)
    with pytest.raises(WaitTimeoutError, match=r"1\.7@0:2 is still being computed"):
        buffers.upload(Lease(), shardings)


def test_a_wait_ends_when_it_is_cancelled(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1, cancelled=lambda: True)
    buffers.upload(Lease(), shardings).take()
    buffers.settled(0)
    with pytest.raises(CancelledError):
        buffers.upload(Lease(), shardings)


def test_a_place_serves_layouts_of_any_size(watcher: TokenWatcher, shardings: Shardings) -> None:
    buffers = buffers_of(watcher, 1)
    for size in (16, 4096, 8):
        layout = Layout.of({"x": ("float32", (size,))})
        lease = Lease()
        lease.handle = Handle(0, 2, layout.layout_id)
        lease.views, lease.late_views = layout.views(aligned_buffer(layout.nbytes), 0), {}
        lease.views["x"].fill(size)
        batch = buffers.upload(lease, shardings)
        assert np.array_equal(batch.arrays["x"], np.full(size, size))
        buffers.discard(batch)


def test_watched_work_is_reported_in_order_with_its_failures() -> None:
    class Token:
        def __init__(self, error: str = "") -> None:
            self._error = error

        def block_until_ready(self) -> None:
            if self._error:
                raise RuntimeError(self._error)

    stamps = iter((10, 20, 30))
    watcher = TokenWatcher("test", clock_ns=lambda: next(stamps))
    told: list[tuple[int, str]] = []
    for token in (Token(), Token("bad\nlong story"), Token()):
        watcher.watch(token, lambda ready_ns, error: told.append((ready_ns, error)))
    watcher.close()
    assert told == [(10, ""), (20, "RuntimeError: bad"), (30, "")]

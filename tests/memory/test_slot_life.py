"""The life of a slot: claimed, published, leased, free again; and every way to leave that path."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_making import LAYOUT, RUN, Ends

from shmstage.errors import (
    ForkedError,
    InputError,
    LayoutError,
    ProtocolError,
    SlotStateError,
    StaleHandleError,
    StoppedError,
    WaitTimeoutError,
)
from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader


def test_a_published_slot_is_read_back_read_only(ends: Ends) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    slot.views["tokens"][...] = np.arange(16).reshape(2, 8)
    handle = slot.publish(digest=b"d" * 16, rows=2, step=3, index=1, is_final=True, loss_tokens=9, segments=4)
    assert (handle.generation, handle.rows, handle.loss_tokens, handle.is_final) == (2, 2, 9, True)
    with ends.reader.lease(handle) as lease:
        tokens = lease.views["tokens"]
        assert tokens.tolist() == np.arange(16).reshape(2, 8).tolist()
        with pytest.raises(ValueError, match="read-only"):
            tokens[0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            tokens.setflags(write=True)
        lease.check()
        del tokens


def test_payloads_are_64_byte_aligned_and_shifted_on_request(make_ends: Callable[..., Ends]) -> None:
    for shift in (0, 4):
        ends = make_ends(payload_shift=shift)
        for _ in range(2):
            slot = ends.pool.acquire(LAYOUT, timeout_s=1)
            assert {view.ctypes.data % 64 for view in slot.views.values()} == {shift}
            slot.views["logps"][...] = slot.index
            with ends.reader.lease(slot.publish()) as lease:
                assert {view.ctypes.data % 64 for view in lease.views.values()} == {shift}
                assert lease.late_views["logps"].max() == slot.index


def test_nothing_can_be_written_after_publication(ends: Ends) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    kept = slot.views["tokens"]
    slot.publish()
    with pytest.raises(ValueError, match="read-only"):
        kept[...] = 1
    with pytest.raises(SlotStateError):
        _ = slot.views
    with pytest.raises(SlotStateError):
        slot.publish()
    slot.abandon()  # harmless
    assert ends.pool.counters()["abandoned"] == 0


def test_a_leased_slot_is_not_handed_out_and_a_freed_one_is(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1)
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    assert ends.pool.free_slot_count() == 0
    with pytest.raises(WaitTimeoutError):
        ends.pool.acquire(LAYOUT, timeout_s=0)
    ends.reader.lease(handle).end()
    assert ends.pool.free_slot_count() == 1
    assert ends.pool.acquire(LAYOUT, timeout_s=0).publish().generation == 4


def test_ending_a_lease_twice_is_harmless(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1)
    first = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    lease = ends.reader.lease(first)
    lease.end()
    lease.end()
    second = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    ends.reader.end_lease(first.slot, first.generation)  # of the generation before: must not free this one
    assert ends.pool.free_slot_count() == 0
    assert ends.pool.counters()["ended_leases"] == 1
    ends.reader.lease(second).end()
    ends.reader.end_lease(first.slot, first.generation)  # cells go forward only: this must not hold it again
    assert ends.pool.free_slot_count() == 1


def test_an_ended_lease_can_neither_be_read_nor_taken_again(ends: Ends) -> None:
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    lease = ends.reader.lease(handle)
    lease.end()
    with pytest.raises(SlotStateError):
        _ = lease.views
    with pytest.raises(SlotStateError):
        _ = lease.late_views
    with pytest.raises(StaleHandleError, match="already ended"):
        ends.reader.lease(handle)


def test_a_slot_is_free_only_when_every_targeted_consumer_has_ended(identity: ProcessIdentity) -> None:
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=1, consumers=3, identity=identity)
    readers = [PoolReader.attach(pool.name, run_id=RUN, epoch=1, consumer=c) for c in range(3)]
    for reader in readers:
        reader.register(LAYOUT)
    handle = pool.acquire(LAYOUT, timeout_s=1).publish()
    for reader in readers:
        assert pool.free_slot_count() == 0
        reader.lease(handle).end()
    assert pool.free_slot_count() == 1
    handle = pool.acquire(LAYOUT, timeout_s=1).publish(consumers=0b101)
    with pytest.raises(ProtocolError, match="not published for consumer 1"):
        readers[1].lease(handle)
    readers[0].lease(handle).end()
    assert pool.free_slot_count() == 0
    pool.end_leases_of(2)  # as after its proven death
    assert pool.free_slot_count() == 1
    for reader in readers:
        reader.close()
    pool.close()


def test_stale_generation_is_refused(make_ends: Callable[..., Ends]) -> None:
    """S48"""
    ends = make_ends(slots=1)
    old = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    lease = ends.reader.lease(old)
    ends.pool.end_leases_of(0)  # the slot is taken away under the lease
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    with pytest.raises(StaleHandleError, match="moved on to generation 3"):
        lease.check()  # while it is being overwritten
    slot.publish()
    with pytest.raises(StaleHandleError, match="moved on to generation 4"):
        lease.check()
    with pytest.raises(StaleHandleError):
        ends.reader.lease(old)
    lease.end()  # too late, and harmless
    assert ends.pool.free_slot_count() == 0


def test_an_abandoned_writer_moves_on_to_the_next_even_generation(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1)
    with pytest.raises(RuntimeError, match="packer"), ends.pool.acquire(LAYOUT, timeout_s=1) as slot:
        raise RuntimeError("packer")
    with pytest.raises(SlotStateError):
        _ = slot.views
    assert ends.pool.free_slot_count() == 1
    assert ends.pool.acquire(LAYOUT, timeout_s=0).publish().generation == 4  # 2 was skipped: nothing names it
    assert ends.pool.counters()["abandoned"] == 1


def test_a_generation_nobody_published_cannot_be_leased(ends: Ends) -> None:
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    ends.reader.lease(handle).end()
    ends.pool.acquire(LAYOUT, timeout_s=1).abandon()
    with pytest.raises(ProtocolError, match="not published for"):
        ends.reader.lease(Handle(0, 4, LAYOUT.layout_id))


def test_a_withdrawn_slot_is_free_and_its_handle_stale(ends: Ends) -> None:
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    ends.pool.withdraw(handle)
    assert ends.pool.free_slot_count() == 2
    with pytest.raises(StaleHandleError):
        ends.reader.lease(handle)
    with pytest.raises(StaleHandleError):
        ends.pool.withdraw(handle)
    ends.reader.end_lease(handle.slot, handle.generation)  # as after a handshake that lists it
    assert ends.pool.acquire(LAYOUT, timeout_s=0).publish().generation == 6


def test_a_slot_being_written_cannot_be_withdrawn(ends: Ends) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    for generation in (1, 2, -1, 1 << 70):
        with pytest.raises(StaleHandleError):
            ends.pool.withdraw(Handle(0, generation, LAYOUT.layout_id))
    assert slot.publish().generation == 2


def test_a_slot_published_for_nobody_is_free_at_once(ends: Ends) -> None:
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish(consumers=0)
    assert ends.pool.free_slot_count() == 2
    with pytest.raises(ProtocolError, match="not published for"):
        ends.reader.lease(handle)


def test_aux_slots_are_never_taken_by_an_ordinary_acquire(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1, aux_slots=1)
    ordinary = ends.pool.acquire(LAYOUT, timeout_s=0)
    with pytest.raises(WaitTimeoutError):
        ends.pool.acquire(LAYOUT, timeout_s=0)
    aux = ends.pool.acquire(LAYOUT, timeout_s=0, aux=True)
    assert (ordinary.index, aux.index) == (0, 1)
    with pytest.raises(WaitTimeoutError):
        ends.pool.acquire(LAYOUT, timeout_s=0, aux=True)


def test_a_timeout_names_who_holds_every_slot(ends: Ends) -> None:
    ends.pool.acquire(LAYOUT, timeout_s=1).publish(step=7, index=2)
    ends.pool.acquire(LAYOUT, timeout_s=1)
    with pytest.raises(WaitTimeoutError) as caught:
        ends.pool.acquire(LAYOUT, timeout_s=0.01)
    text = str(caught.value)
    assert "slot 0 generation 2 (micro-batch 7.2) is held by consumer 0 (pid " in text
    assert "slot 1 is being written" in text and "0.01 s" in text


def test_a_pool_without_aux_slots_says_so_instead_of_waiting_for_nobody(ends: Ends) -> None:
    with pytest.raises(WaitTimeoutError, match="no such slots"):
        ends.pool.acquire(LAYOUT, timeout_s=0, aux=True)


def test_a_wait_ends_when_asked_to_stop(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1)
    ends.pool.acquire(LAYOUT, timeout_s=1)
    answers = iter([False, True])
    with pytest.raises(StoppedError):
        ends.pool.acquire(LAYOUT, timeout_s=60, stop=lambda: next(answers))


def test_a_waiting_producer_wakes_when_a_lease_ends(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1)
    handle = ends.pool.acquire(LAYOUT, timeout_s=1).publish()
    asked = threading.Event()

    def asked_once() -> bool:
        asked.set()
        return False

    got: list[int] = []
    waiter = threading.Thread(
        target=lambda: got.append(ends.pool.acquire(LAYOUT, timeout_s=60, stop=asked_once).publish().generation)
    )
    waiter.start()
    assert asked.wait(10)
    ends.reader.lease(handle).end()
    waiter.join(10)
    assert got == [4]


def test_a_layout_must_be_registered_and_fit(ends: Ends) -> None:
    other = Layout.of({"x": ("int8", (5,))})
    with pytest.raises(LayoutError, match="not registered"):
        ends.pool.acquire(other, timeout_s=0)
    assert ends.pool.register(other) == other.layout_id
    handle = ends.pool.acquire(other, timeout_s=0).publish()
    with pytest.raises(ProtocolError, match="not registered"):
        ends.reader.lease(handle)
    ends.reader.register(other)
    assert ends.reader.lease(handle).views["x"].shape == (5,)
    big = Layout.of({"x": ("int8", (1 << 20,))})
    for end in (ends.pool, ends.reader):
        with pytest.raises(LayoutError, match="does not fit"):
            end.register(big)
        assert big.layout_id not in end.layouts


@pytest.mark.parametrize(
    "arguments", [{"step": -1}, {"step": 1 << 64}, {"index": 1 << 32}, {"digest": b"short"}, {"consumers": 2}]
)
def test_what_no_header_can_hold_is_refused_and_the_slot_stays_writable(ends: Ends, arguments: dict[str, int]) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    with pytest.raises(InputError):
        slot.publish(**arguments)  # type: ignore[arg-type]
    slot.views["tokens"][...] = 1
    assert slot.publish().generation == 2


def test_late_fields_are_written_by_the_reader_that_may_and_carry_a_version(make_ends: Callable[..., Ends]) -> None:
    for shift in (0, 4):
        ends = make_ends(reader={"writes_late": True}, payload_shift=shift)
        slot = ends.pool.acquire(LAYOUT, timeout_s=1)
        slot.views["mask"][...] = 3
        slot.views["logps"][...] = np.arange(16).reshape(2, 8)
        handle = slot.publish()
        lease = ends.reader.lease(handle)
        assert lease.late_version("logps") == 0
        assert lease.late_views["logps"].tolist() == np.arange(16).reshape(2, 8).tolist()  # as the producer left it
        lease.late_views["logps"][...] = 1.5
        lease.commit_late("logps")
        other = ends.reader.lease(handle)
        assert other.late_version("logps") == 1 and other.late_views["logps"].min() == 1.5
        assert lease.views["mask"].max() == 3
        with pytest.raises(LayoutError, match="not a late field"):
            lease.commit_late("mask")
        lease.end()
        again = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=1).publish())
        assert again.late_version("logps") == 0  # a new generation starts over


def test_late_fields_of_other_readers_are_read_only(ends: Ends) -> None:
    lease = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=1).publish())
    assert not lease.late_views["logps"].flags.writeable
    assert "logps" not in lease.views


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["write", "publish", "abandon", "lease", "end", "again", "withdraw"]), max_size=30))
def test_any_sequence_of_acts_keeps_generations_going_forward(acts: list[str]) -> None:
    identity = ProcessIdentity.create(RUN, "orchestrator")
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
    reader.register(LAYOUT)
    writing, published, leased, ended = [], [], [], []
    seen: dict[int, int] = {0: 0, 1: 0}
    for act in acts:
        if act == "write" and pool.free_slot_count():
            writing.append(pool.acquire(LAYOUT, timeout_s=0))
        elif act == "publish" and writing:
            published.append(writing.pop(0).publish())
            handle = published[-1]
            assert handle.generation % 2 == 0 and handle.generation > seen[handle.slot]
            seen[handle.slot] = handle.generation
        elif act == "abandon" and writing:
            writing.pop(0).abandon()
        elif act == "lease" and published:
            leased.append(reader.lease(published.pop(0)))
        elif act == "end" and leased:
            leased[0].end()
            ended.append(leased.pop(0).handle)
        elif act == "again" and ended:
            reader.end_lease(ended[0].slot, ended[0].generation)
        elif act == "withdraw" and published:
            pool.withdraw(published.pop(0))
        # Held are exactly the slots written, published or leased.
        assert pool.free_slot_count() == 2 - len(writing) - len(published) - len(leased)
        assert [lease.check() for lease in leased] == [None] * len(leased)
    del leased[:], writing[:]
    reader.close()
    pool.close()
    identity.close()


def test_a_forked_child_neither_publishes_nor_abandons_its_parents_slot(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = ends.pool.acquire(LAYOUT, timeout_s=1)
    with monkeypatch.context() as in_child:
        in_child.setattr("shmstage.memory.slots.os.getpid", lambda: 1)
        with pytest.raises(ForkedError, match="a forked child must not publish it"):
            slot.publish()
        slot.abandon()
    assert slot.publish().generation == 2


def test_ending_the_leases_of_a_dead_consumer_leaves_those_of_the_others(identity: ProcessIdentity) -> None:
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, consumers=2, identity=identity)
    living = PoolReader.attach(pool.name, run_id=RUN, epoch=1, consumer=0)
    living.register(LAYOUT)
    lease = living.lease(pool.acquire(LAYOUT, timeout_s=1).publish())
    pool.end_leases_of(1)
    assert pool.free_slot_count() == 1
    lease.check()
    lease.end()
    assert pool.free_slot_count() == 2
    living.close()
    pool.close()


def test_a_late_field_of_a_slot_that_was_taken_away_is_not_committed(make_ends: Callable[..., Ends]) -> None:
    ends = make_ends(slots=1, reader={"writes_late": True})
    lease = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=1).publish())
    ends.pool.end_leases_of(0)
    newer = ends.reader.lease(ends.pool.acquire(LAYOUT, timeout_s=1).publish())
    with pytest.raises(StaleHandleError, match="moved on to generation 4"):
        lease.commit_late("logps")
    assert newer.late_version("logps") == 0

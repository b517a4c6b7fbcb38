"""The owner's side of one pool of shared memory: make it, hand out free slots, take them back, remove it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from shmstage import _native
from shmstage.errors import (
    ForkedError,
    InputError,
    LayoutError,
    PeerLostError,
    PoolError,
    StaleHandleError,
    StoppedError,
    WaitTimeoutError,
)
from shmstage.memory.cells import Cells
from shmstage.memory.facts import COUNTERS, unended_leases
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.limits import Limit, format_nbytes
from shmstage.memory.mapping import Geometry, Mapping
from shmstage.memory.reservation import REMEDY, Backing, Numa, make_pool_file
from shmstage.memory.slots import WritableSlot

# How often a wait looks at its peers and stop condition; a freed slot wakes it at once.
_LOOK_EVERY_S = 0.05


@final
class Pool:
    """One epoch's slots. Only the process that made it writes slots; it refuses use in a forked child.

    Attributes: ``name`` (with the slash), ``epoch``, ``layouts`` (id → layout), ``slots``, ``aux_slots``,
    ``nbytes`` (of the whole file), ``backing`` (what the memory is made of), ``cells`` (for pools whose newest
    publication is what counts).
    """

    def __init__(
        self,
        path: str,
        mapping: Mapping,
        headers: _native.Headers,
        geometry: Geometry,
        backing: Backing,
        *,
        epoch: int,
        aux_slots: int,
        consumers: int,
        run_id: str,
    ) -> None:
        """Use ``create``."""
        self.cells = Cells(headers, run_id, self._check_backed)
        self.name = "/" + os.path.basename(path)
        self.epoch = epoch
        self.layouts: dict[int, Layout] = {}
        self.slots = geometry.slot_count - aux_slots
        self.aux_slots = aux_slots
        self.nbytes = geometry.pool_nbytes
        self.backing = backing
        self._geometry = geometry
        self._mapping = mapping
        self._headers = headers
        self._all_consumers = (1 << consumers) - 1
        self._pid = os.getpid()
        self._writing: dict[int, WritableSlot] = {}
        self._waiting = 0
        self._idle = threading.Condition()
        self._closed = False
        self._unlink = weakref.finalize(self, _unlink, path, self._pid)

    @classmethod
    def create(
        cls,
        run_id: str,
        *,
        epoch: int,
        layouts: Sequence[Layout],
        slots: int,
        aux_slots: int = 0,
        consumers: int = 1,
        identity: ProcessIdentity,
        limits: list[Limit] | None = None,
        payload_shift: int = 0,
        numa: Numa = "default",
        remedy: str = REMEDY,
    ) -> Pool:
        """Reserves and pre-faults a new pool whose slots hold the largest of ``layouts``.

        ``aux_slots`` are extra slots that only ``acquire(aux=True)`` takes. ``numa`` "interleave" spreads the pages
        over all NUMA nodes, "default" leaves each where it is first touched: here, by this thread. Raises
        ``BudgetError``, before anything is allocated, if the pool exceeds the smallest of ``limits`` (read now if
        ``None``), which ends with ``remedy``, and ``InputError`` for counts out of range.
        """
        identity.check_not_forked()
        if not layouts or slots < 1 or aux_slots < 0 or payload_shift not in (0, 4) or epoch < 0:
            raise InputError(
                f"a pool needs a layout, slots >= 1, aux_slots >= 0, epoch >= 0, payload_shift 0 or 4; got "
                f"{len(layouts)} layouts, {slots=}, {aux_slots=}, {epoch=}, {payload_shift=}"
            )
        if not 1 <= consumers <= _native.MAX_CONSUMERS:
            raise InputError(f"consumers = {consumers}; a pool serves 1 to {_native.MAX_CONSUMERS}")
        slot_nbytes = max(layout.nbytes for layout in layouts)
        geometry = Geometry(slots + aux_slots, slot_nbytes, payload_shift)
        path, mapping, headers, backing = make_pool_file(
            run_id,
            geometry,
            epoch=epoch,
            aux_slots=aux_slots,
            consumers=consumers,
            identity=identity,
            limits=limits,
            numa=numa,
            remedy=remedy,
        )
        counts = {"aux_slots": aux_slots, "consumers": consumers}
        pool = cls(path, mapping, headers, geometry, backing, epoch=epoch, run_id=run_id, **counts)
        for layout in layouts:
            pool.register(layout)
        return pool

    def register(self, layout: Layout) -> int:
        """Makes a layout known, once; returns its id. Raises ``LayoutError`` if no slot can hold it."""
        self._check_usable()
        known = self.layouts.setdefault(layout.layout_id, layout)
        if known != layout:
            raise LayoutError(f"layout id {layout.layout_id} already names another layout; rename a field")
        if layout.nbytes > self._geometry.slot_nbytes:
            del self.layouts[layout.layout_id]
            raise LayoutError(
                f"a layout of {layout.nbytes} bytes does not fit a slot of {self._geometry.slot_nbytes} bytes; "
                "give it to Pool.create"
            )
        return layout.layout_id

    def acquire(
        self,
        layout: Layout,
        *,
        timeout_s: float,
        aux: bool = False,
        only: int | None = None,
        peers: Sequence[PeerWatch] = (),
        stop: Callable[[], bool] | None = None,
    ) -> WritableSlot:
        """Waits for a free slot, or for the one numbered ``only``, and claims it for writing.

        Raises ``WaitTimeoutError`` at the deadline, naming who holds each slot; ``PeerLostError`` when one of
        ``peers`` is dead; ``StoppedError`` when ``stop()``, asked every 50 ms, is true; ``LayoutError`` for a
        layout that was not registered.
        """
        self._check_usable()
        if layout.layout_id not in self.layouts:
            raise LayoutError(f"layout {layout.layout_id} is not registered with pool {self.name}")
        first, last = (self.slots, self.slots + self.aux_slots) if aux else (0, self.slots)
        if only is not None:
            first, last = only, only + 1
        index = self._headers.claim(first, last, 0)
        if index < 0:
            index = self._wait(first, last, timeout_s, peers, stop)
        array = self._mapping.array
        assert array is not None
        views = layout.views(array, self._geometry.payload_of(index))
        slot = WritableSlot(
            self._headers, index, layout, views, self._all_consumers, self._check_backed, self._writing.pop
        )
        self._writing[index] = slot
        return slot

    def withdraw(self, handle: Handle) -> None:
        """Takes back a published slot that was never sent. Raises ``StaleHandleError`` if it has moved on."""
        self._check_usable()
        try:
            done = handle.generation % 2 == 0 and self._headers.discard(handle.slot, handle.generation)
        except (TypeError, IndexError):
            done = False
        if not done:
            raise StaleHandleError(f"cannot withdraw {handle.describe()}: the slot is not at that generation")

    def late_views(self, handle: Handle) -> dict[str, np.ndarray[Any, Any]]:
        """The late fields of a published slot, writable; each has one writer, and the caller knows which are its own.

        Raises ``StaleHandleError`` if the slot has moved on.
        """
        self._check_usable()
        self._check_current(handle)
        array = self._mapping.array
        assert array is not None
        return self.layouts[handle.layout_id].views(array, self._geometry.payload_of(handle.slot), late=True)

    def commit_late(self, handle: Handle, name: str) -> None:
        """Makes what was written into a late field count: its version word goes up by one."""
        self._check_usable()
        self._check_current(handle)
        self._headers.bump_late_version(handle.slot, self.layouts[handle.layout_id].late_names.index(name))

    def _check_current(self, handle: Handle) -> None:
        generation = self._headers.generation(handle.slot)
        if generation != handle.generation:
            raise StaleHandleError(f"{handle.describe()}: the slot has moved on to generation {generation}")

    def end_leases_of(self, consumer: int) -> None:
        """Ends every lease of a consumer that is proven dead, in its stead."""
        self._check_usable()
        if not 0 <= consumer < self._all_consumers.bit_length():
            raise InputError(f"consumer {consumer} is not one of {self._all_consumers.bit_length()}")
        for slot in range(self._geometry.slot_count):
            generation, mask, *_ = self._headers.slot_state(slot)
            if generation % 2 == 0 and mask >> consumer & 1:
                self._headers.end_lease(slot, generation, consumer)

    def held_by(self, consumer: int) -> str:
        """The slots that a consumer holds, in words for an error message; "" if there are none."""
        self._check_usable()
        slots = range(self._geometry.slot_count)
        parts = [f"slot {slot} {self._microbatch_in(slot)}" for slot in slots if consumer in self._holders_of(slot)]
        return ", ".join(parts)

    def free_slot_count(self) -> int:
        """How many slots, aux slots not counted, could be acquired now."""
        self._check_usable()
        return sum(self._headers.is_free(slot) for slot in range(self.slots))

    def counters(self) -> dict[str, int]:
        """Events since creation: published, ended_leases, withdrawn, abandoned, waits, and waited_ns."""
        self._check_usable()
        return dict(zip(COUNTERS, self._headers.counters(), strict=False))

    def heartbeat(self, now_ns: int) -> None:
        """Notes in the header that the owner made progress; for people who look, nothing is decided by it."""
        self._check_usable()
        self._headers.set_heartbeat(now_ns)

    def record_error(self, text: str) -> None:
        """Notes the last error in the header, where a tool can read it although this process hangs."""
        self._check_usable()
        self._headers.set_last_error(text.encode()[:250].decode(errors="ignore"))

    def close(self) -> None:
        """Unlinks and unmaps; idempotent. Waiting threads leave with ``PoolError``.

        If arrays over the pool are still alive, it is unlinked all the same, the memory stays mapped until the
        last of them is gone, and ``PoolError`` says so.
        """
        self._check_not_forked()
        self._unlink()
        if not self._closed:
            self._closed = True
            with self._idle:
                while self._waiting:
                    if self._mapping.is_backed():
                        self._headers.wake_all()
                    self._idle.wait(_LOOK_EVERY_S)
            for slot in list(self._writing.values()):
                slot.abandon()
            self._headers.release()
            self.cells.close()
        if not self._mapping.close():
            raise PoolError(
                f"pool {self.name} is unlinked, but arrays over its slots are still alive; drop them, and its "
                f"{format_nbytes(self.nbytes)} are given back"
            )

    def _wait(
        self,
        first: int,
        last: int,
        timeout_s: float,
        peers: Sequence[PeerWatch],
        stop: Callable[[], bool] | None,
    ) -> int:
        deadline = time.monotonic() + timeout_s
        with self._idle:
            self._waiting += 1
        try:
            while True:
                if self._closed:
                    raise PoolError(f"pool {self.name} was closed while a slot was waited for")
                if stop is not None and stop():
                    raise StoppedError(f"stopped while waiting for a free slot of {self.name}")
                for peer in peers:
                    if peer.dead():
                        raise PeerLostError(f"{peer.describe()} is dead; {self._holders(first, last)}")
                self._check_backed()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WaitTimeoutError(
                        f"no free slot of {self.name} within {timeout_s:g} s: {self._holders(first, last)}"
                    )
                index = self._headers.claim(first, last, int(min(left_s, _LOOK_EVERY_S) * 1e9))
                if index >= 0:
                    return index
        finally:
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _holders(self, first: int, last: int) -> str:
        """Which slots are held, at which generation, by whom."""
        parts = []
        for slot in range(first, last):
            generation = self._headers.generation(slot)
            if generation % 2:
                parts.append(f"slot {slot} is being written (generation {generation})")
                continue
            for consumer, done in self._holders_of(slot).items():
                pid = self._headers.consumer_pid(consumer) or "not attached"
                parts.append(
                    f"slot {slot} {self._microbatch_in(slot)} is held by consumer {consumer} (pid {pid}, ended up to "
                    f"{done})"
                )
        return "; ".join(parts) or ("no slot is held now" if last > first else "the pool has no such slots")

    def _holders_of(self, slot: int) -> dict[int, int]:
        """Consumers whose lease of what is published in a slot has not ended → the last generation they ended."""
        generation, mask, *_, ended = self._headers.slot_state(slot)
        return unended_leases(generation, mask, ended)

    def _microbatch_in(self, slot: int) -> str:
        generation, _, _, step, index, _ = self._headers.slot_state(slot)
        return f"generation {generation} (micro-batch {step}.{index})"

    def _check_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"pool {self.name} of process {self._pid} used in forked child; use spawn")

    def _check_usable(self) -> None:
        self._check_not_forked()
        if self._closed:
            raise PoolError(f"pool {self.name} is closed")
        self._check_backed()

    def _check_backed(self) -> None:
        self._mapping.check_backed(self.name)


def _unlink(path: str, pid: int) -> None:
    # Also runs at exit and from the collector; in a forked child the file is the parent's.
    if os.getpid() == pid:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

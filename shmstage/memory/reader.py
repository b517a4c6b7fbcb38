"""A consumer's side of a pool: attach, lease what a handle names, end the lease. It never unlinks anything."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import numpy as np

from shmstage import _native
from shmstage.errors import (
    ForkedError,
    InputError,
    LayoutError,
    PoolError,
    ProtocolError,
    ShmstageError,
    SlotStateError,
    StaleHandleError,
)
from shmstage.memory.cells import Cell
from shmstage.memory.facts import checked_facts
from shmstage.memory.failures import cannot
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import PAGE_NBYTES, Layout
from shmstage.memory.mapping import Geometry, Mapping
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, is_ours

# What native/slots.h answers about a handle; 0 is "valid".
_MOVED_ON, _NOT_PUBLISHED, _OTHER_LAYOUT, _NOT_TARGETED, _ENDED, _OTHER_EPOCH = range(1, 7)


@final
class PoolReader:
    """Headers mapped read-write, payload read-only. Refuses use in a forked child.

    Attributes: ``name``, ``epoch``, ``consumer`` (as which it ends leases), ``layouts`` (id → layout),
    ``slots`` (aux slots not counted), ``owner`` (a watch on the producer's life).
    """

    def __init__(
        self,
        name: str,
        descriptor: int,
        facts: dict[str, Any],
        *,
        consumer: int,
        writes_late: bool,
    ) -> None:
        """Use ``attach``."""
        self.name = name
        self.epoch: int = facts["epoch"]
        self.consumer = consumer
        self.slots: int = facts["slot_count"] - facts["aux_slot_count"]
        self.layouts: dict[int, Layout] = {}
        self._pid = os.getpid()
        shift = facts["payload_shift"]
        slot_nbytes = facts["slot_stride"] - (PAGE_NBYTES if shift else 0)
        self._geometry = Geometry(facts["slot_count"], slot_nbytes, shift)
        self._late_windows: dict[tuple[int, int], Mapping] = {}
        self._closed = False
        with ExitStack() as undo:  # whatever fails, nothing of it stays mapped or open
            self.owner = PeerWatch(facts["lock_path"], facts["owner_pid"], facts["owner_start_ticks"])
            undo.callback(self.owner.close)
            self._payload = Mapping(descriptor, facts["nbytes"], writable=False)
            undo.callback(self._payload.close)
            _prefault_for_reading(self._payload)
            self._header_mapping = Mapping(descriptor, self._geometry.payload_offset, writable=True)
            undo.callback(self._header_mapping.close)
            self._late_descriptor = _duplicated(descriptor) if writes_late else -1
            self._close_late_descriptor = weakref.finalize(self, _close, self._late_descriptor)
            counts = (facts["slot_count"], facts["consumer_count"])
            self._headers = _native.Headers(self._header_mapping.mmap, *counts, self.epoch)
            self._headers.set_consumer_pid(consumer, self._pid)
            undo.pop_all()

    @classmethod
    def attach(
        cls, name: str, *, run_id: str, epoch: int, consumer: int = 0, writes_late: bool = False
    ) -> PoolReader:
        """Maps a pool made by another process of this user.

        ``writes_late`` maps the late regions writable: for the trainer alone. Raises ``PoolError`` if the pool is
        not there, half made, malformed, or of another run or epoch; ``InputError`` for an unknown consumer.
        """
        file_name = name.removeprefix("/")
        if not is_ours(file_name) or file_name.endswith(LOCK_SUFFIX):
            raise PoolError(f"{name[:80]!r} is not the name of a pool of this user")
        path = os.path.join(SHM_DIR, file_name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise cannot(f"cannot open pool {name}", error) from None
        try:
            facts = checked_facts(name, descriptor, run_id, epoch)
            if not 0 <= consumer < facts["consumer_count"]:
                raise InputError(f"consumer {consumer}: pool {name} has {facts['consumer_count']}")
            return cls(name, descriptor, facts, consumer=consumer, writes_late=writes_late)
        finally:
            os.close(descriptor)

    def register(self, layout: Layout) -> int:
        """Makes a layout known, once; returns its id. Raises ``LayoutError`` if no slot can hold it."""
        self._check_usable()
        if layout.nbytes > self._geometry.slot_nbytes:
            raise LayoutError(
                f"a layout of {layout.nbytes} bytes does not fit a slot of {self._geometry.slot_nbytes} bytes"
            )
        if self.layouts.setdefault(layout.layout_id, layout) != layout:
            raise LayoutError(f"layout id {layout.layout_id} already names another layout")
        return layout.layout_id

    def claim_cell(self, identity: ProcessIdentity) -> Cell:
        """A place among the readers of the newest publication, as the process that ``identity`` is.

        Raises ``EndpointBusyError`` if all are taken.
        """
        self._check_usable()
        return Cell(self._headers, identity, self.name, self._check_backed)

    def published_in(self, slot: int) -> Handle:
        """A handle of what is published in a slot. For slots held through a cell: others may move on meanwhile.

        Raises ``ProtocolError`` if there is no such slot.
        """
        self._check_usable()
        try:
            generation, _, layout_id, step, index, _ = self._headers.slot_state(slot)
        except (TypeError, IndexError):  # the number came out of shared memory
            raise ProtocolError(f"pool {self.name} has no slot {slot}; it has {self._geometry.slot_count}") from None
        return Handle(slot, generation, layout_id, step=step, index=index)

    def lease(self, handle: Handle, on_end: Callable[[Handle], None] | None = None) -> Lease:
        """The arrays a handle names. Raises ``StaleHandleError`` if the slot has moved on, ``ProtocolError`` if
        the handle lies: no such slot, layout or published generation, or not for this consumer. ``PoolError`` if the
        file was shrunk: each lease, and each use of it, looks at its size first. ``on_end`` is told, by the thread that
        ends it, that the producer may write again.
        """
        self._check_usable()
        self._check_handle(handle)
        return Lease(self, handle, self.layouts[handle.layout_id], on_end)

    def check(self, handle: Handle) -> None:
        """Raises what ``lease`` would raise now; leases nothing."""
        self._check_usable()
        self._check_handle(handle)

    def end_lease(self, slot: int, generation: int) -> None:
        """Tells the producer that this consumer will not read the slot's generation again; twice is harmless.

        Raises ``ProtocolError`` for a slot or generation that was never published.
        """
        self._check_usable()
        try:
            known = self._headers.end_lease(slot, generation, self.consumer)
        except (TypeError, IndexError):
            known = False
        if not known:
            raise ProtocolError(f"slot {slot} generation {generation} of pool {self.name} was never published")

    def held_by_owner(self) -> str:
        """What the owner has in hand, in words for the error that tells its death; "" if there is nothing.

        Slots it was writing, and slots published for this consumer whose leases have not ended.
        """
        self._check_usable()
        parts = []
        for slot in range(self._geometry.slot_count):
            generation, mask, _, step, index, ended = self._headers.slot_state(slot)
            if generation % 2:
                parts.append(f"slot {slot} was being written (generation {generation})")
            elif mask >> self.consumer & 1 and ended[self.consumer] < generation:
                what = f"slot {slot} generation {generation} (micro-batch {step}.{index})"
                parts.append(f"{what} was published and not ended")
        return ", ".join(parts)

    def slot_ranges(self) -> list[tuple[int, int]]:
        """(address, nbytes) of each slot's pages in the read-only mapping, aux slots too; nothing in common."""
        self._check_usable()
        assert self._payload.array is not None
        base, stride = self._payload.array.ctypes.data + self._geometry.payload_offset, self._geometry.slot_stride
        return [(base + slot * stride, stride) for slot in range(self._geometry.slot_count)]

    def close(self) -> None:
        """Unmaps; idempotent. If leased arrays are alive the memory stays until the last is gone: ``PoolError``."""
        self._check_not_forked()
        if not self._closed:
            self._closed = True
            self._headers.release()
            self._header_mapping.close()
            self.owner.close()
            self._close_late_descriptor()
        # Every mapping is let go of before any is complained about.
        unmapped = [mapping.close() for mapping in (self._payload, *self._late_windows.values())]
        if not all(unmapped):
            raise PoolError(f"arrays over slots of pool {self.name} are still alive; drop them to unmap it")

    def _check_handle(self, handle: Handle) -> None:
        try:
            state = self._headers.lease_state(handle.slot, handle.generation, handle.layout_id, self.consumer)
            if not state and handle.layout_id in self.layouts:
                return
        except (TypeError, IndexError):
            raise ProtocolError(
                f"{handle.describe()} names nothing in pool {self.name} of {self._geometry.slot_count} slots"
            ) from None
        raise self._refusal(handle, state)

    def _refusal(self, handle: Handle, state: int) -> ShmstageError:
        current = self._headers.generation(handle.slot)
        who = f"{handle.describe()} in pool {self.name}"
        if state == _MOVED_ON:
            return StaleHandleError(f"{who}: the slot has moved on to generation {current}")
        if state == _ENDED:
            return StaleHandleError(f"{who}: consumer {self.consumer} has already ended this lease")
        if state == _OTHER_EPOCH:
            return StaleHandleError(f"{who}: the pool is no longer of epoch {self.epoch}")
        if state == _NOT_PUBLISHED:
            return ProtocolError(f"{who}: never published, the slot is at generation {current}")
        if state == _NOT_TARGETED:
            return ProtocolError(f"{who}: not published for consumer {self.consumer}")
        if state == _OTHER_LAYOUT:
            return ProtocolError(f"{who}: the slot was published with another layout")
        return ProtocolError(f"{who}: layout {handle.layout_id} is not registered; register it first")

    def _views(self, slot: int, layout: Layout, late: bool) -> dict[str, np.ndarray[Any, Any]]:
        array = self._payload.array
        if array is None:
            raise PoolError(f"pool {self.name} is closed")
        base = self._geometry.payload_of(slot)
        if not (late and layout.late_names and self._late_descriptor >= 0):
            return layout.views(array, base, late=late)
        begin = base + layout.late_offset
        window_begin = begin // PAGE_NBYTES * PAGE_NBYTES
        window = self._late_windows.get((slot, layout.layout_id))
        if window is None:
            nbytes = base + layout.nbytes - window_begin
            window = Mapping(self._late_descriptor, nbytes, writable=True, offset=window_begin)
            self._late_windows[slot, layout.layout_id] = window
        assert window.array is not None
        return layout.views(window.array, base - window_begin, late=True)

    def _check_not_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(f"reader of pool {self.name} used in a forked child; use spawn")

    def _check_usable(self) -> None:
        self._check_not_forked()
        if self._closed:
            raise PoolError(f"reader of pool {self.name} is closed")
        self._check_backed()

    def _check_backed(self) -> None:
        self._payload.check_backed(self.name)


@final
class Lease:
    """The right to read one published slot until ``end``. As a context manager it ends itself."""

    __slots__ = ("__weakref__", "_late", "_layout", "_on_end", "_reader", "_views", "handle")

    def __init__(
        self, reader: PoolReader, handle: Handle, layout: Layout, on_end: Callable[[Handle], None] | None = None
    ) -> None:
        """Made by ``PoolReader.lease``."""
        self.handle = handle
        self._reader = reader
        self._layout = layout
        self._on_end = on_end
        self._views: dict[str, np.ndarray[Any, Any]] | None = reader._views(handle.slot, layout, False)
        self._late: dict[str, np.ndarray[Any, Any]] | None = None

    @property
    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        """Field name → read-only array in the slot, late fields not among them."""
        if self._views is None:
            raise SlotStateError(f"{self.handle.describe()} read after its lease ended")
        return self._views

    @property
    def late_views(self) -> dict[str, np.ndarray[Any, Any]]:
        """The late fields; writable if the reader was attached with ``writes_late``."""
        if self._views is None:
            raise SlotStateError(f"late fields of {self.handle.describe()} used after its lease ended")
        if self._late is None:
            self._late = self._reader._views(self.handle.slot, self._layout, True)
        return self._late

    def late_version(self, name: str) -> int:
        """How often a late field was committed in this generation; 0 = as the producer left it."""
        self._reader._check_usable()
        return self._reader._headers.late_version(self.handle.slot, self._late_index(name))

    def commit_late(self, name: str) -> None:
        """Makes what was written into ``late_views[name]`` count: its version word goes up by one."""
        self.check()
        self._reader._headers.bump_late_version(self.handle.slot, self._late_index(name))

    def check(self) -> None:
        """Call after reading: raises ``StaleHandleError`` if the slot moved on meanwhile."""
        self._reader._check_usable()
        self._reader._check_handle(self.handle)

    def end(self) -> None:
        """Gives the slot back and wakes the producer; idempotent. The arrays must not be read after it.

        Once the reader is closed it only lets go of the arrays.
        """
        if self._views is not None:
            try:
                if not self._reader._closed:
                    self._reader.end_lease(self.handle.slot, self.handle.generation)
                    if self._on_end is not None:
                        self._on_end(self.handle)
            finally:
                self._views = self._late = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _late_index(self, name: str) -> int:
        try:
            return self._layout.late_names.index(name)
        except ValueError:
            raise LayoutError(f"{name!r} is not a late field; there are {self._layout.late_names}") from None


def _prefault_for_reading(mapping: Mapping) -> None:
    # 28 ms per GB once, instead of 115 ms per GB spread over the first reads. On an old kernel it does nothing.
    _native.populate(mapping.mmap, False)


def _duplicated(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        raise cannot("cannot keep a pool open for its late fields", error) from None


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)

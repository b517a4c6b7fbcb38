"""The trainer's end of one epoch's pool: its reader, its layouts, and where each layout's fields go on the devices.

A trainer that spans hosts is told two layouts for each kind of micro-batch: the local one of this host's slots, which
every layout id names, and the global one of the whole, whose shapes the arrays have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Literal, final

import jax

from shmstage.errors import HostRegistrationError, LayoutError, PoolError, ProtocolError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.memory.reader import Lease, PoolReader
from shmstage.trainer.aliasing import refuse_narrowing
from shmstage.trainer.engine import TrainEngine
from shmstage.trainer.host_registry import devices_of, registry_for
from shmstage.trainer.placement import Placement
from shmstage.trainer.registration import HostRegistry, RegisteredMemory
from shmstage.wire.messages import Hello


@final
class Attachment:
    """Made by a handshake, closed by the next one."""

    def __init__(
        self,
        hello: Hello,
        engine: TrainEngine,
        *,
        host_register: Literal["auto", "off"] = "auto",
        registry_for: Callable[[Collection[Any]], HostRegistry] = registry_for,
        events: Events = NO_EVENTS,
    ) -> None:
        """Map ``hello.pool`` and register its slots with the runtime of the devices that the engine uploads to.

        Raises ``PoolError`` if it is not the one announced, ``LayoutError`` for a bad layout.
        """
        layouts = [Layout.from_wire(each) for each in hello.layouts]
        for layout in layouts:
            refuse_narrowing((field.name, field.dtype) for field in layout.fields)
        placements = _placements(layouts, [Layout.from_wire(each) for each in hello.global_layouts], engine)
        self._events = events
        self.run_id = hello.run_id
        self.epoch = hello.epoch
        self.pool = hello.pool
        self._layouts = {layout.layout_id: layout for layout in layouts}
        self._placements = {each.local.layout_id: each for each in placements}
        self._reader = PoolReader.attach(hello.pool, run_id=hello.run_id, epoch=hello.epoch, writes_late=True)

        def open_registry() -> HostRegistry:
            if host_register == "off":
                raise HostRegistrationError('host_register = "off"')
            return registry_for(devices_of(s for each in placements for s in each.shardings.values()))

        try:
            for layout in layouts:
                self._reader.register(layout)
            self._registered = RegisteredMemory(self._reader.slot_ranges(), open_registry)
        except BaseException:
            self._reader.close()
            raise
        self.registration = self._registered.registration

    def layout(self, layout_id: int) -> Layout:
        if layout_id not in self._layouts:
            raise ProtocolError(f"layout {layout_id} was not announced; known are {sorted(self._layouts)}")
        return self._layouts[layout_id]

    def placement(self, layout_id: int) -> Placement:
        return self._placements[self.layout(layout_id).layout_id]

    def example(self, layout_id: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What a micro-batch of this layout looks like to the compiler."""
        return self.placement(layout_id).example()

    def lease(self, handle: Handle) -> Lease:
        self.layout(handle.layout_id)
        return self._reader.lease(handle, self._note_ended)

    def check(self, handle: Handle) -> None:
        """Raise what ``lease`` would; nothing is leased."""
        self.layout(handle.layout_id)
        self._reader.check(handle)

    def is_aux(self, handle: Handle) -> bool:
        """True for a slot that no micro-batch to be trained lies in."""
        return handle.slot >= self._reader.slots

    def held_by_owner(self) -> str:
        """Slots that the producer has in hand, in words for the log that tells its death; it may hold no more."""
        try:
            return self._reader.held_by_owner()
        except PoolError as error:
            return f"slots that cannot be told: {error}"

    def _note_ended(self, handle: Handle) -> None:
        if self.is_aux(handle):  # its step and index would name a micro-batch that is trained
            self._events.note("lease_ended", slot=handle.slot, generation=handle.generation)
        else:
            self._events.note(
                "lease_ended", step=handle.step, index=handle.index, request_id=handle.request_id, slot=handle.slot,
                generation=handle.generation,
            )  # fmt: skip

    def end_withdrawn(self, pairs: Sequence[Sequence[int]]) -> None:
        """End the leases of slots the producer took back; one it has reused since needs no ending."""
        for slot, generation in pairs:
            with suppress(ProtocolError):
                self._reader.end_lease(slot, generation)
                self._events.note("lease_ended", slot=slot, generation=generation)

    def close(self) -> None:
        """Unmap, when no upload reads the pool any more. Raises ``PoolError`` while arrays over it live."""
        self._registered.close()
        self._reader.close()


def _placements(local: Sequence[Layout], whole: Sequence[Layout], engine: TrainEngine) -> list[Placement]:
    if not whole:
        return [Placement(layout, None, engine.shardings(layout)) for layout in local]
    if len(whole) != len(local):
        raise ProtocolError(f"hello: {len(local)} layouts of slots and {len(whole)} of whole micro-batches; want pairs")
    found = [Placement(part, each, engine.shardings(each)) for part, each in zip(local, whole, strict=True)]
    if len({each.local.layout_id for each in found}) < len(found):
        raise LayoutError("two kinds of micro-batches have the same part here; make their rows or tokens differ")
    return found

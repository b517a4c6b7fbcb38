"""``shmstage.Producer``: arrays into shared memory, handles to whoever consumes them. Knows nothing of training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, final

import numpy as np

from shmstage.errors import (
    InputError,
    LayoutError,
    PeerLostError,
    PoolError,
    ProtocolError,
    ShmstageError,
    StoppedError,
    TransportError,
)
from shmstage.memory.handle import NO_DIGEST, Handle
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.slots import WritableSlot
from shmstage.memory.sweep import sweep
from shmstage.transport.channel import ServerChannel
from shmstage.transport.consumer_cell import ConsumerCell, watch_of
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.receiver import Receiver
from shmstage.transport.zmq import ZmqServerChannel
from shmstage.wire.codec import decode, encode
from shmstage.wire.handles import handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Attach, Attached, Detach, EndOfStream, Message, Published

log = logging.getLogger(__name__)

Fields = Mapping[str, tuple[str, tuple[int, ...]]] | Mapping[str, np.ndarray[Any, Any]]
_EPOCH = 1  # a producer that starts again makes a pool with another name; it has no epochs to tell apart


@final
class Producer:
    """Owns a pool of ``slots`` slots and serves ``consumers`` consumers, each of which reads every slot.

    A slot is free again when all of them have ended their leases: a slow consumer holds the producer back, nothing
    is dropped. What is published before a consumer has attached waits for it.

    For one thread, except that consumers may attach at any time.
    """

    def __init__(
        self,
        name: str,
        fields: Fields,
        *,
        slots: int = 3,
        consumers: int = 1,
        channel: ServerChannel | None = None,
    ) -> None:
        """Opens ``name`` for consumers of the same user on this host.

        ``fields`` is name → (dtype name, shape), or name → example array whose dtype and shape count. Raises
        ``EndpointBusyError`` if a living process uses the name, ``BudgetError`` if the pool does not fit,
        ``LayoutError`` for a field that cannot lie in a slot.
        """
        layout = _layout_of(fields)
        self.name = name
        self._layout = layout
        self._cells = [ConsumerCell(index) for index in range(consumers)]
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False
        self._watches: list[PeerWatch] = []
        self._open: set[ProducerSlot] = set()
        with ExitStack() as undo:
            # The name first: its owner is the only one who may sweep and reserve under it.
            self._channel = channel or ZmqServerChannel.bind(endpoint_for(name, "producer"))
            undo.callback(self._channel.close)
            self._identity = ProcessIdentity.create(name, "producer")
            undo.callback(self._identity.close)
            sweep(name)
            self._pool = Pool.create(
                name, epoch=_EPOCH, layouts=[layout], slots=slots, consumers=consumers, identity=self._identity
            )
            undo.callback(self._pool.close)
            self._receiver = Receiver(self._channel, self._on_frame, name="shmstage-producer")
            undo.callback(self._receiver.close)  # a user's interrupt may come while the thread starts
            self._receiver.start()
            undo.pop_all()

    @property
    def layout(self) -> Layout:
        """Where the fields lie in a slot."""
        return self._layout

    def acquire(self, timeout_s: float = 60.0) -> ProducerSlot:
        """Waits for a free slot to write into.

        Raises ``PeerLostError`` once a consumer has died or left early, until another takes its place;
        ``WaitTimeoutError`` naming who holds which slot.
        """
        self._check()
        with self._lock:
            self._raise_if_lost()
        slot = ProducerSlot(self, self._claim(timeout_s))
        self._open.add(slot)
        return slot

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the stream, waits until every consumer has read everything, and gives all back; harmless twice.

        Raises ``WaitTimeoutError`` or ``PeerLostError`` for slots that were not read; everything is given back
        all the same.
        """
        self._close(timeout_s)

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error there is no end of stream: consumers must see that the producer failed.
        self._close(60.0 if kind is None else None)

    # --- the thread of the user ------------------------------------------------------------------------------

    def _publish(self, slot: WritableSlot, **described: Any) -> Handle:
        self._check()
        try:
            handle_to_wire(Handle(0, 0, 0, **described))  # before the slot is: it could never be sent
        except ProtocolError as error:
            raise InputError(str(error)) from None
        with self._lock:
            self._raise_if_lost()
            handle = slot.publish(**described)
            for cell in self._cells:
                cell.waiting.append(handle)
                self._flush(cell)
            return handle

    def _claim(self, timeout_s: float) -> WritableSlot:
        try:
            return self._pool.acquire(self._layout, timeout_s=timeout_s, stop=self._tend)
        except StoppedError:
            with self._lock:
                self._raise_if_lost()
            raise

    def _close(self, timeout_s: float | None) -> None:
        if self._closed:
            return
        self._channel.wake()  # refuses here in a forked child, before anything is touched
        self._closed = True
        for slot in list(self._open):
            slot.abandon()
        with ExitStack() as stack:
            # In reverse: the identity goes last, a producer without one counts as dead.
            stack.callback(self._identity.close)
            for watch in self._watches:
                stack.callback(watch.close)
            stack.callback(self._close_pool)
            stack.callback(self._receiver.close)
            if timeout_s is not None:
                self._finish(timeout_s)

    def _finish(self, timeout_s: float) -> None:
        with self._lock:
            self._ended = True
            for cell in self._cells:
                self._flush(cell)
        deadline = time.monotonic() + timeout_s
        held: list[WritableSlot] = []
        try:
            # Whoever holds every slot knows that nobody reads any more.
            while len(held) < self._pool.slots:
                held.append(self._claim(max(0.0, deadline - time.monotonic())))
        finally:
            for slot in held:
                slot.abandon()

    def _close_pool(self) -> None:
        try:
            self._pool.close()
        except PoolError as error:
            log.info("%s", error)  # unlinked all the same; the caller's arrays keep the memory a little longer

    def _check(self) -> None:
        if self._closed:
            raise TransportError(f"producer {self.name!r} is closed")
        self._receiver.check()

    # --- both threads, under the lock -------------------------------------------------------------------------

    def _tend(self) -> bool:
        """Asked every 50 ms while a slot is waited for: sends what could not be sent; True if a consumer is lost."""
        with self._lock:
            self._notice_deaths()
            for cell in self._cells:
                self._flush(cell)
            return any(cell.lost for cell in self._cells)

    def _notice_deaths(self) -> None:
        for cell in self._cells:
            if cell.attached and cell.watch is not None and cell.watch.dead():
                self._lose(cell, "died")

    def _raise_if_lost(self) -> None:
        self._notice_deaths()
        for cell in self._cells:
            if cell.lost:
                raise PeerLostError(f"{cell.lost}; start another consumer of {self.name!r} to take its place")

    def _lose(self, cell: ConsumerCell, reason: str) -> None:
        held = self._pool.held_by(cell.index)
        cell.lose(f"{reason}, holding {held}" if held else reason)
        self._pool.end_leases_of(cell.index)

    def _flush(self, cell: ConsumerCell) -> None:
        """Sends what waits for an attached consumer, then the end of the stream if it has come."""
        if not cell.attached:
            return
        while cell.waiting:
            if not self._send(cell, Published(cell.sent + 1, handle_to_wire(cell.waiting[0]))):
                return
            cell.sent += 1
            del cell.waiting[0]
        if self._ended and not cell.end_sent:
            cell.end_sent = self._send(cell, EndOfStream(cell.sent))

    def _send(self, cell: ConsumerCell, message: Message) -> bool:
        try:
            self._channel.send(cell.peer, encode(message))
        except TransportError as error:
            # It is dead or about to be found so, or it connects anew and asks again with its attach.
            log.info("%s: %s", cell.describe(), error)
            return False
        return True

    # --- the receiving thread -----------------------------------------------------------------------------------

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode(frame)
            with self._lock:
                if isinstance(message, Attach):
                    self._on_attach(peer, message)
                elif isinstance(message, Detach):
                    self._on_detach(peer, message)
                else:
                    raise ProtocolError(f"a producer takes no {type(message).__name__}")
        except ShmstageError as error:
            log.warning("refused a frame of %d bytes from %s: %s", len(frame), peer.hex(), error)
            self._answer(peer, None, str(error)[:1000])

    def _on_attach(self, peer: bytes, attach: Attach) -> None:
        cell = next((cell for cell in self._cells if cell.attached and cell.peer == peer), None)
        if cell is None:
            cell = self._vacant_cell()
            if cell is None:
                raise ProtocolError(
                    f"producer {self.name!r} serves {len(self._cells)} consumers, and all are there: "
                    f"{', '.join(cell.describe() for cell in self._cells)}; give it more with consumers="
                )
            watch = watch_of(attach)
            self._watches.append(watch)
            cell.occupy(peer, watch)
        self._answer(peer, cell, "")
        self._flush(cell)

    def _vacant_cell(self) -> ConsumerCell | None:
        self._notice_deaths()
        return next((cell for cell in self._cells if not cell.attached and not cell.finished), None)

    def _on_detach(self, peer: bytes, detach: Detach) -> None:
        for cell in self._cells:
            if not cell.attached or cell.peer != peer:
                continue
            # Said back, so that the consumer gives up its identity only when it will not be taken for dead.
            self._send(cell, detach)
            if self._ended and not cell.waiting and detach.received == cell.sent:
                cell.finished = True
                self._pool.end_leases_of(cell.index)
            else:
                self._lose(cell, f"left after {detach.received} of {cell.sent + len(cell.waiting)} slots")

    def _answer(self, peer: bytes, cell: ConsumerCell | None, refusal: str) -> None:
        me = self._identity
        attached = Attached(
            PROTOCOL_VERSION, self.name, _EPOCH, self._pool.name, [self._layout.to_wire()],
            cell.index if cell else 0, me.lock_path, me.pid, me.start_ticks, refusal,
        )  # fmt: skip
        try:
            self._channel.send(peer, encode(attached))
        except TransportError as error:
            log.info("not answered: %s", error)


@final
class ProducerSlot:
    """A free slot: fill ``views``, then ``publish``. As a context manager it gives back what is not published."""

    def __init__(self, producer: Producer, slot: WritableSlot) -> None:
        """Made by ``Producer.acquire``."""
        self._producer = producer
        self._slot = slot

    @property
    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        """Field name → writable array; holds what the slot held before. ``SlotStateError`` once published."""
        return self._slot.views

    def publish(
        self,
        *,
        digest: bytes = NO_DIGEST,
        rows: int = 0,
        step: int = 0,
        index: int = 0,
        is_final: bool = False,
        loss_tokens: int = 0,
        segments: int = 0,
    ) -> Handle:
        """Makes the arrays readable and sends the handle; what is given here arrives with it unchanged.

        Raises ``SlotStateError`` when called twice, ``PeerLostError`` if a consumer is gone: then the slot is still
        yours.
        """
        handle = self._producer._publish(
            self._slot, digest=digest, rows=rows, step=step, index=index, is_final=is_final, loss_tokens=loss_tokens,
            segments=segments,
        )  # fmt: skip
        self._producer._open.discard(self)
        return handle

    def abandon(self) -> None:
        """Gives the slot back unpublished; harmless twice."""
        self._producer._open.discard(self)
        self._slot.abandon()

    def __enter__(self) -> ProducerSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()


def _layout_of(fields: Fields) -> Layout:
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif isinstance(value, tuple) and len(value) == 2:
            specs[name] = value
        else:
            raise LayoutError(f"field {name!r} is {value!r:.60}; want (dtype name, shape) or an example array")
    if specs and arrays:
        raise LayoutError("give all fields as (dtype name, shape) or all as example arrays")
    return Layout.from_arrays(arrays) if arrays else Layout.of(specs)

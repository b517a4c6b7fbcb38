"""``shmstage.Consumer``: arrays out of shared memory, as read-only views. Knows nothing of training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import final

from shmstage.errors import (
    EndpointBusyError,
    PeerLostError,
    PoolError,
    ProtocolError,
    TransportError,
    WaitTimeoutError,
)
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.reader import Lease, PoolReader
from shmstage.transport.channel import Channel
from shmstage.transport.endpoints import endpoint_for
from shmstage.transport.zmq import ZmqChannel
from shmstage.wire.codec import decode, encode
from shmstage.wire.handles import handle_from_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Attach, Attached, Detach, EndOfStream, Message, Published

log = logging.getLogger(__name__)

_ATTACH_EVERY_S = 0.25
_POLL_S = 0.1  # how long a dead producer goes unnoticed
_GOODBYE_S = 1.0
_DRAIN_S = 0.25  # how long its last frames may take out of the kernel's buffers


@final
class Consumer:
    """Reads every slot that a ``Producer`` of the same name publishes, in order.

    ``for lease in consumer:`` ends each lease when the loop goes on; leases taken with ``receive`` are yours to end.
    For one thread; ``Lease.end`` may be called from any.
    """

    def __init__(self, name: str, *, timeout_s: float = 60.0, channel: Channel | None = None) -> None:
        """Waits for the producer and maps its pool.

        Raises ``WaitTimeoutError`` if there is no such producer, ``EndpointBusyError`` if it has all its consumers.
        """
        self.name = name
        self._received = 0
        self._ended = False
        self._closed = False
        with ExitStack() as undo:
            self._channel = channel or ZmqChannel.connect(endpoint_for(name, "producer"))
            undo.callback(self._channel.close)
            self._identity = ProcessIdentity.create(name, "consumer")
            undo.callback(self._identity.close)
            attached = self._attach(timeout_s)
            self._number = attached.consumer
            # If anything fails from here on, the producer sees this consumer's identity end, and its place is free.
            self._reader = PoolReader.attach(
                attached.pool, run_id=name, epoch=attached.epoch, consumer=attached.consumer
            )
            undo.callback(self._reader.close)
            for layout in attached.layouts:
                self._reader.register(Layout.from_wire(layout))
            undo.pop_all()

    def receive(self, timeout_s: float = 60.0) -> Lease | None:
        """The next slot's lease, or None at the end of the stream.

        Its ``views`` are read-only and valid until ``lease.end()``. Raises ``WaitTimeoutError`` if nothing was
        published in time, ``PeerLostError`` if the producer died before the end of the stream.
        """
        if self._closed:
            raise TransportError(f"consumer of {self.name!r} is closed")
        if self._ended:
            return None
        message = self._next(timeout_s)
        if isinstance(message, EndOfStream):
            self._expect(message.published, self._received)
            self._ended = True
            return None
        if isinstance(message, Published):
            self._expect(message.number, self._received + 1)
            self._received = message.number
            return self._reader.lease(handle_from_wire(message.handle))
        raise ProtocolError(f"a consumer takes no {type(message).__name__}")

    def __iter__(self) -> Iterator[Lease]:
        while (lease := self.receive()) is not None:
            with lease:
                yield lease

    def close(self) -> None:
        """Says good-bye and gives everything back, open leases too; harmless twice.

        The producer takes leaving before the end of the stream for a loss.
        """
        if self._closed:
            return
        self._channel.send(encode(Detach(self._number, self._received)))  # refuses here in a forked child
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._channel.close)
            stack.callback(self._identity.close)
            self._hear_goodbye()
            try:
                self._reader.close()
            except PoolError as error:
                log.info("%s", error)  # the caller's arrays keep the mapping a little longer

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hear_goodbye(self) -> None:
        # Without it the producer could see the identity end before it reads the good-bye, and take this for a death.
        deadline = time.monotonic() + _GOODBYE_S
        while time.monotonic() < deadline and not self._reader.owner.dead():
            frame = self._channel.recv(_POLL_S)
            if frame is not None and isinstance(decode(frame), Detach):
                return

    def _attach(self, timeout_s: float) -> Attached:
        me = self._identity
        request = encode(Attach(PROTOCOL_VERSION, me.lock_path, me.pid, me.start_ticks))
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._channel.send(request)
            frame = self._channel.recv(min(left_s, _ATTACH_EVERY_S))
            message = decode(frame) if frame is not None else None
            if isinstance(message, Attached):
                if message.refusal:
                    raise EndpointBusyError(message.refusal)
                return message
        raise WaitTimeoutError(
            f"no producer named {self.name!r} answered within {timeout_s:g} s; start one as the same user, with the "
            "same XDG_RUNTIME_DIR and TMPDIR"
        )

    def _next(self, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        dying = False
        while True:
            left_s = deadline - time.monotonic()
            frame = self._channel.recv(_DRAIN_S if dying else max(0.0, min(left_s, _POLL_S)))
            if frame is not None:
                message = decode(frame)
                if not isinstance(message, Attached):  # the answer to a repeated attach
                    return message
            elif self._reader.owner.dead():
                if dying:
                    raise PeerLostError(
                        f"producer {self.name!r}, {self._reader.owner.describe()}, died or failed after "
                        f"{self._received} slots, before the end of the stream{self._what_it_held()}"
                    )
                dying = True
            elif left_s <= 0:
                raise WaitTimeoutError(
                    f"producer {self.name!r}, {self._reader.owner.describe()}, published nothing within "
                    f"{timeout_s:g} s; {self._received} slots came before"
                )

    def _what_it_held(self) -> str:
        try:
            held = self._reader.held_by_owner()
        except PoolError as error:
            held = f"slots that cannot be told: {error}"
        return f"; {held}" if held else ""

    def _expect(self, got: int, want: int) -> None:
        if got != want:
            raise ProtocolError(f"producer {self.name!r} counts {got} slots where {want} are due: a handle was lost")

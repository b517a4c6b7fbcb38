"""Channels that lose, double, delay and reorder frames as a ``FaultPlan`` says; everything else is the wrapped one's.

With an empty plan they keep the whole channel contract. A delay or a double breaks it on purpose: what is built on a
channel must survive that, too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

from shmstage.errors import TransportError
from shmstage.testing.fault_plan import Effect, FaultPlan, FaultScript, FrameNames
from shmstage.transport.channel import Channel, ServerChannel

Item = tuple[bytes, bytes]
"""(peer, frame); a connecting end has one peer, b""."""

OnFault = Callable[[str, Effect], None]
"""Told (name, effect) after each fault, on the thread that sends or receives: where a test lets its clock jump."""


@dataclass(slots=True)
class _Held:
    inbound: bool
    item: Item
    until: str


@final
class _Passage:
    """Where every frame of both directions passes. Any thread."""

    def __init__(self, plan: FaultPlan, on_fault: OnFault) -> None:
        self.script = FaultScript(plan)
        self._on_fault = on_fault
        self._names = FrameNames()
        self._held: list[_Held] = []
        self._lock = threading.Lock()

    def take(self, item: Item, *, inbound: bool) -> tuple[list[Item], list[Item]]:
        """What passes now, in order: in this frame's direction, and in the other one."""
        with self._lock:
            name = self._names.of(item[1])
            effect, until = self.script.decide(name)
            along = [item] * {Effect.PASS: 1, Effect.DOUBLE: 2}.get(effect, 0)
            back: list[Item] = []
            for held in self._held[:]:
                same_way = held.inbound is inbound
                if fnmatchcase(name, held.until) if held.until else same_way:
                    self._held.remove(held)
                    (along if same_way else back).append(held.item)
            if effect is Effect.DELAY:
                self._held.append(_Held(inbound, item, until))
        if effect is not Effect.PASS:
            self._on_fault(name, effect)
        return along, back

    def forget(self) -> None:
        with self._lock:
            self._held.clear()


def _silently(name: str, effect: Effect) -> None:
    return


@final
class FaultyChannel(Channel):
    """A connecting end. ``script.done`` says what was done to which frames. A frame that is kept ends a wait early."""

    def __init__(self, channel: Channel, plan: FaultPlan, *, on_fault: OnFault = _silently) -> None:
        self._channel = channel
        self._passage = _Passage(plan, on_fault)
        self._ready: deque[bytes] = deque()
        self.script = self._passage.script

    def send(self, frame: bytes) -> bool:
        along, back = self._passage.take((b"", frame), inbound=False)
        self._ready.extend(late for _, late in back)
        taken = [self._channel.send(passing) for _, passing in along]
        self.sent_nbytes = self._channel.sent_nbytes
        return all(taken)  # a lost frame looks sent: whoever sent it cannot know

    def recv(self, timeout_s: float) -> bytes | None:
        frame = None if self._ready else self._channel.recv(timeout_s)
        if frame is not None:
            along, back = self._passage.take((b"", frame), inbound=True)
            self._ready.extend(passing for _, passing in along)
            for _, late in back:
                self._channel.send(late)
        self.sent_nbytes, self.received_nbytes = self._channel.sent_nbytes, self._channel.received_nbytes
        return self._ready.popleft() if self._ready else None

    def descriptor(self) -> int:
        return self._channel.descriptor()

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._ready.clear()
        self._passage.forget()
        self._channel.close()


@final
class FaultyServerChannel(ServerChannel):
    """A bound end; as ``FaultyChannel``. Errors of a frame that is doubled or late concern nobody any more."""

    def __init__(self, channel: ServerChannel, plan: FaultPlan, *, on_fault: OnFault = _silently) -> None:
        self._channel = channel
        self._passage = _Passage(plan, on_fault)
        self._ready: deque[Item] = deque()
        self.script = self._passage.script

    def recv(self, timeout_s: float) -> Item | None:
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            received = self._channel.recv(max(0.0, deadline - time.monotonic()))
            if received is None:
                break
            along, back = self._passage.take(received, inbound=True)
            self._ready.extend(along)
            self._send_late(back)
            if time.monotonic() >= deadline:
                break
        return self._ready.popleft() if self._ready else None

    def send(self, peer: bytes, frame: bytes) -> None:
        along, back = self._passage.take((peer, frame), inbound=False)
        if back:  # another thread may sit in ``recv``
            self._ready.extend(back)
            self._channel.wake()
        own = next((item for item in along if item == (peer, frame)), None)
        if own is not None:
            along.remove(own)
            self._channel.send(*own)
        self._send_late(along)

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        self._ready.clear()
        self._passage.forget()
        self._channel.close()

    def _send_late(self, items: list[Item]) -> None:
        for peer, frame in items:
            with suppress(TransportError):
                self._channel.send(peer, frame)

"""Ours: the slot of shared memory is filled and published, the consumer maps it."""

from __future__ import annotations

import os
import time
from typing import Any

import shmstage
from paths.ends import DEADLINE_S, Arrays
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.layout import Layout
from shmstage.memory.sweep import sweep


class Sender(SenderEnd):
    """One slot: the others of this benchmark have one place, too."""

    def __init__(self, layout: Layout, private: Any, peer: Any) -> None:
        self._name = f"bench-handoff-{os.getpid()}"
        fields = {field.name: (field.dtype, field.shape) for field in layout.fields}
        self._producer = shmstage.Producer(self._name, fields, slots=1)
        self._slot: Any = None
        self._filled = False

    def said(self) -> str:
        return self._name

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        if self._slot is None:
            self._slot = self._producer.acquire(DEADLINE_S)
        filled, self._filled = self._filled, True
        return self._slot.views, filled

    def send(self) -> None:
        self._slot.publish()
        self._slot = None

    def close(self) -> None:
        self._slot = None
        try:
            self._producer.close(10.0)
        finally:
            sweep(self._name)  # what a consumer that was killed has left


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: str, inherited: Any) -> None:
        self._consumer = shmstage.Consumer(said)
        self._lease: Any = None

    def receive(self) -> tuple[Arrays, int]:
        self._lease = self._consumer.receive(DEADLINE_S)
        views = self._lease.views
        return views, time.monotonic_ns()

    def release(self) -> None:
        self._lease.end()
        self._lease = None

    def close(self) -> None:
        self._consumer.close()

"""``multiprocessing.Queue``: the dict of arrays is put, and got."""

from __future__ import annotations

import time
from typing import Any

from paths.ends import DEADLINE_S, Arrays
from paths.ends import Receiver as ReceiverEnd
from paths.ends import Sender as SenderEnd
from shmstage.memory.layout import Layout


def inherited(context: Any) -> Any:
    """A queue reaches a process only when it is started."""
    return context.Queue()


class Sender(SenderEnd):
    def __init__(self, layout: Layout, private: Any, peer: Any) -> None:
        self._views = layout.views(private, 0)
        self._queue = peer.inherited

    def said(self) -> None:
        return None

    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        return self._views, True

    def send(self) -> None:
        self._queue.put(self._views)

    def close(self) -> None:
        # What nobody will read any more must not hold this process up when it ends.
        self._queue.cancel_join_thread()


class Receiver(ReceiverEnd):
    def __init__(self, layout: Layout, said: None, inherited: Any) -> None:
        self._queue = inherited

    def receive(self) -> tuple[Arrays, int]:
        arrays = self._queue.get(timeout=DEADLINE_S)
        return arrays, time.monotonic_ns()

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass

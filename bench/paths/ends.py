"""What a path has to offer: an end in the orchestrator and one in the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from shmstage.memory.layout import Layout

Arrays = Mapping[str, np.ndarray[Any, Any]]
#: how long anything is waited for
DEADLINE_S = 300.0


def span_nbytes(layout: Layout) -> int:
    """Bytes from the first array's first to the last array's last: what travels where a micro-batch is one buffer."""
    return max(field.offset + field.nbytes for field in layout.fields)


class Sender(ABC):
    """In the orchestrator. Modules define ``Sender(layout, private, peer)``: ``private`` is a warm buffer that holds
    the packed micro-batch, for paths that send from private memory; ``peer`` is the process at the other end."""

    @abstractmethod
    def said(self) -> Any:
        """What the receiver is told before it is made."""

    def connect(self, said: Any) -> None:
        """``said`` is what the receiver answered."""
        return

    @abstractmethod
    def place(self, *, fresh: bool) -> tuple[Arrays, bool]:
        """Where the path wants the next micro-batch, and whether the one before is still there whole.

        ``fresh``: as the path is used for the first time for each micro-batch (the whole path is timed); else as
        cheaply as it can be had (what is timed begins when the place is filled).
        """

    @abstractmethod
    def send(self) -> None:
        """Hand off what lies in the place. The place is not written before the receiver has reported."""

    @abstractmethod
    def close(self) -> None: ...


class Receiver(ABC):
    """In the trainer. Modules define ``Receiver(layout, said, inherited)``."""

    def said(self) -> Any:
        """What the sender is told."""
        return None

    @abstractmethod
    def receive(self) -> tuple[Arrays, int]:
        """Waits for the next micro-batch; its arrays, and ``time.monotonic_ns()`` when they could be read."""

    @abstractmethod
    def release(self) -> None:
        """Its arrays are no longer used."""

    @abstractmethod
    def close(self) -> None: ...

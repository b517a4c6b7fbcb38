"""Events that have not been acknowledged, in order. A state machine without socket or thread."""

from __future__ import annotations

from collections import deque
from typing import final


@final
class EventLog:
    """Frames of numbered events, kept until an acknowledgement covers them."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, bytes]] = deque()
        self._last = 0

    @property
    def last(self) -> int:
        """The number of the newest event, 0 before the first."""
        return self._last

    @property
    def first_kept(self) -> int:
        """The number a receiver that knows nothing must start at."""
        return self._kept[0][0] if self._kept else self._last + 1

    def append(self, number: int, frame: bytes) -> None:
        """Numbers come without holes: the emitter counts."""
        if number != self._last + 1:
            raise ValueError(f"event {number} after {self._last}")
        self._last = number
        self._kept.append((number, frame))

    def acknowledge(self, upto: int) -> None:
        """Forgets what has arrived."""
        while self._kept and self._kept[0][0] <= upto:
            self._kept.popleft()

    def discard(self) -> None:
        """Forgets everything: those events meant an epoch that is over."""
        self._kept.clear()

    def frames(self) -> list[bytes]:
        """Every kept frame, oldest first."""
        return [frame for _, frame in self._kept]

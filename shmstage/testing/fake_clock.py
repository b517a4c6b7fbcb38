"""A clock that moves only when told to."""

from __future__ import annotations

from typing import final


@final
class FakeClock:
    """Stands in for ``time.monotonic``: ``clock()`` is seconds, ``clock.now_ns`` the same in nanoseconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        return self._now_s

    @property
    def now_ns(self) -> int:
        """Now, in nanoseconds."""
        return round(self._now_s * 1e9)

    def advance(self, seconds: float) -> None:
        """Moves on by ``seconds`` ≥ 0."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds

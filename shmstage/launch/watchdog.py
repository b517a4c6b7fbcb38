"""Ends a launcher that hangs inside Ray: a driver whose own raylet has died waits for it without an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import final

#: longest that a launcher does not look around: every wait of its own is shorter by far
HANG_S = 180.0
_LOOK_S = 1.0


@final
class Watchdog:
    """While open: calls ``hung`` once, on a thread of its own, when ``beat`` was not called for ``limit_s`` seconds."""

    def __init__(
        self,
        hung: Callable[[], None],
        *,
        limit_s: float = HANG_S,
        look_s: float = _LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hung = hung
        self._limit_s = limit_s
        self._look_s = look_s
        self._clock = clock
        self._beaten_at = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Somebody looks around; any thread."""
        self._beaten_at = self._clock()

    def __enter__(self) -> Watchdog:
        self.beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            if self._clock() - self._beaten_at > self._limit_s:
                self._hung()
                return

"""How long the program waits, and for what: for a planned stage's micro-batch, and for news from the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

from shmstage.errors import WaitTimeoutError


@final
class Patience:
    """``stage_wait_s`` is unset where a planned stage waits as long as the device computes."""

    def __init__(
        self, *, call_timeout_s: float, stage_wait_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call_timeout_s = call_timeout_s
        self._stage_wait_s = stage_wait_s
        self._clock = clock
        self._quiet_since = clock()
        self._stage_wait_began: float | None = None

    def news(self) -> None:
        """Something came, or a call returned."""
        self._quiet_since = self._clock()

    def stage_is_overdue(self, waiting: bool) -> bool:
        """True once per wait, when it has lasted too long; ``waiting``: the stage is what is waited for now."""
        if not waiting or self._stage_wait_s is None:
            self._stage_wait_began = None
            return False
        now = self._clock()
        if self._stage_wait_began is None:
            self._stage_wait_began = now
        if now - self._stage_wait_began <= self._stage_wait_s:
            return False
        self._stage_wait_began = None
        return True

    def check(self, what: str, details: Callable[[], str] = lambda: "") -> None:
        """Raises ``WaitTimeoutError`` if there was no news for ``call_timeout_s``; ``details`` end its text."""
        if self._clock() - self._quiet_since > self._call_timeout_s:
            raise WaitTimeoutError(
                f"nothing from the trainer for {self._call_timeout_s:g} s while waiting for {what}; see its log, "
                f"or raise call_timeout_s{details()}"
            )

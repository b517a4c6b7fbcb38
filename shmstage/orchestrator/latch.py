"""Does staging pay? Three boundaries running where it does not move it one level down; later it is tried again.

    on ──3 bad──▶ after_update ──3 bad──▶ off ──20 boundaries──▶ on (a probe)
                       └───────20 boundaries──▶ on (a probe)

Judged by readiness stamps alone: the wait of a call says nothing about a copy that goes on after it returned.
"""

from __future__ import annotations

from typing import final

from shmstage.orchestrator.schedule_state import Latch as Level
from shmstage.timeline.staging import StagingCost

BAD_BOUNDARIES = 3
PROBE_AFTER = 20


@final
class Latch:
    """Pure but for its counters: fed one boundary after the other, it says where stages may go.

    ``level`` and ``reason`` are what the step line shows. ``staged_after`` is the mode's own order: there is no level
    between on and off then. ``enabled = False`` never moves.
    """

    def __init__(self, *, enabled: bool, min_upload_s: float, staged_after: bool = False) -> None:
        self.level: Level = "on"
        self.reason = "staging pays until shown otherwise" if enabled else "latch = false"
        self._enabled = enabled
        self._min_upload_s = min_upload_s
        self._staged_after = staged_after
        self._bad = 0
        self._boundaries = 0

    def boundary(self, cost: StagingCost | None) -> Level:
        """Take one boundary into account; ``None``: nothing was staged at it."""
        if not self._enabled:
            return self.level
        self._boundaries += 1
        if cost is not None:
            self._judge(cost)
        if self.level != "on" and self._boundaries >= PROBE_AFTER:
            self._move("on", f"probing again after {PROBE_AFTER} boundaries")
        return self.level

    def _judge(self, cost: StagingCost) -> None:
        if cost.upload_s < self._min_upload_s:
            return  # too little to hide: noise would decide
        if cost.pays:
            self._bad = 0
            return
        self._bad += 1
        if self._bad < BAD_BOUNDARIES:
            return
        why = (
            f"at {BAD_BOUNDARIES} boundaries running staging did not pay: exposed {cost.exposed_s:.3f} s + overhead "
            f"{cost.overhead_s:.3f} s >= upload {cost.upload_s:.3f} s at the last"
        )
        lower: Level = "after_update" if self.level == "on" and not self._staged_after else "off"
        self._move(lower, why)

    def _move(self, level: Level, reason: str) -> None:
        self.level, self.reason = level, reason
        self._bad = self._boundaries = 0

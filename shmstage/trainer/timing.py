"""When each micro-batch and update of the last steps was dispatched and became ready, on this process's clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, final

KEPT_STEPS = 8


@dataclass(slots=True)
class _Work:
    request_id: str
    index: int
    dispatch_begin_ns: int
    dispatch_end_ns: int
    ready_ns: int = 0


@final
class StepTiming:
    """Written by the command thread (dispatch) and the watcher (readiness)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, list[_Work]] = {}

    def dispatched(self, step: int, request_id: str, index: int, begin_ns: int, end_ns: int) -> None:
        """``index`` is -1 for the update."""
        with self._lock:
            self._steps.setdefault(step, []).append(_Work(request_id, index, begin_ns, end_ns))
            while len(self._steps) > KEPT_STEPS:
                del self._steps[min(self._steps)]

    def ready(self, step: int, request_id: str, ready_ns: int) -> None:
        with self._lock:
            for work in self._steps.get(step, ()):
                if work.request_id == request_id:
                    work.ready_ns = ready_ns

    def clear(self) -> None:
        with self._lock:
            self._steps.clear()

    def report(self, step: int, now_ns: int) -> dict[str, Any]:
        """Seconds before ``now_ns``: no clocks are compared across hosts. ``ready_ago_s`` is None while it computes."""
        with self._lock:
            works = [self._as_ago(work, now_ns) for work in self._steps.get(step, ())]
        updates = [work for work in works if work["index"] < 0]
        return {
            "step": step,
            "microbatches": [work for work in works if work["index"] >= 0],
            "update": updates[-1] if updates else None,
        }

    @staticmethod
    def _as_ago(work: _Work, now_ns: int) -> dict[str, Any]:
        return {
            "request_id": work.request_id,
            "index": work.index,
            "dispatch_begin_ago_s": (now_ns - work.dispatch_begin_ns) / 1e9,
            "dispatch_end_ago_s": (now_ns - work.dispatch_end_ns) / 1e9,
            "ready_ago_s": (now_ns - work.ready_ns) / 1e9 if work.ready_ns else None,
        }

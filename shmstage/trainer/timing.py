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
    replay: _Work | None = None


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

    def replayed(self, step: int, request_id: str, begin_ns: int, end_ns: int) -> None:
        """The micro-batch overflowed and was dispatched again."""
        with self._lock:
            for work in self._named(step, request_id):
                work.replay = _Work(request_id, work.index, begin_ns, end_ns)

    def ready(self, step: int, request_id: str, ready_ns: int, *, replay: bool = False) -> None:
        with self._lock:
            for work in self._named(step, request_id):
                ended = work.replay if replay else work
                if ended is not None:
                    ended.ready_ns = ready_ns

    def clear(self) -> None:
        with self._lock:
            self._steps.clear()

    def report(self, step: int, now_ns: int) -> dict[str, Any]:
        """Seconds before ``now_ns``: no clocks are compared across hosts. ``ready_ago_s`` is None while it computes.

        It is the replay's where there is one: ``replay`` holds its times, None if the first attempt counted.
        """
        with self._lock:
            works = [self._as_ago(work, now_ns) for work in self._steps.get(step, ())]
        updates = [work for work in works if work["index"] < 0]
        return {
            "step": step,
            "microbatches": [work for work in works if work["index"] >= 0],
            "update": updates[-1] if updates else None,
        }

    def _named(self, step: int, request_id: str) -> list[_Work]:
        return [work for work in self._steps.get(step, ()) if work.request_id == request_id]

    @staticmethod
    def _as_ago(work: _Work, now_ns: int) -> dict[str, Any]:
        times = _times_ago(work, now_ns)
        replay = None if work.replay is None else _times_ago(work.replay, now_ns)
        ready_ago_s = times["ready_ago_s"] if replay is None else replay["ready_ago_s"]
        identity = {"request_id": work.request_id, "index": work.index}
        return {**identity, **times, "ready_ago_s": ready_ago_s, "replay": replay}


def _times_ago(work: _Work, now_ns: int) -> dict[str, float | None]:
    return {
        "dispatch_begin_ago_s": (now_ns - work.dispatch_begin_ns) / 1e9,
        "dispatch_end_ago_s": (now_ns - work.dispatch_end_ns) / 1e9,
        "ready_ago_s": (now_ns - work.ready_ns) / 1e9 if work.ready_ns else None,
    }

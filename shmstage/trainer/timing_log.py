"""One ``TRAINER_STEP_TIMING`` line per step in the trainer's log, for tools that read those; off the command path.

The shape is the field's: ``TRAINER_STEP_TIMING step=N policy_version=V rtt_s=0.000 timing={...}`` with ``"v": 1``,
``"train_step": N``, ``"mb"``: a list of ``{"i", "dispatch_begin_ago_s", "dispatch_end_ago_s", "ready_ago_s"}``,
``"update"``: the same three, and ``"prepare": null``. ``rtt_s`` is the round trip of asking for it: nobody has to ask, so
it is 0. ``policy_version`` is what update N makes.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from shmstage.trainer.timing import StepTiming
from shmstage.wire.messages import TicketEvent, TokenEvent

log = logging.getLogger(__name__)

Event = TokenEvent | TicketEvent


@final
class StepTimingLog:
    """Stands in for ``emit``: passes every event on, and logs what ``get_step_timing`` would say when a step landed.

    Times are seconds before the line was written, which the log stamps. That is done on a thread of this object's own:
    a slow disk holds up no watcher.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        write: Callable[[str], None] = log.info,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._emit = emit
        self._write = write
        self._clock_ns = clock_ns
        self._timing = StepTiming()
        self._last_index = -1
        self._landed: queue.SimpleQueue[tuple[int, StepTiming] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shmstage-timing-log", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._emit(event)
        if isinstance(event, TokenEvent) and event.kind in ("fwd_bwd", "replay", "update"):
            self._note(event)

    def close(self) -> None:
        """Writes what is there and ends the thread, within seconds."""
        self._landed.put(None)
        self._thread.join(5.0)

    def _note(self, event: TokenEvent) -> None:
        step, request_id, stamps = event.step, event.request_id, event.stamps
        dispatched = (stamps["dispatch_begin_ns"], stamps["dispatch_end_ns"])
        if event.kind == "replay":
            self._timing.replayed(step, request_id, *dispatched)
        elif event.kind == "update":
            self._timing.dispatched(step, request_id, -1, *dispatched)
        else:
            if event.index <= self._last_index:  # another step, or the same again after a restore gave it up
                self._timing = StepTiming()
            self._last_index = event.index
            self._timing.dispatched(step, request_id, event.index, *dispatched)
        self._timing.ready(step, request_id, stamps["ready_ns"], replay=event.kind == "replay")
        if event.kind == "update":
            self._landed.put((step, self._timing))

    def _run(self) -> None:
        while (landed := self._landed.get()) is not None:
            step, timing = landed
            self._write(timing_line(timing.report(step, self._clock_ns())))


def timing_line(report: Mapping[str, Any]) -> str:
    """Of what ``StepTiming.report`` gives, whose replay is a micro-batch's last time."""
    step = report["step"]
    timing = {
        "v": 1,
        "train_step": step,
        "mb": [{"i": work["index"], **_rounded(work)} for work in report["microbatches"]],
        "update": None if report["update"] is None else _rounded(report["update"]),
        "prepare": None,
    }
    return f"TRAINER_STEP_TIMING step={step} policy_version={step} rtt_s=0.000 timing={json.dumps(timing)}"


def _rounded(work: Mapping[str, Any]) -> dict[str, float | None]:
    names = ("dispatch_begin_ago_s", "dispatch_end_ago_s", "ready_ago_s")
    return {name: None if work[name] is None else round(work[name], 6) for name in names}

"""Whether a step's work succeeded, known only when all of it has been reported: the update is ok iff everything is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from shmstage.errors import TokenFailedError, WaitTimeoutError

KEPT_STEPS = 8
"""Finished steps remembered; any number of unfinished and failed ones is kept besides."""


@dataclass(slots=True)
class _Step:
    uploads_open: int = 0
    update_open: bool = False
    update_reported: bool = False
    landed_ns: int = 0
    error: str = ""

    @property
    def forgettable(self) -> bool:
        """All of it was reported, and well: a step that is not known here counts as landed."""
        return self.update_reported and self.uploads_open == 0 and not self.error


@final
class StepHealth:
    """Written by the command thread (``began``) and the watchers (``over``), read by the snapshot threads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._steps: dict[int, _Step] = {}

    def upload_began(self, step: int) -> None:
        with self._changed:
            self._step(step).uploads_open += 1

    def upload_over(self, step: int, error: str) -> None:
        with self._changed:
            state = self._step(step)
            state.uploads_open -= 1
            state.error = state.error or error
            self._changed.notify_all()

    def forward_over(self, step: int, error: str) -> None:
        with self._changed:
            state = self._step(step)
            state.error = state.error or error

    def update_began(self, step: int) -> None:
        with self._changed:
            self._step(step).update_open = True

    def update_verdict(self, step: int, error: str) -> str:
        """The update's own error, or that of the work it summed up: "" only if all of the step is ok.

        Waits for the step's uploads to be reported, which the forward passes that read them have outlived. Never
        raises: an upload that is not reported in time is the step's error.
        """
        with self._changed:
            state = self._step(step)
            try:
                self._wait(lambda: state.uploads_open == 0, f"uploads of step {step}")
            except WaitTimeoutError as late:
                error = error or str(late)
            state.error = state.error or error
            return state.error

    def update_over(self, step: int, error: str, ready_ns: int) -> None:
        """The update's event is out, with ``error``; snapshots of the step may go on."""
        with self._changed:
            state = self._step(step)
            state.update_open, state.update_reported, state.landed_ns = False, True, ready_ns
            state.error = state.error or error
            self._changed.notify_all()

    def require_landed(self, step: int) -> int | None:
        """Wait until update ``step`` has been reported; returns when it landed. ``TokenFailedError`` if it failed.

        A step that was not trained here (0, or a restored one), or long ago, has landed: ``None``.
        """
        with self._changed:
            state = self._steps.get(step)
            if state is None:
                return None
            self._wait(lambda: not state.update_open, f"update {step}")
            if state.error:
                raise TokenFailedError(f"step {step} failed: {state.error}")
            return state.landed_ns

    def clear(self) -> None:
        with self._changed:
            self._steps.clear()

    def _step(self, step: int) -> _Step:
        if step not in self._steps:
            finished = sorted(number for number, state in self._steps.items() if state.forgettable)
            for number in finished[: max(0, len(finished) + 1 - KEPT_STEPS)]:
                del self._steps[number]
        return self._steps.setdefault(step, _Step())

    def _wait(self, over: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(over, self._timeout_s):
            raise WaitTimeoutError(
                f"{what} not reported after {self._timeout_s:g} s; if the device is only slow, raise call_timeout_s"
            )

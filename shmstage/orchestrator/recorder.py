"""Has the steps that `record_steps` names written to a bundle, on a thread of its own: no step waits for it.

What it is given it keeps until it is written: at most 1 GiB, or two micro-batches where that is more. A disk that does
not keep up, is full or hangs ends the recording, never the run: what came before is kept, and the summary says so.

A run that fails leaves a bundle of what was packed until then, with the step that failed. One that is stopped, or loses
a process, leaves it for a resume to go on with.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, cast, final

from shmstage.errors import ShmstageError, StoppedError, TransportError
from shmstage.memory.handle import Handle
from shmstage.memory.limits import format_nbytes
from shmstage.orchestrator.intake import Planned
from shmstage.packing.plan import PlanSettings
from shmstage.packing.recording import Recording
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings

WAITING_NBYTES = 1 << 30
#: how long the end of a run waits for what is not written yet
CLOSE_S = 60.0


@dataclass(frozen=True)
class _Microbatch:
    step: int
    index: int
    trajectories: tuple[Trajectory, ...]
    nbytes: int
    digest: str


@final
class Recorder:
    """`packed` and `landed` return at once and take any thread; nothing here raises once it is made."""

    def __init__(
        self,
        recording: Recording,
        settings: Settings,
        *,
        waiting_nbytes: int = WAITING_NBYTES,
        close_s: float = CLOSE_S,
    ) -> None:
        assert settings.record_range is not None
        self._recording = recording
        self._first, self._last = settings.record_range
        self._per_step = settings.microbatches_per_step
        self._provenance = _provenance(settings)
        self._waiting_nbytes = waiting_nbytes
        self._close_s = close_s
        self._condition = threading.Condition()
        self._waiting: deque[_Microbatch] = deque()
        self._held_nbytes = 0
        #: steps up to this one have landed; from `_given_up` on nothing is recorded
        self._landed = 0
        self._given_up: int | None = None
        self._first_packed = self._last + 1
        self._closing = self._goes_on = False
        self.warnings: list[str] = []
        if recording.is_done and recording.manifest is None:
            self._say(f"{recording.path} is not what this run recorded, which records nothing; choose another --record")
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, first_step: int) -> None:
        """An attempt begins with this step: those before it are done."""
        with self._condition:
            self._first_packed = min(self._first_packed, first_step)
        self.landed(first_step - 1)

    def packed(self, planned: Planned, handle: Handle) -> None:
        """A micro-batch lies in its slot; what it is made of is recorded if its step is one to be."""
        step, index, digest = handle.step, handle.index, handle.digest.hex()
        if not self._first <= step <= self._last:
            return
        with self._condition:
            if self._recording.is_done or (self._given_up is not None and step >= self._given_up):
                return
            # as an attempt before this one packed it
            known = self._recording.digest_of(step, index) or self._waiting_digest(step, index)
            if known is not None:
                if known != digest:
                    self._give_up(step, f"its micro-batch {index} has another digest than before the restart")
                return
            # those that wait and one more than the largest that comes alone
            if self._waiting and self._held_nbytes + planned.nbytes > max(self._waiting_nbytes, 2 * planned.nbytes):
                self._give_up(
                    step, f"the disk does not keep up: {format_nbytes(self._held_nbytes)} wait to be written, at most "
                    f"{format_nbytes(self._waiting_nbytes)} may; record fewer steps, or on a faster disk"
                )  # fmt: skip
                return
            arrivals = [arrival.trajectory for _, arrival in sorted(planned.arrivals.items())]
            trajectories = cast(tuple[Trajectory, ...], tuple(arrivals))  # this host's input has the arrays
            self._waiting.append(_Microbatch(step, index, trajectories, planned.nbytes, digest))
            self._held_nbytes += planned.nbytes
            self._condition.notify_all()

    def landed(self, step: int) -> None:
        """Update `step`, and every one before it, landed."""
        with self._condition:
            self._landed = max(self._landed, step)
            self._condition.notify_all()

    def close(self, *, goes_on: bool = False) -> None:
        """Nothing comes any more: make the bundle, unless the run `goes_on`. Waits for the disk, but not for ever."""
        with self._condition:
            # who closes a second time has waited already
            wait_s = 0.0 if self._closing else self._close_s
            self._closing, self._goes_on = True, goes_on
            self._condition.notify_all()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            with self._condition:
                self._give_up(self._first, f"the disk did not take what was left within {self._close_s:g} s")
            return
        self._recording.close()

    def ended_by(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """Close; a context's way to say how it ended."""
        # of what ends a run these are what a restart or `--resume` goes on from
        self.close(goes_on=isinstance(error, TransportError | StoppedError))

    def added_to(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Close, and say in the summary of the run what was recorded."""
        self.close()
        recorded = self._told()
        warnings = [*summary["warnings"], *self.warnings]
        return {**summary, "warnings": warnings, "recorded": recorded}

    def _told(self) -> dict[str, Any]:
        made = self._recording.manifest
        steps = made["provenance"]["steps"] if made is not None else []
        missing = sorted(set(range(self._first, self._last + 1)) - set(steps))
        if missing and not self.warnings:
            self._say(f"record_steps = {self._first}:{self._last}: step {missing[0]} was not trained after this start")
        trajectories = made["counts"]["trajectories"] if made is not None else 0
        return {"path": str(self._recording.path), "steps": steps, "trajectories": trajectories}

    # --- under the lock -------------------------------------------------------------------------------------

    def _waiting_digest(self, step: int, index: int) -> str | None:
        return next((each.digest for each in self._waiting if (each.step, each.index) == (step, index)), None)

    def _give_up(self, step: int, why: str) -> None:
        is_first = self._given_up is None
        self._given_up = min(step, self._given_up or step)
        if is_first:
            self._say(f"recording ends before step {step}: {why}")

    def _say(self, text: str) -> None:
        self.warnings.append(text)
        with suppress(OSError, ValueError):  # the log may lie on the disk that is full, or be closed
            print(text, flush=True)

    # --- on the recorder's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._closing or self._is_complete)
                item = self._waiting[0] if self._waiting else None
            if item is None:
                self._finish()
                return
            self._write(item)
            with self._condition:
                # only now: until then it is looked for there
                self._waiting.popleft()
                self._held_nbytes -= item.nbytes
                self._condition.notify_all()
            del item

    @property
    def _is_complete(self) -> bool:
        return self._landed >= self._last

    def _write(self, item: _Microbatch) -> None:
        if self._given_up is not None and item.step >= self._given_up:
            return
        number = (item.step - self._first) * self._per_step + item.index
        try:
            self._recording.write(item.step, item.index, number, item.trajectories, item.digest)
        except Exception as error:
            self._failed(item.step, error)

    def _finish(self) -> None:
        if self._recording.is_done or (self._goes_on and not self._is_complete):
            return
        end = self._last + 1 if self._given_up is None else self._given_up
        # of a step before the first one packed here a part may never have been written
        steps = [
            step for step in self._recording.steps
            if step < end and (step >= self._first_packed or self._recording.count(step) == self._per_step)
        ]  # fmt: skip
        try:
            if steps:
                self._recording.finish(steps, self._provenance | {"landed": min(self._landed, steps[-1])})
            else:
                self._recording.forget()
        except Exception as error:
            self._failed(self._first, error)

    def _failed(self, step: int, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # they hold trajectories
        with self._condition:
            self._give_up(step, str(error) if isinstance(error, ShmstageError) else repr(error))


def recorder_of(settings: Settings) -> Recorder | None:
    """What `record` asks for, or nothing. Raises `BundleError`."""
    if settings.record is None:
        return None
    whose = {"run": settings.run, "out": str(settings.out_dir), "record_steps": settings.record_steps}
    return Recorder(Recording(settings.record, whose, goes_on=settings.resume), settings)


def _provenance(settings: Settings) -> dict[str, Any]:
    names = ("microbatches_per_step", *(field.name for field in fields(PlanSettings)))
    return {"run": settings.run, "settings": {name: getattr(settings, name) for name in names}}

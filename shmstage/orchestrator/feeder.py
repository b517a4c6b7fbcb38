"""The feeder thread: takes planned micro-batches, has each packed into a slot and published, tells the program."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import final

from shmstage.errors import PoolError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.orchestrator.intake import Intake, Planned, Upcoming
from shmstage.orchestrator.packer import Packer
from shmstage.orchestrator.queue import Cursor
from shmstage.orchestrator.reader import SourceReader
from shmstage.orchestrator.recorder import Recorder
from shmstage.orchestrator.resume import ResumeState


@dataclass(frozen=True)
class PackedMicrobatch:
    """What the program must know of a published micro-batch; ``*_s`` in seconds, ``*_ns`` on the monotonic clock.

    ``state_after``: where the input stands behind it, to be kept with a checkpoint of its step.
    """

    handle: Handle
    trajectory_ids: tuple[str, ...]
    trajectory_passes: tuple[int, ...]
    real_tokens: int
    rows_used: int
    data_wait_s: float
    slot_wait_s: float
    pack_s: float
    packed_ns: int
    state_after: ResumeState = field(default_factory=ResumeState)


@dataclass(frozen=True)
class EndOfInput:
    """Nothing comes any more; ``error`` is set if that is not as it should be."""

    error: BaseException | None = None


FeederEvent = PackedMicrobatch | EndOfInput


@final
class Feeder:
    """Packs ahead as far as ``allow`` permits, waits for a free slot otherwise; never drops, never overtakes.

    ``deliver`` is called on the feeder's thread, once per micro-batch in training order, then once with ``EndOfInput``.
    """

    def __init__(
        self,
        intake: Intake,
        packer: Packer,
        *,
        microbatches_per_step: int,
        first_step: int,
        last_step: int | None,
        deliver: Callable[[FeederEvent], None],
        events: Events = NO_EVENTS,
        recorder: Recorder | None = None,
    ) -> None:
        self._intake = intake
        self._packer = packer
        self._per_step = microbatches_per_step
        self._first_step = first_step
        self._last_step = last_step
        self._deliver = deliver
        self._events = events
        self._recorder = recorder
        self._allowed = (0, -1)
        self._condition = threading.Condition()
        self._stopped = False
        self._reader: SourceReader | None = None
        # of each step's last micro-batch: until the step has landed, and until it is durable
        self._handed_out: dict[int, Cursor] = {}
        self._states: dict[int, ResumeState] = {}
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._reader = self._intake.read_ahead(self._events)
        self._thread.start()

    def allow(self, limit: tuple[int, int]) -> None:
        """Micro-batches up to and including (step, index) ``limit`` may be packed."""
        if limit != self._allowed:
            with self._condition:
                self._allowed = limit
                self._condition.notify_all()

    @property
    def wants_checkpoint(self) -> bool:
        """Whether so much waits for a durable checkpoint that the next boundary should write one. Any thread."""
        return self._reader is not None and self._reader.queue.wants_checkpoint

    def landed(self, step: int) -> None:
        """Update ``step`` landed: its trajectories are held no more, unless the source cannot give them again."""
        if self._recorder is not None:
            self._recorder.landed(step)
        if self._reader is not None:
            self._reader.queue.landed(step)
            with self._condition:
                handed_out = self._handed_out.pop(step, None)
            if handed_out is not None:
                self._reader.queue.commit(handed_out)
            if not self._intake.until_durable:
                self._let_go(step)  # a restart reads it again; without checkpoints it would be kept for ever
            elif (state := self._states.get(step)) is not None:
                self._intake.landed(state.cursor, state.pass_number)
            self._gauge()

    def durable(self, step: int) -> None:
        """A durable checkpoint covers ``step``: what was kept to replay it is let go. Raises ``BundleError``."""
        if self._reader is not None:
            self._reader.queue.durable(step)
        self._let_go(step)

    def _let_go(self, step: int) -> None:
        with self._condition:
            covered = {number: self._states.pop(number) for number in sorted(self._states) if number <= step}
        if covered:
            state = covered[max(covered)]
            self._intake.release(state.cursor, state.pass_number)

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop and join; a wait for a slot ends within its polling interval, one for the source at once."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()
        if self._reader is not None:
            self._reader.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # --- on the feeder's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._pack_all()
        except BaseException as raised:
            # its frames hold views of the slot; the pool could not be closed while they live
            traceback.clear_frames(raised.__traceback__)
            error = raised
        if not self._stopped:
            self._deliver(EndOfInput(error))

    def _pack_all(self) -> None:
        begun_ns = time.monotonic_ns()
        for step, index, planned in self._numbered():
            come_ns = time.monotonic_ns()
            self._events.note("data_wait", begun_ns, come_ns, step=step, index=index)
            self._tell_ahead(planned)
            if not self._wait_until_allowed(step, index):
                return
            self._deliver(self._pack(step, index, planned, (come_ns - begun_ns) / 1e9))
            self._gauge()
            begun_ns = time.monotonic_ns()

    def _numbered(self) -> Iterator[tuple[int, int, Planned]]:
        """(step, index, planned); what the intake hands out first is the beginning of the first step to train."""
        for number, planned in enumerate(self._intake):
            step, index = divmod(number, self._per_step)
            step += self._first_step
            yield step, index, planned
            if step == self._last_step and index == self._per_step - 1:
                return  # without asking the source for more: it may take for ever to have it

    def _wait_until_allowed(self, step: int, index: int) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or (step, index) <= self._allowed)
            return not self._stopped

    def _pack(self, step: int, index: int, planned: Planned, data_wait_s: float) -> PackedMicrobatch:
        is_final = index == self._per_step - 1
        filled = self._packer.pack(planned, step=step, index=index, is_final=is_final, stop=lambda: self._stopped)
        handle = filled.handle
        self._note_packed(step, planned, is_final=is_final)
        if self._recorder is not None:
            self._recorder.packed(planned, handle)
        note = partial(self._events.note, step=step, index=index, request_id=handle.request_id, slot=handle.slot)
        note("slot_acquired", filled.begun_ns, filled.acquired_ns)
        note("packed", filled.acquired_ns, filled.filled_ns, nbytes=filled.nbytes, tokens=filled.real_tokens)
        note("published", filled.published_ns, generation=handle.generation, digest=handle.digest.hex())
        return PackedMicrobatch(
            handle=handle,
            # ids only: the arrays are let go here, they lie in the slot now
            trajectory_ids=tuple(a.trajectory.trajectory_id for a in planned.arrivals.values()),
            trajectory_passes=tuple(a.pass_number for a in planned.arrivals.values()),
            real_tokens=filled.real_tokens,
            rows_used=sum(1 for row in planned.plan.rows if row.segments),
            data_wait_s=data_wait_s + filled.fetch_s,
            slot_wait_s=filled.slot_wait_s,
            pack_s=filled.pack_s,
            packed_ns=filled.published_ns,
            state_after=planned.state_after,
        )

    def _tell_ahead(self, planned: Planned) -> None:
        """Whoever has to fetch trajectories begins with it while the micro-batch waits for its turn."""
        count = self._packer.looks_ahead
        if count:
            this = Upcoming(planned.plan, {number: each.trajectory for number, each in planned.arrivals.items()})
            self._packer.ahead([this, *self._intake.upcoming(count - 1)])

    def _gauge(self) -> None:
        if self._reader is not None:
            held_nbytes, queued = self._reader.queue.gauge()
            with contextlib.suppress(PoolError):  # a pool that is gone is somebody else's to tell
                free_slots = self._packer.free_slot_count()
                self._events.note("gauged", free_slots=free_slots, held_nbytes=held_nbytes, queued=queued)

    def _note_packed(self, step: int, planned: Planned, *, is_final: bool) -> None:
        with self._condition:
            self._states[step] = planned.state_after
            self._handed_out[step] = planned.handed_out
        if self._reader is not None:
            self._reader.queue.packed(step, planned.nbytes, is_final=is_final)


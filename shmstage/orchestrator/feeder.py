"""The feeder thread: takes planned micro-batches, packs each straight into a slot, publishes, tells the program."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy.typing as npt

from shmstage.errors import PoolError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.memory.identity import PeerWatch
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.orchestrator.intake import Intake, Planned
from shmstage.orchestrator.queue import Cursor
from shmstage.orchestrator.reader import SourceReader
from shmstage.orchestrator.resume import ResumeState
from shmstage.packing.fields import REF_LOGPS, SAMPLER_IS_WEIGHTS
from shmstage.packing.fill import fill_microbatch, microbatch_digest


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
        pool: Pool,
        layout: Layout,
        *,
        microbatches_per_step: int,
        first_step: int,
        last_step: int | None,
        slot_timeout_s: float,
        peers: Sequence[PeerWatch],
        deliver: Callable[[FeederEvent], None],
        events: Events = NO_EVENTS,
    ) -> None:
        self._intake = intake
        self._pool = pool
        self._layout = layout
        self._per_step = microbatches_per_step
        self._first_step = first_step
        self._last_step = last_step
        self._slot_timeout_s = slot_timeout_s
        self._peers = tuple(peers)
        self._deliver = deliver
        self._events = events
        self._allowed = (0, -1)
        self._condition = threading.Condition()
        self._stopped = False
        self._reader: SourceReader | None = None
        # of each step's last micro-batch: until the step has landed, and until it is durable
        self._handed_out: dict[int, Cursor] = {}
        self._cursors: dict[int, int] = {}
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
        if self._reader is not None:
            self._reader.queue.landed(step)
            with self._condition:
                handed_out = self._handed_out.pop(step, None)
            if handed_out is not None:
                self._reader.queue.commit(handed_out)
            self._gauge()

    def durable(self, step: int) -> None:
        """A durable checkpoint covers ``step``: what was kept to replay it is let go. Raises ``BundleError``."""
        if self._reader is not None:
            self._reader.queue.durable(step)
        with self._condition:
            covered = {number: self._cursors.pop(number) for number in sorted(self._cursors) if number <= step}
        if covered:
            self._intake.release(covered[max(covered)])

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
        trajectories = {number: arrival.trajectory for number, arrival in planned.arrivals.items()}
        before_ns = time.monotonic_ns()
        slot = self._pool.acquire(
            self._layout, timeout_s=self._slot_timeout_s, peers=self._peers, stop=lambda: self._stopped
        )
        acquired_ns = time.monotonic_ns()
        with slot:
            filled = fill_microbatch(planned.plan, trajectories, _packed_views(slot.views, planned))
            filled_ns = time.monotonic_ns()
            handle = slot.publish(
                digest=microbatch_digest(planned.plan, trajectories),
                rows=len(planned.plan.rows),
                step=step,
                index=index,
                is_final=index == self._per_step - 1,
                loss_tokens=filled.loss_tokens,
                segments=filled.segments,
            )
        published_ns = time.monotonic_ns()
        self._note_packed(step, planned, is_final=handle.is_final)
        note = partial(self._events.note, step=step, index=index, request_id=handle.request_id, slot=handle.slot)
        note("slot_acquired", before_ns, acquired_ns)
        note("packed", acquired_ns, filled_ns, nbytes=self._layout.payload_nbytes, tokens=filled.real_tokens)
        note("published", published_ns, generation=handle.generation, digest=handle.digest.hex())
        return PackedMicrobatch(
            handle=handle,
            # ids only: the arrays are let go here, they lie in the slot now
            trajectory_ids=tuple(a.trajectory.trajectory_id for a in planned.arrivals.values()),
            trajectory_passes=tuple(a.pass_number for a in planned.arrivals.values()),
            real_tokens=filled.real_tokens,
            rows_used=sum(1 for row in planned.plan.rows if row.segments),
            data_wait_s=data_wait_s,
            slot_wait_s=(acquired_ns - before_ns) / 1e9,
            pack_s=(published_ns - acquired_ns) / 1e9,
            packed_ns=published_ns,
            state_after=planned.state_after,
        )

    def _gauge(self) -> None:
        if self._reader is not None:
            held_nbytes, queued = self._reader.queue.gauge()
            with contextlib.suppress(PoolError):  # a pool that is gone is somebody else's to tell
                free_slots = self._pool.free_slot_count()
                self._events.note("gauged", free_slots=free_slots, held_nbytes=held_nbytes, queued=queued)

    def _note_packed(self, step: int, planned: Planned, *, is_final: bool) -> None:
        with self._condition:
            self._cursors[step] = planned.state_after.cursor
            self._handed_out[step] = planned.handed_out
        if self._reader is not None:
            self._reader.queue.packed(step, planned.nbytes, is_final=is_final)


def _packed_views(views: dict[str, npt.NDArray[Any]], planned: Planned) -> dict[str, npt.NDArray[Any]]:
    """The views that trajectories fill; late fields that none of them carries are zero until somebody writes them."""
    first = next(iter(planned.arrivals.values()), None)
    carried = first.trajectory.optional if first is not None else frozenset[str]()
    absent = {SAMPLER_IS_WEIGHTS, *(() if "ref_logprobs" in carried else (REF_LOGPS,))} & views.keys()
    if first is None:
        absent -= {REF_LOGPS}  # padding alone: the views decide
    for name in absent:
        views[name].fill(0)
    return {name: view for name, view in views.items() if name not in absent}

"""Inside a step: upload, stage, forward, update. Dispatches and returns; nothing here waits for a computation
except for a device buffer, for a snapshot copy, and in ``settle`` for the overflow flags of an engine that has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax

from shmstage.errors import EngineError, GateClosedError
from shmstage.memory.handle import Handle
from shmstage.memory.reader import Lease
from shmstage.trainer.attachment import Attachment
from shmstage.trainer.completions import Completions
from shmstage.trainer.device_buffers import DeviceBuffers, StagedBatch
from shmstage.trainer.digests import decoded_digest
from shmstage.trainer.engine import TrainEngine
from shmstage.trainer.gate import Gate
from shmstage.trainer.snapshots import Snapshots

#: (what, step, request id) → a range around it, for profiles
Annotate = Callable[[str, int, str], AbstractContextManager[object]]


@dataclass(slots=True)
class Stage:
    """The micro-batch that is uploaded and not trained. ``lease`` lives on while late fields may still be patched."""

    handle: Handle
    batch: StagedBatch
    lease: Lease | None
    patched: set[str] = field(default_factory=set)
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A micro-batch that the engine may run again. ``number`` counts the step's forward calls from 1."""

    number: int
    buffer: int
    name: tuple[str, int, int]


@final
class Stepper:
    """Trains micro-batches in the order the gate allows."""

    def __init__(
        self,
        engine: TrainEngine,
        gate: Gate,
        buffers: DeviceBuffers,
        completions: Completions,
        snapshots: Snapshots,
        *,
        hash_payload: bool,
        timeout_s: float,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._engine = engine
        self._settle: Callable[[int], Mapping[int, jax.Array] | None] | None = getattr(engine, "settle", None)
        self._annotate: Annotate = getattr(engine, "annotate", lambda what, step, request_id: nullcontext())
        self._gate = gate
        self._buffers = buffers
        self._completions = completions
        self._snapshots = snapshots
        self._hash_payload = hash_payload
        self._timeout_s = timeout_s
        self._clock_ns = clock_ns
        self._trained = 0
        self._unsettled: list[_Unsettled] = []
        self.current: Attachment | None = None
        self.stage: Stage | None = None

    @property
    def attachment(self) -> Attachment:
        """The pool in use; ``GateClosedError`` before the first handshake."""
        if self.current is None:
            raise GateClosedError("no pool is attached; say hello first")
        return self.current

    @property
    def host_memory(self) -> dict[str, object] | None:
        """Whether the pool is registered with the device runtime, as plain facts; ``None`` without a pool."""
        return self.current.registration.as_facts() if self.current is not None else None

    # --- commands -------------------------------------------------------------------------------------------

    def fwd_bwd(self, handle: Handle, *, defer_update: bool) -> dict[str, Any]:
        """Train a micro-batch; an existing stage of it is used up."""
        self._gate.admit_forward(handle)
        stage = self.stage
        if stage is None or stage.handle.request_id != handle.request_id:
            batch, upload_s = self._upload(handle)
        elif stage.lease is None:
            return self.fwd_bwd_staged(handle.request_id, defer_update=defer_update)
        else:
            # sent whole after a stage whose answer was lost: late fields may have been written to the slot since
            self.stage = None
            self._gate.unstaged()
            self._buffers.discard(stage.batch)
            batch, upload_s = self._upload(handle, stage.lease)
        return self._train(handle, batch, upload_s, defer_update)

    def stage_fwd_bwd(self, handle: Handle) -> dict[str, Any]:
        """Upload a micro-batch and keep it; with late fields its lease too, until they are patched or it is trained."""
        if self.stage is None or self.stage.handle.request_id != handle.request_id:
            self._gate.admit_stage(handle)
            lease = self.attachment.lease(handle)
            late = bool(self.attachment.layout(handle.layout_id).late_names)
            batch, _ = self._upload(handle, lease, keep_lease=late)
            self.stage = Stage(handle, batch, lease if late else None)
            self._gate.staged(handle.request_id)
        return {"request_id": handle.request_id}

    def fwd_bwd_staged(self, request_id: str, *, defer_update: bool) -> dict[str, Any]:
        """Train the staged micro-batch."""
        self._gate.admit_staged(request_id)
        stage = self.stage
        assert stage is not None
        self._gate.admit_forward(stage.handle)
        if stage.error:
            raise EngineError(f"the upload of {request_id} failed: {stage.error}")
        self.stage = None
        self._gate.unstaged()
        if stage.lease is not None:
            stage.lease.end()
        return self._train(stage.handle, stage.batch, 0.0, defer_update)

    def update(self) -> dict[str, Any]:
        """Close a step whose last micro-batch was not marked final."""
        self._gate.admit_update()
        return {"updated": True, "snapshot_wait_s": self._update()}

    def apply_deferred_update(self) -> dict[str, Any]:
        self._gate.admit_apply()
        return {"updated": True, "snapshot_wait_s": self._update()}

    # --- state around them ----------------------------------------------------------------------------------

    def attach(self, attachment: Attachment | None) -> None:
        """Use another pool, or none. The caller has dropped the stage."""
        self.current = attachment

    def reset(self) -> None:
        """Drop stage, deferral and the open step's gradients as far as they are ours; the engine drops its own."""
        self.drop_stage()
        for microbatch in self._unsettled:
            self._buffers.settled(microbatch.buffer)
        self._unsettled.clear()
        self._trained = 0

    def drop_stage(self) -> None:
        if self.stage is not None:
            self._buffers.discard(self.stage.batch)
            if self.stage.lease is not None:
                self.stage.lease.end()
            self.stage = None
            self._gate.unstaged()

    def upload_failed(self, request_id: str, error: str) -> bool:
        """Note a failed upload; True if it is the stage's, so that nothing was trained with it."""
        if self.stage is None or self.stage.handle.request_id != request_id:
            return False
        self.stage.error = error
        return True

    def replace_staged(self, stage: Stage, arrays: dict[str, Any], loss_tokens: int) -> None:
        """Patched fields take the place of the uploaded ones; ``loss_tokens`` that of the handle's."""
        stage.batch.arrays.update(arrays)
        stage.handle = replace(stage.handle, loss_tokens=loss_tokens)

    # --- hands ----------------------------------------------------------------------------------------------

    def _upload(
        self, handle: Handle, lease: Lease | None = None, *, keep_lease: bool = False
    ) -> tuple[StagedBatch, float]:
        lease = lease or self.attachment.lease(handle)
        to = self.attachment.placement(handle.layout_id)
        self._buffers.wait_retired()  # before the stamp: waiting for a place is not uploading
        begin_ns = self._clock_ns()
        nbytes = to.local.payload_nbytes
        report = self._completions.upload_reporter(handle, "staged", begin_ns, nbytes)
        try:
            with self._annotate("stage", handle.step, handle.request_id):
                batch = self._buffers.upload(lease, to.shardings, report, keep_lease=keep_lease, spread=to.spread)
        except BaseException:
            self._completions.health.upload_over(handle.step, "")
            raise
        return batch, (self._clock_ns() - begin_ns) / 1e9

    def _train(self, handle: Handle, batch: StagedBatch, upload_s: float, defer_update: bool) -> dict[str, Any]:
        self._completions.flush()  # hashing waits for the upload, and the call may block
        digest = decoded_digest(batch.arrays) if self._hash_payload else ""
        deferred = handle.is_final and defer_update
        on_over = self._buffers.resolver(batch.buffer)
        begin_ns = self._clock_ns()
        try:
            with (
                self._failing(f"fwd_bwd of {handle.request_id}"),
                self._annotate("fwd_bwd", handle.step, handle.request_id),
            ):
                token = self._engine.fwd_bwd(batch.take())
        except BaseException:
            on_over()
            self._buffers.settled(batch.buffer)
            raise
        end_ns = self._clock_ns()
        name = (handle.request_id, handle.step, handle.index)
        self._completions.dispatched("fwd_bwd", name, token, begin_ns, end_ns, on_over)
        self._gate.trained(handle, deferred=deferred)
        self._trained += 1
        self._unsettled.append(_Unsettled(self._trained, batch.buffer, name))
        with self._failing(f"replay before {handle.request_id}"):
            # additions keep their order only if i-1's replay goes out before i+1 and not later
            self._settle_all_but(1)
        updates = handle.is_final and not deferred
        return {
            "request_id": handle.request_id,
            "snapshot_wait_s": self._update() if updates else 0.0,
            "updated": updates,
            "upload_s": upload_s,
            "payload_digest": digest,
        }

    def _update(self) -> float:
        self._completions.flush()  # copies, flags and some engines' updates are waited for here
        waited_s = self._snapshots.wait_copies(self._timeout_s)
        step = self._gate.state.open_step
        assert step is not None
        with self._failing(f"update {step}"):
            self._settle_all_but(0)
            begin_ns = self._clock_ns()  # after the flag of the last one was waited for
            with self._annotate("update", step, str(step)):
                token = self._engine.update()
        self._completions.dispatched("update", (f"update.{step}", step, 0), token, begin_ns, self._clock_ns())
        self._gate.updated()
        self._trained = 0
        return waited_s

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """What raises in here leaves the engine's sums in doubt: only a restore can go on."""
        try:
            yield
        except Exception as error:
            self._gate.failed(f"{what} raised {type(error).__name__}: {error}")
            raise

    def _settle_all_but(self, kept: int) -> None:
        if self._settle is None:
            kept = 0
        elif self._trained > kept:
            self._completions.flush()
            begin_ns = self._clock_ns()
            self._watch_replays(self._settle(self._trained - kept) or {}, begin_ns)
        while len(self._unsettled) > kept:
            self._buffers.settled(self._unsettled.pop(0).buffer)

    def _watch_replays(self, replays: Mapping[int, jax.Array], begin_ns: int) -> None:
        """A micro-batch's buffer and its step wait for its replay as they did for its first attempt.

        ``begin_ns`` is before the flags were read: of a replay's dispatch time that wait is a part.
        """
        open_ones = {microbatch.number: microbatch for microbatch in self._unsettled}
        for number, token in replays.items():
            if number not in open_ones:
                raise EngineError(f"settle replayed fwd_bwd {number} of this step; unsettled were {sorted(open_ones)}")
            microbatch = open_ones[number]
            on_over = self._buffers.resolver(microbatch.buffer)
            self._completions.dispatched("replay", microbatch.name, token, begin_ns, self._clock_ns(), on_over)

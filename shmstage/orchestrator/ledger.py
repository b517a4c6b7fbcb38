"""What is known of each step: collected as it happens, written as one step line when it is complete."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from shmstage.orchestrator.commands import SCORE, Kind
from shmstage.orchestrator.evaluation import summed
from shmstage.orchestrator.feeder import PackedMicrobatch
from shmstage.orchestrator.latch import Latch
from shmstage.orchestrator.trainer_client import ForwardResult
from shmstage.timeline.idle import CALIBRATION_SAMPLES, BoundaryInstants, boundary_idle_s, calibrated_microbatch_s
from shmstage.timeline.staging import StagingCost, staging_cost
from shmstage.wire.messages import TicketEvent, TokenEvent

#: evaluations and scorings remembered: those of one boundary and of the step before it
WINDOWS_KEPT = 4096


@dataclass
class _Micro:
    packed: PackedMicrobatch
    request_id: str
    staged: bool = False
    payload_digest: str = ""
    upload_s: float = 0.0
    dispatched_ns: int = 0
    upload_begin_ns: int = 0
    staged_ready_ns: int = 0
    patch_ready_ns: int = 0
    #: of the first attempt, and of the last: an engine that drops tokens runs a micro-batch again
    attempt_ready_ns: int = 0
    ready_ns: int = 0
    late_digests: dict[str, str] = field(default_factory=dict)

    @property
    def was_replayed(self) -> bool:
        return self.ready_ns != self.attempt_ready_ns


@dataclass
class _Step:
    micros: list[_Micro] = field(default_factory=list)
    closed: bool = False
    update_dispatched_ns: int = 0
    landed_ns: int = 0
    snapshot_wait_s: float = 0.0
    not_staged_because: str = ""
    metrics: dict[str, Any] | None = None
    held_by_hook: bool = False
    #: evaluations on their way, plus one as long as more of them are to be sent
    evals_open: int = 0
    evals: list[dict[str, Any]] = field(default_factory=list)


@final
class Ledger:
    """Facts per step from handles, replies and token events. Identity always comes from the handle."""

    def __init__(
        self, *, mode: str, tokens_per_microbatch: int, rows: int, slot_nbytes: int, latch: Latch | None = None
    ) -> None:
        self.latch = latch or Latch(enabled=False, min_upload_s=0.0)
        self._mode = mode
        self._tokens = tokens_per_microbatch
        self._rows = rows
        self._slot_nbytes = slot_nbytes
        self._steps: dict[int, _Step] = {}
        self._intervals: list[tuple[int, int, int]] = []
        self._busy: list[tuple[int, int]] = []
        self._previous: tuple[int, _Step] | None = None

    # --- as it happens ------------------------------------------------------------------------------------

    def forwarded(self, packed: PackedMicrobatch, result: ForwardResult, *, staged: bool) -> None:
        """A forward call returned."""
        micro = self._micro(packed)
        micro.staged = staged
        micro.payload_digest = result.payload_digest
        micro.upload_s = max(micro.upload_s, result.upload_s)
        step = self._step(packed.handle.step)
        step.closed = step.closed or packed.handle.is_final
        step.snapshot_wait_s += result.snapshot_wait_s

    def sent(self, packed: PackedMicrobatch) -> None:
        """A micro-batch is about to be staged or sent: its events may come before the reply does."""
        self._micro(packed)

    def updated(self, step: int, snapshot_wait_s: float) -> None:
        """An update command returned."""
        self._step(step).closed = True
        self._step(step).snapshot_wait_s += snapshot_wait_s

    def not_staged(self, step: int, because: str) -> None:
        """Why ``step``'s first micro-batch was not staged."""
        self._step(step).not_staged_because = because

    def token(self, event: TokenEvent) -> None:
        """Completion stamps of a micro-batch, an upload or an update."""
        step = self._step(event.step)
        stamps = event.stamps
        if event.kind == "update":
            step.update_dispatched_ns = stamps["dispatch_begin_ns"]
            step.landed_ns = stamps["ready_ns"]
            return
        micro = next((m for m in reversed(step.micros) if m.request_id == event.request_id), None)
        if micro is None:
            return
        if event.kind == "staged":
            micro.upload_begin_ns = stamps["upload_begin_ns"]
            micro.staged_ready_ns = stamps["staged_ready_ns"]
            micro.upload_s = (stamps["staged_ready_ns"] - stamps["upload_begin_ns"]) / 1e9
        elif event.kind == "patched":
            micro.patch_ready_ns = max(micro.patch_ready_ns, stamps["patch_ready_ns"])
        elif event.kind == "fwd_bwd":
            micro.dispatched_ns = stamps["dispatch_begin_ns"]
            micro.attempt_ready_ns = micro.ready_ns = stamps["ready_ns"]
        elif event.kind == "replay":  # after its first attempt, before the step's update
            micro.ready_ns = max(micro.ready_ns, stamps["ready_ns"])

    def ticket(self, kind: Kind, event: TicketEvent) -> None:
        """While it scores or evaluates the device is not idle; the trainer says from when to when."""
        if kind in (*SCORE, Kind.EVAL) and "begin_ns" in event.stamps:
            self._busy.append((event.stamps["begin_ns"], event.stamps["done_ns"]))
            del self._busy[:-WINDOWS_KEPT]

    def held_by_hook(self, step: int) -> None:
        """``step``'s update waited for a verdict: what held it back says nothing of staging."""
        self._step(step).held_by_hook = True

    def late_field(self, packed: PackedMicrobatch, name: str, digest: str) -> None:
        """A late field was written; its digest is its own, outside the micro-batch's."""
        self._micro(packed).late_digests[name] = digest

    def eval_due(self, step: int) -> None:
        """``step`` will be evaluated: neither its line nor its facts are complete before ``eval_all_sent``."""
        self._step(step).evals_open += 1

    def eval_all_sent(self, step: int) -> None:
        self._step(step).evals_open -= 1

    def eval_sent(self, step: int) -> None:
        self._step(step).evals_open += 1

    def eval_done(self, step: int, value: dict[str, Any]) -> None:
        self._step(step).evals_open -= 1
        self._step(step).evals.append(value)

    def facts(self, number: int, otherwise: dict[str, Any]) -> dict[str, Any] | None:
        """``otherwise`` with metrics and evaluation of a step whose line is not written; ``None`` while they miss."""
        step = self._steps.get(number)
        if step is None:
            return otherwise  # restored, not trained here
        if step.metrics is None or step.evals_open:
            return None
        return otherwise | {"metrics": step.metrics, "eval": summed(step.evals) if step.evals else None}

    def metrics(self, step: int, value: dict[str, Any]) -> None:
        self._step(step).metrics = value

    def is_complete(self, number: int) -> bool:
        """True when everything the step line of ``number`` needs has arrived."""
        step = self._steps.get(number)
        if step is None or not step.closed or step.metrics is None or not step.landed_ns or step.evals_open:
            return False
        return all(m.ready_ns and m.staged_ready_ns for m in step.micros)

    # --- when it is over ----------------------------------------------------------------------------------

    def close_step(self, number: int, *, attempt: int) -> dict[str, Any]:
        """The step line of ``number``; forgets what no later line needs."""
        step = self._steps.pop(number)
        self._calibrate(step)
        idle = self._boundary_idle(step)
        if self._previous is not None:
            self.latch.boundary(self._staging_cost(step))
        line = self._line(number, step, idle, attempt)
        self._previous = (number, step)
        return line

    def _line(self, number: int, step: _Step, idle: float | None, attempt: int) -> dict[str, Any]:
        metrics = step.metrics or {}
        packed = [m.packed for m in step.micros]
        real = sum(p.real_tokens for p in packed)
        used_rows = sum(p.rows_used for p in packed)
        first = step.micros[0]
        exposed = self._exposed_s(step)
        return {
            "step": number,
            "attempt": attempt,
            "mode": self._mode,
            "policy_version": number,
            "loss": metrics.get("loss"),
            "grad_norm": metrics.get("grad_norm"),
            "denominator": metrics.get("denominator"),
            "metrics": metrics,
            "microbatches": len(packed),
            "tokens": real,
            "loss_tokens": sum(p.handle.loss_tokens for p in packed),
            "segments": sum(p.handle.segments for p in packed),
            "row_efficiency": round(real * self._rows / (used_rows * self._tokens), 4) if used_rows else 0.0,
            "microbatch_efficiency": round(real / (len(packed) * self._tokens), 4),
            "bytes": len(packed) * self._slot_nbytes,
            "step_s": self._step_s(step),
            "boundary_idle_s": idle,
            "pack_s": sum(p.pack_s for p in packed),
            "slot_wait_s": sum(p.slot_wait_s for p in packed),
            "data_wait_s": sum(p.data_wait_s for p in packed),
            "upload_s": sum(m.upload_s for m in step.micros),
            "exposed_s": exposed,
            "snapshot_wait_s": step.snapshot_wait_s,
            "staged": first.staged,
            "not_staged_because": None if first.staged else step.not_staged_because,
            "latch": {"level": self.latch.level, "reason": self.latch.reason},
            "eval": summed(step.evals) if step.evals else None,
            "late_digests": [m.late_digests for m in step.micros],
            "digests": [p.handle.digest.hex() for p in packed],
            "payload_digests": [m.payload_digest for m in step.micros],
            "trajectory_ids": [identity for p in packed for identity in p.trajectory_ids],
            "trajectory_versions": [version for p in packed for version in p.trajectory_versions],
            "trajectory_passes": [number for p in packed for number in p.trajectory_passes],
            "instants_ns": {
                "packed": [p.packed_ns for p in packed],
                "dispatched": [m.dispatched_ns for m in step.micros],
                "upload_begin": [m.upload_begin_ns for m in step.micros],
                "staged_ready": [m.staged_ready_ns for m in step.micros],
                "patch_ready": [m.patch_ready_ns for m in step.micros],
                "ready": [m.ready_ns for m in step.micros],
                "update_dispatched": step.update_dispatched_ns,
                "update_landed": step.landed_ns,
            },
        }

    def _step(self, number: int) -> _Step:
        step = self._steps.get(number)
        if step is None:
            step = self._steps[number] = _Step()
        return step

    def _micro(self, packed: PackedMicrobatch) -> _Micro:
        micros = self._step(packed.handle.step).micros
        for micro in reversed(micros):
            if micro.packed is packed or micro.packed.handle == packed.handle:
                return micro
        micros.append(_Micro(packed, packed.handle.request_id))
        return micros[-1]

    def _step_s(self, step: _Step) -> float:
        begin = self._previous[1].landed_ns if self._previous else step.micros[0].dispatched_ns
        return (step.landed_ns - begin) / 1e9

    def _exposed_s(self, step: _Step) -> float | None:
        if self._previous is None or not step.micros[0].staged:
            return None
        return max(0, step.micros[0].staged_ready_ns - self._previous[1].micros[-1].ready_ns) / 1e9

    def _calibrate(self, step: _Step) -> None:
        for before, micro in zip(step.micros, step.micros[1:], strict=False):
            if not before.was_replayed and not micro.was_replayed:  # a replay lies between them
                self._intervals.append((micro.dispatched_ns, before.ready_ns, micro.ready_ns))
        del self._intervals[:-CALIBRATION_SAMPLES]

    def _boundary_idle(self, step: _Step) -> float | None:
        if self._previous is None:
            return None
        before, first = self._previous[1], step.micros[0]
        instants = BoundaryInstants(
            last_finished=before.micros[-1].ready_ns,
            update_dispatched=before.update_dispatched_ns,
            update_landed=before.landed_ns,
            first_dispatched=first.dispatched_ns,
            first_staged_ready=first.staged_ready_ns,
            first_ready=first.attempt_ready_ns,
            first_patch_ready=first.patch_ready_ns,
        )
        return boundary_idle_s(instants, calibrated_microbatch_s(self._intervals), self._busy)

    def _staging_cost(self, step: _Step) -> StagingCost | None:
        """What staging this step's first micro-batch cost at the boundary before it."""
        first = step.micros[0]
        if self._previous is None or not first.staged:
            return None
        before = self._previous[1]
        last = before.micros[-1]
        begun = [max(m.dispatched_ns, m.staged_ready_ns) for m in before.micros]
        ended = [m.attempt_ready_ns for m in before.micros]
        since = [max(begin, earlier) for begin, earlier in zip(begun, [0, *ended], strict=False)]
        return staging_cost(
            upload_begin=first.upload_begin_ns,
            staged_ready=first.staged_ready_ns,
            last_ready=last.ready_ns,
            update_dispatched=before.update_dispatched_ns,
            waited_elsewhere_s=math.inf if before.held_by_hook else before.snapshot_wait_s,
            microbatch_s=[(end - begin) / 1e9 for begin, end in zip(since, ended, strict=True)],
        )

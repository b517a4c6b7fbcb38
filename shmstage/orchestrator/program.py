"""Gives ``BoundarySchedule`` its hands: one feeder thread packs, the calling thread talks to the trainer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from shmstage.errors import (
    PeerLostError,
    PeerRestartedError,
    RunFailedError,
    ShmstageError,
    StoppedError,
    TokenFailedError,
    WaitTimeoutError,
)
from shmstage.orchestrator.feeder import EndOfInput, Feeder, FeederEvent, PackedMicrobatch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config, Kind
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.wire.messages import TicketEvent, TokenEvent

#: longest the program sits without looking at stop and deadlines, in seconds
POLL_S = 0.2


@final
class Program:
    """Runs the schedule to its end on the calling thread.

    ``write_step`` gets each step line; whatever it raises is said once and never ends the run. ``stop_requested`` is
    asked between commands.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainerClient,
        ledger: Ledger,
        *,
        write_step: Callable[[dict[str, Any]], None],
        stop_requested: Callable[[], bool],
        call_timeout_s: float,
        stage_wait_s: float | None = None,
        attempt: int = 1,
        plan: Mapping[str, Any] | None = None,
        heartbeat: Callable[[int], None] = lambda now_ns: None,
    ) -> None:
        self._schedule = BoundarySchedule(config)
        self._trainer = trainer
        self._ledger = ledger
        self._write_step = write_step
        self._stop_requested = stop_requested
        self._call_timeout_s = call_timeout_s
        self._stage_wait_s = stage_wait_s
        self._attempt = attempt
        self._plan = dict(plan or {})
        self._heartbeat = heartbeat
        self._inbox: deque[FeederEvent] = deque()
        self._packed: dict[tuple[int, int], PackedMicrobatch] = {}
        self._tickets: dict[int, tuple[Kind, int]] = {}
        self._stage_error: ShmstageError | None = None
        self._stage_wait_began: float | None = None
        self._feeder: Feeder | None = None
        self._saved = config.first_step - 1
        self._quiet_since = time.monotonic()
        self._hands: dict[Kind, Callable[[Command], None]] = {
            Kind.FWD_BWD: self._forward,
            Kind.FWD_BWD_STAGED: self._forward,
            Kind.STAGE: self._stage,
            Kind.APPLY_DEFERRED: self._apply_deferred,
            Kind.UPDATE: self._update,
            Kind.GET_METRICS: self._get_metrics,
            Kind.SAVE_CHECKPOINT: self._save_checkpoint,
            Kind.SYNC_WEIGHTS: self._sync_weights,
            Kind.BOOKKEEP: self._bookkeep,
            Kind.FINISH: self._finish,
        }

    def deliver(self, event: FeederEvent) -> None:
        """Called on the feeder's thread."""
        self._inbox.append(event)
        self._trainer.wake()

    def prepare(self, restored: int | None) -> None:
        """What has to be over before the first forward call: checkpoint 0 durable, weights published.

        Without checkpoint 0 a crash in step 1 could not be undone. ``restored`` is the step gone back to, if any.
        """
        if restored is None:
            self._tickets[self._trainer.save_checkpoint(0, self._metadata(0))] = (Kind.SAVE_CHECKPOINT, 0)
        if self._schedule.config.weight_sync:
            version = restored or 0
            self._tickets[self._trainer.prepare_weight_sync(version)] = (Kind.SYNC_WEIGHTS, version)
        self._await_tickets("checkpoint 0 and the first weights to become durable")

    def run(self, feeder: Feeder) -> None:
        """Train to the end. Raises the error that ended the run, ``StoppedError`` when it was told to stop."""
        self._feeder = feeder
        feeder.allow(self._schedule.pack_limit)
        feeder.start()
        while not self._schedule.state.done:
            self._take_events(0.0)
            if self._stop_requested() and not self._schedule.state.stopping:
                self._schedule.stop()
            self._heartbeat(time.monotonic_ns())
            command = self._schedule.next()
            if command is None:
                self._take_events(POLL_S)
                self._check_waits()
                continue
            self._hands[command.kind](command)
            feeder.allow(self._schedule.pack_limit)
            self._quiet_since = time.monotonic()
        if self._stage_error is not None:
            raise self._stage_error
        self._save_last()
        if self._schedule.state.stopping:
            raise StoppedError(
                f"stopped by a signal; what was trained up to step {self._saved} is saved, --resume continues there"
            )

    # --- commands -----------------------------------------------------------------------------------------

    def _forward(self, command: Command) -> None:
        packed = self._packed[command.step, command.index]
        staged = command.kind is Kind.FWD_BWD_STAGED
        self._ledger.sent(packed)
        if staged:
            result = self._trainer.fwd_bwd_staged(packed.handle.request_id, defer_update=command.defer_update)
        else:
            result = self._trainer.fwd_bwd(packed.handle, defer_update=command.defer_update)
            if command.index == 0:
                self._ledger.not_staged(command.step, self._why_not_staged(command))
        if result.updated != (command.is_final and not command.defer_update):
            raise RunFailedError(
                f"{packed.handle.describe()}: the trainer {'ran' if result.updated else 'did not run'} the update, "
                f"final = {command.is_final}, deferred = {command.defer_update}"
            )
        del self._packed[command.step, command.index]
        self._ledger.forwarded(packed, result, staged=staged)
        self._schedule.returned(command)

    def _why_not_staged(self, command: Command) -> str:
        state, config = self._schedule.state, self._schedule.config
        if command.step == config.first_step:
            return "first step of the run"
        if not config.stages:
            return f"boundary = {config.mode}"
        return "staging was switched off" if not state.staging_on else "not packed in time"

    def _stage(self, command: Command) -> None:
        packed = self._packed[command.step, command.index]
        self._ledger.sent(packed)
        try:
            self._trainer.stage_fwd_bwd(packed.handle)
        except WaitTimeoutError as error:
            if error.from_peer:
                self._stage_raised(command, error)
                return
            print(f"staging is off for the rest of the run: {error}", flush=True)
            self._schedule.stage_lost(command)
        except (PeerLostError, PeerRestartedError, StoppedError):
            raise
        except ShmstageError as error:
            self._stage_raised(command, error)
        else:
            self._schedule.returned(command)

    def _stage_raised(self, command: Command, error: ShmstageError) -> None:
        """The trainer ran the stage and has spoken: there is an update to save before the run ends."""
        self._stage_error = error
        self._schedule.stage_raised(command)

    def _apply_deferred(self, command: Command) -> None:
        self._ledger.updated(command.step, self._trainer.apply_deferred_update())
        self._schedule.returned(command)

    def _update(self, command: Command) -> None:
        self._ledger.updated(command.step, self._trainer.update())
        self._schedule.returned(command)

    def _get_metrics(self, command: Command) -> None:
        self._expect(self._trainer.get_metrics(command.step), command)

    def _save_checkpoint(self, command: Command) -> None:
        self._expect(self._trainer.save_checkpoint(command.step, self._metadata(command.step)), command)

    def _save_last(self) -> None:
        """The last step is saved whatever ``checkpoint_every`` says, unless a stop came when the next had begun.

        The trainer refuses snapshots inside a step; then the newest checkpoint is where a resume goes on.
        """
        last = self._schedule.state.closed
        if last > self._saved and self._schedule.state.sent == 0:
            self._tickets[self._trainer.save_checkpoint(last, self._metadata(last))] = (Kind.SAVE_CHECKPOINT, last)
            self._await_tickets(f"the checkpoint of step {last}, the last one trained,")

    def _metadata(self, step: int) -> dict[str, Any]:
        return {"step": step, "plan": self._plan}

    def _sync_weights(self, command: Command) -> None:
        self._expect(self._trainer.prepare_weight_sync(command.step), command)

    def _expect(self, ticket: int, command: Command) -> None:
        self._tickets[ticket] = (command.kind, command.step)
        self._schedule.returned(command)

    def _bookkeep(self, command: Command) -> None:
        line = self._ledger.close_step(command.step, attempt=self._attempt)
        try:
            self._write_step(line)
        except Exception as error:  # a step line never ends a step
            print(f"step line {command.step} was not written: {error}", flush=True)
        self._schedule.returned(command)

    def _finish(self, command: Command) -> None:
        self._await_tickets("the last snapshots to become durable")
        self._schedule.returned(command)

    # --- events -------------------------------------------------------------------------------------------

    def _take_events(self, timeout_s: float) -> None:
        if self._inbox:
            timeout_s = 0.0
        for event in self._trainer.events(timeout_s):
            self._quiet_since = time.monotonic()
            if isinstance(event, TokenEvent):
                self._on_token(event)
            else:
                self._on_ticket(event)
        while self._inbox:
            self._quiet_since = time.monotonic()
            self._on_feeder(self._inbox.popleft())

    def _on_feeder(self, event: FeederEvent) -> None:
        if isinstance(event, EndOfInput):
            if event.error is not None and not self._schedule.state.stopping:
                raise event.error
            self._schedule.end_of_input()
            return
        handle = event.handle
        self._packed[handle.step, handle.index] = event
        self._schedule.packed(handle.step, handle.index, handle.is_final)

    def _on_token(self, event: TokenEvent) -> None:
        if not event.ok:
            error = TokenFailedError(
                f"{event.kind} of step {event.step}, micro-batch {event.index} failed on the device: {event.error}; "
                "no partial update was made; resume starts from the last checkpoint"
            )
            if event.kind == "staged" and self._schedule.stage_failed_later(event.step, event.index):
                self._stage_error = error
                return
            raise error
        self._ledger.token(event)
        if event.kind == "fwd_bwd":
            self._schedule.finished(event.step, event.index)
        elif event.kind == "update":
            self._schedule.landed(event.step)
        self._note_if_complete(event.step)

    def _on_ticket(self, event: TicketEvent) -> None:
        # events are read between calls only, so the reply that named the ticket has been seen
        kind, step = self._tickets.pop(event.ticket)
        if not event.ok:
            raise RunFailedError(event.error)  # names what failed, and of which step
        if kind is Kind.SAVE_CHECKPOINT:
            self._saved = max(self._saved, step)
        if kind is Kind.GET_METRICS:
            self._ledger.metrics(step, event.value)
            self._note_if_complete(step)

    def _note_if_complete(self, step: int) -> None:
        if self._ledger.is_complete(step):
            self._schedule.metrics_ready(step)

    # --- waits, each with a deadline ----------------------------------------------------------------------

    def _check_waits(self) -> None:
        now = time.monotonic()
        if not self._schedule.waits_for_stage:
            self._stage_wait_began = None
        elif self._stage_wait_s is not None:
            self._stage_wait_began = self._stage_wait_began or now
            if now - self._stage_wait_began > self._stage_wait_s:
                self._stage_wait_began = None
                self._schedule.stage_wait_over()
        waits_for_input = self._schedule.state.bookkeep == () and not self._tickets
        if not waits_for_input and now - self._quiet_since > self._call_timeout_s:
            raise WaitTimeoutError(
                f"nothing from the trainer for {self._call_timeout_s:.0f} s while waiting for step "
                f"{self._schedule.state.bookkeep or self._schedule.state.step} to complete; see its log, "
                "or raise call_timeout_s"
            )

    def _await_tickets(self, what: str) -> None:
        deadline = time.monotonic() + self._call_timeout_s
        while self._tickets:
            if time.monotonic() > deadline:
                names = ", ".join(f"{kind} {step}" for kind, step in self._tickets.values())
                raise WaitTimeoutError(
                    f"waited {self._call_timeout_s:.0f} s for {what}; the trainer still holds {names}"
                )
            self._take_events(POLL_S)

"""Gives ``BoundarySchedule`` its hands: one feeder thread packs, the calling thread talks to the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from shmstage.errors import (
    PeerLostError,
    PeerRestartedError,
    RunFailedError,
    ShmstageError,
    StoppedError,
    TrainerError,
    WaitTimeoutError,
)
from shmstage.events import NO_EVENTS, Events
from shmstage.orchestrator.evaluation import Evaluator
from shmstage.orchestrator.feeder import Feeder
from shmstage.orchestrator.hooks import Hooks, Judging
from shmstage.orchestrator.late_fields import LateFieldWriter
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.listener import Listener
from shmstage.orchestrator.patience import Patience
from shmstage.orchestrator.saving import Saving
from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config, Kind
from shmstage.orchestrator.trainer_client import TrainerClient

#: longest the program sits without looking at stop and deadlines, in seconds
POLL_S = 0.2
#: how often the pool's header is told that there is progress
HEARTBEAT_NS = 50_000_000


#: errors of a call that say nothing of what the trainer did with it, or that nothing can be done about
BROKEN = (PeerLostError, PeerRestartedError, StoppedError)
ROLES = {Kind.SCORE_REFERENCE: "reference", Kind.SCORE_ACTOR: "actor"}


@final
class Program:
    """Runs the schedule to its end on the calling thread.

    ``saving`` is what goes into checkpoints and what is known to be durable. ``write_step`` gets each step line and
    says whether it is written; whatever it raises is said once and never ends the run. ``sync_lines`` makes lines
    survive a loss of power. ``stop_requested`` is asked between commands. ``hooks``, ``evaluator`` and ``late`` belong
    to the settings of the same name; ``config`` says whether they are used. ``weights_published`` gets what readers
    need, of each version that they can take; what it raises ends the run.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainerClient,
        ledger: Ledger,
        saving: Saving,
        *,
        write_step: Callable[[dict[str, Any]], bool],
        stop_requested: Callable[[], bool],
        call_timeout_s: float,
        stage_wait_s: float | None = None,
        attempt: int = 1,
        heartbeat: Callable[[int], None] = lambda now_ns: None,
        sync_lines: Callable[[], bool] = lambda: True,
        hooks: Hooks | None = None,
        hook_timeout_s: float = 3600.0,
        evaluator: Evaluator | None = None,
        late: LateFieldWriter | None = None,
        events: Events = NO_EVENTS,
        weights_published: Callable[[Mapping[str, Any]], None] = lambda published: None,
    ) -> None:
        self._schedule = BoundarySchedule(config)
        self._trainer = trainer
        self._ledger = ledger
        self._saving = saving
        self._write_step = write_step
        self._stop_requested = stop_requested
        self._call_timeout_s = call_timeout_s
        self._patience = Patience(call_timeout_s=call_timeout_s, stage_wait_s=stage_wait_s)
        self._attempt = attempt
        self._heartbeat = heartbeat
        self._hooks = hooks
        self._judging = Judging(hooks, lambda step: saving.facts(step, ledger), timeout_s=hook_timeout_s)
        self._evaluator = evaluator
        self._late = late
        self._events = events
        self._heard = Listener(
            self._schedule, trainer, ledger, saving, self._judging, self._patience, late, sync_lines, weights_published
        )
        #: called on the feeder's and the hooks' thread
        self.deliver = self._heard.deliver
        self._hands: dict[Kind, Callable[[Command], None]] = {
            Kind.FWD_BWD: self._forward,
            Kind.FWD_BWD_STAGED: self._forward,
            Kind.STAGE: self._stage,
            Kind.SCORE_REFERENCE: self._score,
            Kind.SCORE_ACTOR: self._score,
            Kind.PATCH: self._patch,
            Kind.APPLY_DEFERRED: self._apply_deferred,
            Kind.UPDATE: self._update,
            Kind.GET_METRICS: self._get_metrics,
            Kind.SAVE_CHECKPOINT: self._save_checkpoint,
            Kind.SYNC_WEIGHTS: self._sync_weights,
            Kind.EVAL: self._eval,
            Kind.BOOKKEEP: self._bookkeep,
            Kind.FINISH: self._finish,
        }

    @property
    def ended_by(self) -> str | None:
        """What ended the run before its last step, other than a signal or an error."""
        return self._heard.ended_by

    def prepare(self, restored: int | None) -> None:
        """What has to be over before the first forward call: checkpoint 0 durable, weights published, hook heard.

        Without checkpoint 0 a crash in step 1 could not be undone. ``restored`` is the step gone back to, if any; no
        weights older than those published are published again.
        """
        version = restored or 0
        if restored is None:
            self._save(0)
        if self._schedule.config.weight_sync != "off" and version >= self._saving.published:
            self._sync(version)
        verdict = self._judging.restored(version) if restored is not None else None
        if verdict is not None:
            self._heard.on_verdict(verdict)
        self._await_snapshots("checkpoint 0 and the first weights to become durable")
        self._await_verdicts()

    def run(self, feeder: Feeder) -> None:
        """Train to the end. Raises the error that ended the run, ``StoppedError`` when it was told to stop."""
        self._heard.feeder = feeder
        feeder.allow(self._schedule.pack_limit)
        feeder.start()
        beaten_ns = 0
        while not self._schedule.state.done:
            self._heard.take(0.0)
            if self._stop_requested() and not self._schedule.state.stopping:
                self._schedule.stop()
            if feeder.wants_checkpoint:
                self._schedule.want_checkpoint()
            now_ns = time.monotonic_ns()
            if now_ns - beaten_ns >= HEARTBEAT_NS:
                beaten_ns = now_ns
                self._heartbeat(now_ns)
            command = self._schedule.next()
            if command is None:
                if self._schedule.state.deferred and self._schedule.state.verdicts_due:
                    self._ledger.held_by_hook(self._schedule.state.closed)
                self._heard.take(POLL_S)
                self._check_waits()
                continue
            self._hands[command.kind](command)
            feeder.allow(self._schedule.pack_limit)
            self._patience.news()
        self._end()

    def _end(self) -> None:
        try:
            if not self._schedule.state.discarding:
                self._save_last()
        except ShmstageError as error:
            raise self._heard.error or error from None
        if self._heard.error is not None:
            raise self._heard.error
        if self._schedule.state.stopping:
            raise StoppedError(
                f"stopped by a signal; what was trained up to step {self._saving.saved} is saved, "
                "--resume continues there"
            )

    # --- commands -----------------------------------------------------------------------------------------

    def _forward(self, command: Command) -> None:
        packed = self._heard.packed[command.key]
        staged = command.kind is Kind.FWD_BWD_STAGED
        self._ledger.sent(packed)
        if staged:
            result = self._trainer.fwd_bwd_staged(packed.handle.request_id, defer_update=command.defer_update)
        else:
            patch = self._heard.patches.get(command.key)
            handle = replace(packed.handle, loss_tokens=patch.loss_tokens) if patch else packed.handle
            result = self._trainer.fwd_bwd(handle, defer_update=command.defer_update)
            if command.index == 0:
                self._ledger.not_staged(command.step, self._why_not_staged(command))
        if result.updated != (command.is_final and not command.defer_update):
            raise RunFailedError(
                f"{packed.handle.describe()}: the trainer {'ran' if result.updated else 'did not run'} the update, "
                f"final = {command.is_final}, deferred = {command.defer_update}"
            )
        del self._heard.packed[command.key]
        self._heard.patches.pop(command.key, None)
        self._saving.trained(packed)
        self._ledger.forwarded(packed, result, staged=staged)
        self._schedule.returned(command)
        if command.is_final:
            self._note_evaluation(command.step)

    def _why_not_staged(self, command: Command) -> str:
        state, config = self._schedule.state, self._schedule.config
        if command.step == config.first_step:
            return "first step of the run"
        if not config.stages:
            return f"boundary = {config.mode}"
        if state.latch == "off":
            return f"latch: {self._ledger.latch.reason}"
        late = "not packed, or not scored, in time" if config.reference_logps else "not packed in time"
        return "staging was switched off" if not state.staging_on else late

    def _stage(self, command: Command) -> None:
        packed = self._heard.packed[command.key]
        self._ledger.sent(packed)
        try:
            self._trainer.stage_fwd_bwd(packed.handle)
        except BROKEN:
            raise
        except ShmstageError as error:
            if error.from_peer:
                self._stage_raised(command, error)
            else:
                self._stage_lost(command, error)
        else:
            self._schedule.returned(command)

    def _stage_lost(self, command: Command, error: ShmstageError) -> None:
        print(f"staging is off for the rest of the run: {error}", flush=True)
        self._schedule.stage_lost(command)

    def _stage_raised(self, command: Command, error: ShmstageError) -> None:
        """The trainer ran the stage and has spoken: there is an update to save before the run ends."""
        self._heard.failed(error)
        self._schedule.stage_raised(command)

    def _score(self, command: Command) -> None:
        """Have log-probs computed; they are there when the ticket says so."""
        handle = self._heard.packed[command.key].handle
        staged = self._schedule.state.staged
        if command.kind is Kind.SCORE_ACTOR and self._late is not None:
            self._late.before_scoring(handle)
        try:
            if staged is not None and staged.key == command.key:
                ticket = self._trainer.score_staged(handle.request_id, ROLES[command.kind])
            else:
                ticket = self._trainer.per_token_logps(handle, ROLES[command.kind])
        except BROKEN:
            raise
        except ShmstageError as error:
            self._schedule.returned(command)
            self._heard.score_failed(command.key, error)
        else:
            self._heard.tickets[ticket] = (command.kind, command.key)
            self._schedule.returned(command)

    def _patch(self, command: Command) -> None:
        patch = self._heard.patches[command.key]
        self._trainer.patch_staged(self._heard.packed[command.key].handle.request_id, patch.fields, patch.loss_tokens)
        self._schedule.returned(command)

    def _apply_deferred(self, command: Command) -> None:
        self._ledger.updated(command.step, self._trainer.apply_deferred_update(command.step))
        self._schedule.returned(command)

    def _update(self, command: Command) -> None:
        self._ledger.updated(command.step, self._trainer.update(command.step))
        self._schedule.returned(command)
        self._note_evaluation(command.step)

    def _note_evaluation(self, step: int) -> None:
        """Before any event is read: what is known of the step is not complete without its evaluation."""
        if Kind.EVAL in self._schedule.state.duties:
            self._ledger.eval_due(step)

    def _get_metrics(self, command: Command) -> None:
        self._heard.tickets[self._trainer.get_metrics(command.step)] = (command.kind, command.key)
        self._schedule.returned(command)

    def _save_checkpoint(self, command: Command) -> None:
        self._save(command.step)
        self._schedule.returned(command)

    def _save(self, step: int) -> None:
        ticket = self._trainer.save_checkpoint(step, self._saving.metadata(step))
        self._heard.tickets[ticket] = (Kind.SAVE_CHECKPOINT, (step, -1))

    def _save_last(self) -> None:
        """The last complete step is saved whatever ``checkpoint_every`` says.

        Inside the next step a trainer may refuse: its forward pass changes what would be saved. Then a resume goes on
        from the newest checkpoint there is.
        """
        last = self._schedule.state.closed
        if last <= self._saving.saved:
            return
        try:
            self._save(last)
        except TrainerError as error:
            if not error.from_peer or self._schedule.state.sent == 0:
                raise
            print(f"step {last} is not saved: {error}", flush=True)
            return
        self._await_snapshots(f"the checkpoint of step {last}, the last one trained,")
        self._await_verdicts()

    def _sync_weights(self, command: Command) -> None:
        self._sync(command.step)
        self._schedule.returned(command)

    def _sync(self, version: int) -> None:
        self._saving.publishing(version)
        ticket = self._trainer.prepare_weight_sync(version, sync=self._schedule.config.weight_sync == "sync")
        self._heard.tickets[ticket] = (Kind.SYNC_WEIGHTS, (version, -1))

    def _eval(self, command: Command) -> None:
        assert self._evaluator is not None
        for handle in self._evaluator.handles(command.step):
            self._heard.tickets[self._trainer.eval_step(handle)] = (command.kind, command.key)
            self._ledger.eval_sent(command.step)
        self._ledger.eval_all_sent(command.step)
        self._schedule.returned(command)
        self._heard.note_if_complete(command.step)

    def _bookkeep(self, command: Command) -> None:
        begin_ns = time.monotonic_ns()
        line = self._ledger.close_step(command.step, attempt=self._attempt)
        self._schedule.latch(self._ledger.latch.level)
        try:
            written = self._write_step(line)
        except Exception as error:  # a step line never ends a step
            written = False
            print(f"step line {command.step} was not written: {error}", flush=True)
        if self._hooks is not None:
            self._hooks.step_ended(line)
        self._events.note("bookkept", begin_ns, time.monotonic_ns(), step=command.step)
        self._heard.durable(self._saving.line_ready(line, written=written))
        self._schedule.returned(command)

    def _finish(self, command: Command) -> None:
        if not self._schedule.state.discarding:
            self._await_snapshots("the last snapshots to become durable")
            self._await_verdicts()
        self._schedule.returned(command)

    # --- waits, each with a deadline ----------------------------------------------------------------------

    def _await_verdicts(self) -> None:
        self._judging.ask()
        while self._judging.going_on:
            if self._stop_requested():
                raise StoppedError(f"stopped while on_checkpoint judges {self._judging.going_on}")
            self._heard.take(POLL_S)
            self._judging.check()

    def _check_waits(self) -> None:
        if self._patience.stage_is_overdue(self._schedule.waits_for_stage):
            self._schedule.stage_wait_over()
        self._judging.check()
        state = self._schedule.state
        others = self._judging.going_on or self._schedule.waits_for_stage
        if (state.bookkeep or self._heard.tickets) and not others:
            step = (*state.bookkeep, state.step)[0]
            self._patience.check(f"step {step} to complete", self._trainer.missing)

    def _await_snapshots(self, what: str) -> None:
        deadline = time.monotonic() + self._call_timeout_s
        while self._heard.tickets:
            if time.monotonic() > deadline:
                names = ", ".join(f"{kind} {key[0]}" for kind, key in self._heard.tickets.values())
                raise WaitTimeoutError(
                    f"waited {self._call_timeout_s:g} s for {what}; the trainer still holds {names}; see its log, or "
                    f"raise call_timeout_s{self._trainer.missing()}"
                )
            self._heard.take(POLL_S)

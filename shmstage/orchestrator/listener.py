"""What the program hears: tokens, tickets, micro-batches, verdicts; each goes to whoever has to know of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

from shmstage.errors import RunFailedError, ShmstageError, TokenFailedError
from shmstage.orchestrator.feeder import EndOfInput, Feeder, FeederEvent, PackedMicrobatch
from shmstage.orchestrator.hooks import Judging, Verdict
from shmstage.orchestrator.late_fields import LateFieldWriter, Patch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.patience import Patience
from shmstage.orchestrator.saving import Saving
from shmstage.orchestrator.schedule import SCORE, BoundarySchedule, Key, Kind
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.wire.messages import TicketEvent, TokenEvent


@final
class Listener:
    """Used on the program's thread, between its calls; only ``deliver`` may be called on others.

    ``packed``, ``patches`` and ``tickets`` are what is under way. ``error`` is what the run will end with once the open
    boundary is done. What cannot wait for that is raised by ``take``.
    """

    def __init__(
        self,
        schedule: BoundarySchedule,
        trainer: TrainerClient,
        ledger: Ledger,
        saving: Saving,
        judging: Judging,
        patience: Patience,
        late: LateFieldWriter | None,
        sync_lines: Callable[[], bool],
        weights_published: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.packed: dict[Key, PackedMicrobatch] = {}
        self.patches: dict[Key, Patch] = {}
        self.tickets: dict[int, tuple[Kind, Key]] = {}
        self.error: ShmstageError | None = None
        self.ended_by: str | None = None
        self.feeder: Feeder | None = None
        self._schedule = schedule
        self._trainer = trainer
        self._ledger = ledger
        self._saving = saving
        self._judging = judging
        self._patience = patience
        self._late = late
        self._sync_lines = sync_lines
        self._weights_published = weights_published
        self._inbox: deque[FeederEvent | Verdict] = deque()

    def deliver(self, event: FeederEvent | Verdict) -> None:
        """Called on the feeder's and the hooks' thread."""
        self._inbox.append(event)
        self._trainer.wake()

    def failed(self, error: ShmstageError) -> None:
        """The run goes on to the end of the open boundary; the first error is what it ends with."""
        self.error = self.error or error

    def score_failed(self, key: Key, error: ShmstageError) -> None:
        """What was trained before that micro-batch is kept, if it begins a step; then the run ends."""
        if not self._schedule.late_field_failed(key):
            raise error
        self.failed(error)

    def take(self, timeout_s: float) -> None:
        """Hear what has come, or wait up to ``timeout_s`` for the first. Raises what ends the run at once."""
        if self._inbox:
            timeout_s = 0.0
        for event in self._trainer.events(timeout_s):
            self._patience.news()
            if isinstance(event, TokenEvent):
                self._on_token(event)
            else:
                self._on_ticket(event)
        while self._inbox:
            self._patience.news()
            found = self._inbox.popleft()
            if isinstance(found, Verdict):
                self.on_verdict(found)
            else:
                self._on_feeder(found)

    def _on_feeder(self, event: FeederEvent) -> None:
        if isinstance(event, EndOfInput):
            if event.error is not None and not self._schedule.state.stopping:
                raise event.error
            self._schedule.end_of_input()
            return
        handle = event.handle
        self.packed[handle.step, handle.index] = event
        self._schedule.packed(handle.step, handle.index, handle.is_final)

    def _on_token(self, event: TokenEvent) -> None:
        if not event.ok:
            error = TokenFailedError(
                f"{event.kind} of step {event.step}, micro-batch {event.index} failed on the device: {event.error}; "
                "no partial update was made; resume starts from the last checkpoint"
            )
            uploads = event.kind in ("staged", "patched")
            if uploads and self._schedule.stage_failed_later(event.step, event.index):
                self.failed(error)
                return
            raise error
        self._ledger.token(event)
        if event.kind == "fwd_bwd":
            self._schedule.finished(event.step, event.index)
        elif event.kind == "update":
            self._schedule.landed(event.step)
            if self.feeder is not None:
                self.feeder.landed(event.step)
        self.note_if_complete(event.step)

    def _on_ticket(self, event: TicketEvent) -> None:
        # events are read between calls only, so the reply that named the ticket has been seen, unless its call was
        # given up
        if event.ticket not in self.tickets:
            return
        kind, key = self.tickets.pop(event.ticket)
        self._ledger.ticket(kind, event)
        if not event.ok:
            self._ticket_failed(kind, key, RunFailedError(event.error))  # names what failed, and of which step
        elif kind in SCORE:
            self._on_score(kind, key, event.value)
        elif kind is Kind.SAVE_CHECKPOINT:
            self.durable(self._saving.checkpoint_durable(key[0], event.value))
            self._judging.durable(key[0])
        elif kind is Kind.SYNC_WEIGHTS:
            self._schedule.weights_published(key[0])
            if not event.value.get("skipped"):
                self._weights_published(event.value)
        elif kind is Kind.GET_METRICS:
            self._ledger.metrics(key[0], event.value)
        elif kind is Kind.EVAL:
            self._ledger.eval_done(key[0], event.value)
        self.note_if_complete(key[0])
        self._judging.ask()

    def _ticket_failed(self, kind: Kind, key: Key, error: ShmstageError) -> None:
        if kind in SCORE:
            self.score_failed(key, error)
            return
        if self.feeder is None or not self._schedule.ticket_failed(key[0]):
            raise self.error or error
        self.failed(error)
        if kind is Kind.GET_METRICS:
            self._ledger.metrics(key[0], {})  # the line is written without them
        if kind is Kind.EVAL:
            self._ledger.eval_done(key[0], {})

    def _on_score(self, kind: Kind, key: Key, value: Mapping[str, Any]) -> None:
        packed = self.packed[key]
        self._ledger.late_field(packed, str(value["field"]), str(value["digest"]))
        if kind is Kind.SCORE_ACTOR and self._late is not None:
            patch = self.patches[key] = self._late.after_scoring(packed.handle)
            for name, digest in patch.digests:
                self._ledger.late_field(packed, name, digest)
        self._schedule.late_field_ready(kind, key)

    def note_if_complete(self, step: int) -> None:
        if self._ledger.is_complete(step):
            self._schedule.metrics_ready(step)

    def durable(self, step: int | None) -> None:
        if step is not None and self.feeder is not None and self._sync_lines():
            self.feeder.durable(step)

    def on_verdict(self, verdict: Verdict) -> None:
        if not self._judging.heard(verdict):
            return
        if verdict.error:
            raise RunFailedError(verdict.error)
        if not verdict.go_on:
            self.ended_by = f"hook at checkpoint {verdict.step}"
        self._schedule.hook_returned(verdict.step, go_on=verdict.go_on)

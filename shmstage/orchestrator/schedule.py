"""The step boundary as a sans-IO state machine: events in, commands out; no threads, no clock, no sockets.

``BoundarySchedule`` decides only *order*; ``program.py`` gives it hands. Steps count from 1, so that checkpoint k and
weights k are the state after update k, and checkpoint 0 is the state before the first.

The modes differ in: whether the next step may be packed, and begun, before this step's bookkeeping (``pack_limit``,
``next_command``), whether micro-batches are staged inside a step (``_forward``), whether its last call defers the
update (``last_call_defers``), and which duties follow that call (``_close_step``).
"""

from __future__ import annotations

from typing import final

from shmstage.frozen import replace
from shmstage.orchestrator import schedule_events as events
from shmstage.orchestrator.commands import FORWARD, SCORE, Command, Key, Kind, Micro
from shmstage.orchestrator.schedule_next import next_command, waits_to_plan
from shmstage.orchestrator.schedule_state import Config, Latch, State, packed_as

__all__ = ["FORWARD", "SCORE", "BoundarySchedule", "Command", "Config", "Key", "Kind", "Latch", "Micro", "State"]


@final
class BoundarySchedule:
    """Mutable holder of ``State``; the pure functions beside it are the machine itself."""

    def __init__(self, config: Config, state: State | None = None) -> None:
        before = config.first_step - 1
        self.config = config
        self.state = state or State(
            config.first_step, closed=before, landed=before, metrics_of=before, published=before, saved=before
        )

    def next(self) -> Command | None:
        """The next command, marked as in flight; ``None`` while it has to wait for an event."""
        command = next_command(self.config, self.state)
        if command is not None:
            self.state = replace(self.state, in_flight=command)
        return command

    @property
    def pack_limit(self) -> Key:
        """The last (step, index) the feeder may pack now."""
        return events.pack_limit(self.config, self.state)

    @property
    def waits_for_stage(self) -> bool:
        """True while the only thing missing is the micro-batch that a planned stage, or the plan for one, waits for."""
        state = self.state
        if state.in_flight is not None:
            return False
        if state.duties[:1] == (Kind.STAGE,):
            return packed_as(state, (state.closed + 1, 0)) is None
        is_last_call = state.sent == self.config.microbatches_per_step - 1
        return is_last_call and not state.duties and waits_to_plan(self.config, state)

    # --- the feeder -----------------------------------------------------------------------------------------

    def packed(self, step: int, index: int, is_final: bool) -> None:
        self.state = replace(self.state, packed=(*self.state.packed, Micro(step, index, is_final)))

    def end_of_input(self) -> None:
        self.state = replace(self.state, exhausted=True)

    # --- the call in flight ---------------------------------------------------------------------------------

    def returned(self, command: Command) -> None:
        self.state = events.on_returned(self.config, self.state, command)

    def stage_lost(self, command: Command) -> None:
        self.state = events.on_stage_lost(self.state)

    def stage_raised(self, command: Command) -> None:
        self.state = events.on_stage_failed(self.config, self.state)

    # --- completion -----------------------------------------------------------------------------------------

    def finished(self, step: int, index: int) -> None:
        """A micro-batch's first attempt is over and ok; a replay comes before the update in any case."""
        self.state = replace(self.state, finished=max(self.state.finished, (step, index)))

    def landed(self, step: int) -> None:
        """Update ``step``'s token is ready and ok."""
        self.state = replace(self.state, landed=max(self.state.landed, step))

    def metrics_ready(self, step: int) -> None:
        self.state = replace(self.state, metrics_of=max(self.state.metrics_of, step))

    def weights_published(self, version: int) -> None:
        self.state = replace(self.state, published=max(self.state.published, version))

    def hook_returned(self, step: int, *, go_on: bool) -> None:
        self.state = events.on_hook_returned(self.state, step, go_on=go_on)

    def late_field_ready(self, kind: Kind, key: Key) -> None:
        """Scores lie in the slot, and whatever the producer derives from them."""
        if kind is Kind.SCORE_REFERENCE:
            self.state = replace(self.state, reference_ready=(*self.state.reference_ready, key))
        elif self.state.actor_sent == key:
            self.state = replace(self.state, actor_ready=key)

    # --- failures that are not the end at once; ``False``: this one is ----------------------------------------

    def stage_failed_later(self, step: int, index: int) -> bool:
        """An upload failed after its call had returned; ``False`` if that micro-batch is not merely staged any more."""
        staged = self.state.staged
        if staged is None or staged.key != (step, index):
            return False
        self.state = events.on_stage_failed(self.config, self.state)
        return True

    def late_field_failed(self, key: Key) -> bool:
        return self._goes_on(events.on_late_field_failed(self.config, self.state, key))

    def ticket_failed(self, step: int) -> bool:
        return self._goes_on(events.on_ticket_failed(self.config, self.state, step))

    def _goes_on(self, state: State | None) -> bool:
        self.state = state or self.state
        return state is not None

    # --- from outside ---------------------------------------------------------------------------------------

    def stage_wait_over(self) -> None:
        self.state = replace(self.state, stage_wait_over=True)

    def latch(self, latch: Latch) -> None:
        self.state = replace(self.state, latch=latch)

    def want_checkpoint(self) -> None:
        """The next boundary saves, whatever ``checkpoint_every`` says: memory is held until it does."""
        self.state = replace(self.state, checkpoint_wanted=True)

    def stop(self) -> None:
        """Stop as on a signal: a deferred update is applied first, nothing new is begun."""
        self.state = replace(self.state, stopping=True)

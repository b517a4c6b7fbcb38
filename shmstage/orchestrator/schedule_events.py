"""What an event changes: pure, one function per event."""

from __future__ import annotations

from shmstage.frozen import replace
from shmstage.orchestrator.commands import FORWARD, Command, Key, Kind, Micro
from shmstage.orchestrator.schedule_state import Config, State, checkpoint_is_due, stage_is_planned


def on_returned(config: Config, state: State, command: Command) -> State:
    """The command in flight returned. A return proves dispatch only; completion comes as its own event."""
    state = replace(state, in_flight=None)
    kind, key = command.kind, command.key
    if kind in FORWARD:
        state = replace(
            _forget(state, key), packed=_without(state.packed, key), staged=None, sent=state.sent + 1
        )
        return _close_step(config, state, command.defer_update) if command.is_final else state
    if kind is Kind.STAGE:
        micro = Micro(command.step, command.index, command.is_final)
        duties = state.duties[1:] if state.duties[:1] == (Kind.STAGE,) else state.duties
        return _next_step_if_done(replace(state, packed=_without(state.packed, key), staged=micro, duties=duties))
    if kind is Kind.SCORE_REFERENCE:
        return replace(state, reference_sent=(*state.reference_sent, key))
    if kind is Kind.SCORE_ACTOR:
        return replace(state, actor_sent=key)
    if kind is Kind.PATCH:
        return replace(state, patched=key)
    if kind is Kind.UPDATE:
        return _close_step(config, state, False)
    if kind is Kind.BOOKKEEP:
        return replace(state, bookkeep=state.bookkeep[1:])
    if kind is Kind.FINISH:
        return replace(state, done=True)
    # a duty: everything before it in the list (a skipped stage) is over, too
    state = replace(state, duties=state.duties[state.duties.index(kind) + 1 :])
    if kind is Kind.APPLY_DEFERRED:
        state = replace(state, deferred=False)
    if kind is Kind.SAVE_CHECKPOINT:
        due = (*state.verdicts_due, command.step) if config.hook else ()
        state = replace(state, saved=command.step, verdicts_due=due)
    return _next_step_if_done(state)


def _without(packed: tuple[Micro, ...], key: Key) -> tuple[Micro, ...]:
    return tuple(m for m in packed if m.key != key)


def _forget(state: State, key: Key) -> State:
    """What was noted of the late fields of a micro-batch that is trained now."""
    sent = tuple(k for k in state.reference_sent if k != key)
    ready = tuple(k for k in state.reference_ready if k != key)
    return replace(
        state, reference_sent=sent, reference_ready=ready, actor_sent=None, actor_ready=None, patched=None
    )


def _close_step(config: Config, state: State, deferred: bool) -> State:
    """Step k's last forward call (or its ``update``) returned: line up what the boundary still owes."""
    duties: list[Kind] = []
    if deferred:
        duties = [Kind.STAGE, Kind.APPLY_DEFERRED]
    elif stage_is_planned(config, state):
        duties = [Kind.STAGE]
    duties.append(Kind.GET_METRICS)
    if checkpoint_is_due(config, state, state.step):
        duties.append(Kind.SAVE_CHECKPOINT)
    if config.weight_sync != "off" and state.step >= config.weights_floor:
        duties.append(Kind.SYNC_WEIGHTS)
    if config.eval_every > 0 and state.step % config.eval_every == 0:
        duties.append(Kind.EVAL)
    return replace(
        state, closed=state.step, deferred=deferred, duties=tuple(duties), stage_wait_over=False,
        checkpoint_wanted=False, bookkeep=(*state.bookkeep, state.step),
    )  # fmt: skip


def _next_step_if_done(state: State) -> State:
    if state.duties or state.closed != state.step:
        return state
    return replace(state, step=state.step + 1, sent=0)


# --- when something fails -------------------------------------------------------------------------------


def on_stage_lost(state: State) -> State:
    """The stage did not reach the trainer: F is sent whole in its turn and staging is off for the rest of the run."""
    return _next_step_if_done(replace(_without_stage(state), in_flight=None, staging_on=False))


def on_stage_failed(config: Config, state: State) -> State:
    """The trainer ran the stage and it failed, at once or later: update k, checkpoint k, then the run ends.

    Inside a step there is nothing to save: the step is not complete, and nothing more is begun.
    """
    inside = state.sent > 0 and not state.duties
    # what fails later must not take back the command that is in flight by then
    lands = state.in_flight is not None and state.in_flight.kind is Kind.STAGE
    state = replace(state, in_flight=None if lands else state.in_flight, staged=None, staging_on=False)
    return replace(state, stopping=True) if inside else ends_after_boundary(config, state)


def on_late_field_failed(config: Config, state: State, key: Key) -> State | None:
    """Scoring a micro-batch failed; ``None`` if it belongs to a step that has begun, which cannot be completed."""
    begun = key[0] <= state.step and state.sent > 0 and state.closed < key[0]
    return None if begun or key[0] < state.step else ends_after_boundary(config, state)


def on_ticket_failed(config: Config, state: State, step: int) -> State | None:
    """A snapshot of ``step`` failed: the run ends at the next boundary.

    ``None``: the next update is not dispatched yet, so it ends here.
    """
    return None if _updated(state) <= step else ends_after_boundary(config, state)


def ends_after_boundary(config: Config, state: State) -> State:
    """No further step is begun; what the open boundary owes is done, and its step saved."""
    state = _without_stage(replace(state, last_step=_open_step(state)))
    at_boundary = state.duties or (state.sent == 0 and state.closed >= config.first_step)
    saved = Kind.SAVE_CHECKPOINT in state.duties or state.saved == state.closed
    if at_boundary and not saved:
        duties = list(state.duties)
        after = [d for d in duties if d in (Kind.SYNC_WEIGHTS, Kind.EVAL)]
        duties.insert(duties.index(after[0]) if after else len(duties), Kind.SAVE_CHECKPOINT)
        return replace(state, duties=tuple(duties))
    return state


def _open_step(state: State) -> int:
    """The last step that has begun: the one that closes at the next (or this) boundary."""
    return state.step if state.sent > 0 else state.step - 1


def _updated(state: State) -> int:
    """The last step whose update was dispatched."""
    return state.closed - 1 if state.deferred else state.closed


def _without_stage(state: State) -> State:
    return replace(state, duties=tuple(d for d in state.duties if d is not Kind.STAGE))


def on_hook_returned(state: State, step: int, *, go_on: bool) -> State:
    """The hook has spoken on checkpoint ``step``. To end there drops deferral, stage and gradients."""
    state = replace(state, verdicts_due=tuple(s for s in state.verdicts_due if s != step))
    if go_on:
        return state
    kept = tuple(s for s in state.bookkeep if s <= _updated(state))
    return replace(state, discarding=True, duties=(), bookkeep=kept)


def pack_limit(config: Config, state: State) -> Key:
    """The last (step, index) the feeder may pack: at most one step ahead, in ``serial`` never past open bookkeeping."""
    last_index = config.microbatches_per_step - 1
    if config.mode == "serial":
        return (state.closed, last_index) if state.bookkeep else (state.closed + 1, last_index)
    return (state.closed + 2, 0)

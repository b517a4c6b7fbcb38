"""What comes next: pure, from ``Config`` and ``State`` alone."""

from __future__ import annotations

from shmstage.frozen import replace
from shmstage.orchestrator.commands import SCORE, Command, Kind, Micro
from shmstage.orchestrator.schedule_state import Config, State, is_last, last_call_defers, packed_as

#: what goes before bookkeeping: it gives the device something to do while the host keeps books
BEFORE_BOOKS = (Kind.STAGE, *SCORE)


def next_command(config: Config, state: State) -> Command | None:
    """The command ``state`` calls for, or ``None`` while an event is missing."""
    if state.done or state.in_flight is not None:
        return None
    command = None if state.discarding else _trainer_command(config, state)
    if command is not None and (state.duties or command.kind in BEFORE_BOOKS):
        return command
    if _bookkeeping_is_due(config, state):
        return Command(Kind.BOOKKEEP, state.bookkeep[0])
    over = state.discarding or (not state.duties and is_over(config, state))
    if over and not state.bookkeep:
        return Command(Kind.FINISH, state.step)
    return command


def _trainer_command(config: Config, state: State) -> Command | None:
    if state.duties:
        return _duty(config, state)
    if is_over(config, state) or (config.mode == "serial" and state.bookkeep):
        return None
    return _forward(config, state)


def is_over(config: Config, state: State) -> bool:
    """Nothing new is begun."""
    if state.stopping:
        return True
    if state.sent == 0 and is_last(config, state, state.step - 1):
        return True
    return state.exhausted and state.sent == 0 and state.staged is None and packed_as(state, (state.step, 0)) is None


# --- at the boundary ------------------------------------------------------------------------------------


def _duty(config: Config, state: State) -> Command | None:
    duty = state.duties[0]
    if duty is Kind.STAGE:
        return _planned_stage(config, state)
    if duty is Kind.APPLY_DEFERRED and _verdict_is_missing(state):
        return None
    return Command(duty, state.closed)


def _planned_stage(config: Config, state: State) -> Command | None:
    first = packed_as(state, (state.closed + 1, 0))
    goes_on = not state.stopping and not is_last(config, state, state.closed)
    if first is not None and goes_on:
        # asked for before the last call, so it comes, or the news that it failed
        return _of(Kind.STAGE, first) if _reference_is_there(config, state, first) else None
    if goes_on and not _stage_wait_is_over(config, state):
        return None
    return _duty(config, replace(state, duties=tuple(d for d in state.duties if d is not Kind.STAGE)))


def _stage_wait_is_over(config: Config, state: State) -> bool:
    if state.exhausted or state.stage_wait_over:
        return True
    return not config.stage_waits_for_deadline and state.finished >= (state.step, state.sent - 1)


def _verdict_is_missing(state: State) -> bool:
    """An update waits until the hook has spoken on the checkpoint before it."""
    return bool(state.verdicts_due)


def _bookkeeping_is_due(config: Config, state: State) -> bool:
    """Step k's bookkeeping runs when its metrics are there and F was sent, is unpacked, or does not exist."""
    if not state.bookkeep:
        return False
    step = state.bookkeep[0]
    if state.landed < step or state.metrics_of < step:
        return False
    if state.discarding:
        return True
    if step >= state.step:
        return False
    if is_over(config, state) or state.step > step + 1 or state.sent > 0:
        return True
    return config.mode == "serial" or (state.staged is None and packed_as(state, (state.step, 0)) is None)


# --- inside a step --------------------------------------------------------------------------------------


def _forward(config: Config, state: State) -> Command | None:
    """Towards the forward call of the next micro-batch: what has to go before it, then the call itself."""
    micro = state.staged or packed_as(state, (state.step, state.sent))
    if micro is None:
        if state.exhausted and state.sent > 0 and not _verdict_is_missing(state):
            # input ended after a micro-batch nobody marked final: the step is closed here, in every mode
            return Command(Kind.UPDATE, state.step)
        return None
    if state.sent == 0 and _waits_for_weights(config, state):
        return None
    if state.staged is None:
        if not _reference_is_there(config, state, micro):
            return None if micro.key in state.reference_sent else _of(Kind.SCORE_REFERENCE, micro)
        if config.stages and state.staging_on and state.latch != "off" and state.sent > 0:
            return _of(Kind.STAGE, micro)
    ahead = packed_as(state, (micro.step + 1, 0) if micro.is_final else (micro.step, micro.index + 1))
    wanted = ahead is not None and not (micro.is_final and is_last(config, state, state.step))
    if config.reference_logps and ahead is not None and wanted and ahead.key not in state.reference_sent:
        return _of(Kind.SCORE_REFERENCE, ahead)
    if micro.is_final and waits_to_plan(config, state):
        return None
    if config.recompute_logps:
        if state.actor_ready != micro.key:
            return None if state.actor_sent == micro.key else _of(Kind.SCORE_ACTOR, micro)
        if state.staged is not None and state.patched != micro.key:
            return _of(Kind.PATCH, micro)
    defers = micro.is_final and last_call_defers(config, state)
    if micro.is_final and not defers and _verdict_is_missing(state):
        return None
    kind = Kind.FWD_BWD if state.staged is None else Kind.FWD_BWD_STAGED
    return replace(_of(kind, micro), defer_update=defers)


def waits_to_plan(config: Config, state: State) -> bool:
    """Where patience is asked for, the last call waits until F can be scored: otherwise no stage could be planned."""
    if not (config.stages and config.reference_logps and config.stage_waits_for_deadline):
        return False
    first = (state.step + 1, 0)
    over = state.exhausted or state.stage_wait_over or is_last(config, state, state.step)
    return not over and packed_as(state, first) is None and state.staging_on and state.latch != "off"


def _waits_for_weights(config: Config, state: State) -> bool:
    """With synchronous weight sync a step begins when the weights it starts from are published."""
    version = state.step - 1
    trained_here = version >= max(config.first_step, config.weights_floor)
    return config.weight_sync == "sync" and trained_here and state.published < version


def _reference_is_there(config: Config, state: State, micro: Micro) -> bool:
    return not config.reference_logps or micro.key in state.reference_ready


def _of(kind: Kind, micro: Micro) -> Command:
    return Command(kind, micro.step, micro.index, micro.is_final)

"""The step boundary as a sans-IO state machine: events in, commands out; no threads, no clock, no sockets.

``BoundarySchedule`` decides only *order*. ``program.py`` gives it hands. Steps count from 1, so that checkpoint k and
weights k are the state after update k, and checkpoint 0 is the state before the first.

The four modes differ in three places only: whether the next step may be packed before this step's bookkeeping
(``pack_limit``), whether the last call of a step defers its update (``_last_call_defers``), and which duties follow
that call (``_close_step``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from shmstage.settings import Boundary


class Kind(StrEnum):
    """What is to be done next. All but ``BOOKKEEP`` and ``FINISH`` are trainer commands."""

    FWD_BWD = "fwd_bwd"
    STAGE = "stage_fwd_bwd"
    FWD_BWD_STAGED = "fwd_bwd_staged"
    APPLY_DEFERRED = "apply_deferred_update"
    UPDATE = "update"
    GET_METRICS = "get_metrics"
    SAVE_CHECKPOINT = "save_checkpoint"
    SYNC_WEIGHTS = "prepare_weight_sync"
    BOOKKEEP = "bookkeep"
    FINISH = "finish"


FORWARD = (Kind.FWD_BWD, Kind.FWD_BWD_STAGED)


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do. ``index`` is -1 where no micro-batch is meant."""

    kind: Kind
    step: int
    index: int = -1
    is_final: bool = False
    defer_update: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Micro:
    """A micro-batch as the schedule knows it."""

    step: int
    index: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class Config:
    """What does not change during a run. ``last_step`` is ``None`` when only the input bounds it."""

    mode: Boundary
    microbatches_per_step: int
    last_step: int | None
    checkpoint_every: int = 0
    weight_sync: bool = False
    first_step: int = 1
    stage_waits_for_deadline: bool = False

    @property
    def stages(self) -> bool:
        return self.mode in ("staged_after_update", "staged_before_update")


@dataclass(frozen=True, slots=True)
class State:
    """All the schedule remembers; hashable, so that it can be walked exhaustively.

    ``step`` is the step whose micro-batches go out now, ``sent`` counts its forward calls. ``closed`` is the last step
    whose last call returned: ``duties`` are its, and when they are done ``step`` moves on. ``packed`` are micro-batches
    that lie in slots and were neither sent nor staged.
    """

    step: int
    sent: int = 0
    closed: int = 0
    in_flight: Command | None = None
    packed: tuple[Micro, ...] = ()
    staged: Micro | None = None
    deferred: bool = False
    duties: tuple[Kind, ...] = ()
    bookkeep: tuple[int, ...] = ()
    finished: tuple[int, int] = (0, -1)
    landed: int = 0
    metrics_of: int = 0
    exhausted: bool = False
    stage_wait_over: bool = False
    staging_on: bool = True
    stage_error: bool = False
    stopping: bool = False
    done: bool = False


class BoundarySchedule:
    """Mutable holder of ``State``; the functions below are the machine itself."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = State(step=config.first_step)

    def next(self) -> Command | None:
        """The next command, marked as in flight; ``None`` while it has to wait for an event."""
        command = next_command(self.config, self.state)
        if command is not None:
            self.state = replace(self.state, in_flight=command)
        return command

    @property
    def pack_limit(self) -> tuple[int, int]:
        """The last (step, index) the feeder may pack now."""
        return pack_limit(self.config, self.state)

    def packed(self, step: int, index: int, is_final: bool) -> None:
        self.state = replace(self.state, packed=(*self.state.packed, Micro(step, index, is_final)))

    def end_of_input(self) -> None:
        self.state = replace(self.state, exhausted=True)

    def returned(self, command: Command) -> None:
        self.state = on_returned(self.config, self.state, command)

    def stage_lost(self, command: Command) -> None:
        self.state = on_stage_lost(self.state, command)

    def stage_raised(self, command: Command) -> None:
        self.state = on_stage_failed(self.config, self.state)

    def stage_failed_later(self, step: int, index: int) -> bool:
        """An upload failed after its call had returned; ``False`` if that micro-batch is not merely staged any more."""
        staged = self.state.staged
        if staged is None or (staged.step, staged.index) != (step, index):
            return False
        self.state = on_stage_failed(self.config, self.state)
        return True

    def finished(self, step: int, index: int) -> None:
        """A micro-batch's token is ready and ok."""
        self.state = replace(self.state, finished=max(self.state.finished, (step, index)))

    def landed(self, step: int) -> None:
        """Update ``step``'s token is ready and ok."""
        self.state = replace(self.state, landed=max(self.state.landed, step))

    def metrics_ready(self, step: int) -> None:
        self.state = replace(self.state, metrics_of=max(self.state.metrics_of, step))

    def stage_wait_over(self) -> None:
        self.state = replace(self.state, stage_wait_over=True)

    def stop(self) -> None:
        """Stop as on a signal: a deferred update is applied first, nothing new is begun."""
        self.state = replace(self.state, stopping=True)

    @property
    def waits_for_stage(self) -> bool:
        """True while the only thing missing is the micro-batch that a planned stage waits for."""
        state = self.state
        return state.in_flight is None and state.duties[:1] == (Kind.STAGE,)


# --- what comes next ------------------------------------------------------------------------------------


def next_command(config: Config, state: State) -> Command | None:
    """The command ``state`` calls for, or ``None``. Pure."""
    if state.done or state.in_flight is not None:
        return None
    if state.duties[:1] and state.duties[0] in (Kind.STAGE, Kind.APPLY_DEFERRED):
        return _duty(config, state)
    if _bookkeeping_is_due(config, state):
        return Command(Kind.BOOKKEEP, state.bookkeep[0])
    if state.duties:
        return _duty(config, state)
    if state.bookkeep and config.mode == "serial":
        return None
    if _is_over(config, state):
        return None if state.bookkeep else Command(Kind.FINISH, state.step)
    return _forward(config, state)


def _duty(config: Config, state: State) -> Command | None:
    duty = state.duties[0]
    if duty is not Kind.STAGE:
        return Command(duty, state.closed)
    first = _packed_as(state, state.closed + 1, 0)
    if first is not None and not state.stopping:
        return Command(Kind.STAGE, first.step, first.index, first.is_final)
    if not _stage_wait_is_over(config, state):
        return None
    return _duty(config, _without_stage(state))


def _stage_wait_is_over(config: Config, state: State) -> bool:
    if state.exhausted or state.stopping or state.stage_wait_over:
        return True
    return not config.stage_waits_for_deadline and state.finished >= (state.step, state.sent - 1)


def _without_stage(state: State) -> State:
    return replace(state, duties=tuple(d for d in state.duties if d is not Kind.STAGE))


def _bookkeeping_is_due(config: Config, state: State) -> bool:
    """Step k's bookkeeping runs when its metrics are there and F was sent, is unpacked, or does not exist."""
    if not state.bookkeep:
        return False
    step = state.bookkeep[0]
    if step >= state.step or state.landed < step or state.metrics_of < step:
        return False
    if _is_over(config, state):
        return True
    if state.step == step + 1 and state.sent == 0:
        first_is_ready = state.staged is not None or _packed_as(state, state.step, 0) is not None
        return not first_is_ready
    # a stage that can go out now goes first: it fills a device buffer while the host keeps books
    can_stage = config.stages and state.staging_on and state.staged is None
    return not (can_stage and _packed_as(state, state.step, state.sent) is not None)


def _is_over(config: Config, state: State) -> bool:
    if state.stopping or state.stage_error:
        return True
    if config.last_step is not None and state.step > config.last_step:
        return True
    return state.exhausted and state.sent == 0 and state.staged is None and _packed_as(state, state.step, 0) is None


def _forward(config: Config, state: State) -> Command | None:
    if state.staged is not None:
        micro, kind = state.staged, Kind.FWD_BWD_STAGED
    else:
        found = _packed_as(state, state.step, state.sent)
        if found is None:
            if state.exhausted and state.sent > 0:
                # input ended after a micro-batch nobody marked final: the step is closed here, in every mode
                return Command(Kind.UPDATE, state.step)
            return None
        micro, kind = found, Kind.FWD_BWD
        if config.stages and state.staging_on and state.sent > 0:
            return Command(Kind.STAGE, micro.step, micro.index, micro.is_final)
    return Command(kind, micro.step, micro.index, micro.is_final, micro.is_final and _last_call_defers(config, state))


def _last_call_defers(config: Config, state: State) -> bool:
    return config.mode == "staged_before_update" and _stage_is_planned(config, state)


def _stage_is_planned(config: Config, state: State) -> bool:
    """Decided before step k's last call: not at the last step, not when the source is known to be exhausted."""
    if not config.stages or not state.staging_on or state.stopping:
        return False
    if config.last_step is not None and state.step >= config.last_step:
        return False
    return not state.exhausted or _packed_as(state, state.step + 1, 0) is not None


def _packed_as(state: State, step: int, index: int) -> Micro | None:
    return next((m for m in state.packed if m.step == step and m.index == index), None)


# --- what an event changes ------------------------------------------------------------------------------


def on_returned(config: Config, state: State, command: Command) -> State:
    """The command in flight returned. A return proves dispatch only; completion comes as its own event."""
    state = replace(state, in_flight=None)
    if command.kind in FORWARD:
        micro = Micro(command.step, command.index, command.is_final)
        packed = tuple(m for m in state.packed if m != micro)
        state = replace(state, packed=packed, staged=None, sent=state.sent + 1)
        return _close_step(config, state, command.defer_update) if command.is_final else state
    if command.kind is Kind.STAGE:
        micro = Micro(command.step, command.index, command.is_final)
        packed = tuple(m for m in state.packed if m != micro)
        duties = state.duties[1:] if state.duties[:1] == (Kind.STAGE,) else state.duties
        return _next_step_if_done(replace(state, packed=packed, staged=micro, duties=duties))
    if command.kind is Kind.UPDATE:
        return _close_step(config, state, False)
    if command.kind is Kind.BOOKKEEP:
        return replace(state, bookkeep=state.bookkeep[1:])
    if command.kind is Kind.FINISH:
        return replace(state, done=True)
    # a duty: everything before it in the list (a skipped stage) is over, too
    duties = state.duties[state.duties.index(command.kind) + 1 :]
    state = replace(state, duties=duties)
    if command.kind is Kind.APPLY_DEFERRED:
        state = replace(state, deferred=False)
    return _next_step_if_done(state)


def _close_step(config: Config, state: State, deferred: bool) -> State:
    """Step k's last forward call (or its ``update``) returned: line up what the boundary still owes."""
    planned = _stage_is_planned(config, state)
    duties: list[Kind] = []
    if deferred:
        duties = [Kind.STAGE, Kind.APPLY_DEFERRED]
    elif planned and config.mode == "staged_after_update":
        duties = [Kind.STAGE]
    duties.append(Kind.GET_METRICS)
    if _checkpoint_is_due(config, state.step):
        duties.append(Kind.SAVE_CHECKPOINT)
    if config.weight_sync:
        duties.append(Kind.SYNC_WEIGHTS)
    return replace(
        state, closed=state.step, deferred=deferred, duties=tuple(duties), stage_wait_over=False,
        bookkeep=(*state.bookkeep, state.step),
    )  # fmt: skip


def _next_step_if_done(state: State) -> State:
    if state.duties or state.closed != state.step:
        return state
    return replace(state, step=state.step + 1, sent=0)


def on_stage_lost(state: State, command: Command) -> State:
    """The stage did not reach the trainer: F is sent whole in its turn and staging is off for the rest of the run."""
    duties = tuple(d for d in state.duties if d is not Kind.STAGE)
    return _next_step_if_done(replace(state, in_flight=None, duties=duties, staging_on=False))


def on_stage_failed(config: Config, state: State) -> State:
    """The trainer ran the stage and it failed, at once or later: update k, checkpoint k, then the run ends.

    Inside a step there is nothing to save: the step is not complete.
    """
    state = replace(state, in_flight=None, staged=None, staging_on=False, stage_error=True)
    if state.duties:
        keep = [d for d in state.duties if d is not Kind.STAGE]
        if Kind.SAVE_CHECKPOINT not in keep and not _checkpoint_is_due(config, state.closed):
            keep.insert(keep.index(Kind.SYNC_WEIGHTS) if Kind.SYNC_WEIGHTS in keep else len(keep), Kind.SAVE_CHECKPOINT)
        return replace(state, duties=tuple(keep))
    at_boundary = state.sent == 0 and state.closed == state.step - 1 and state.closed > 0
    if at_boundary and not _checkpoint_is_due(config, state.closed):
        return replace(state, duties=(Kind.SAVE_CHECKPOINT,))
    return state


def _checkpoint_is_due(config: Config, step: int) -> bool:
    return config.checkpoint_every > 0 and step % config.checkpoint_every == 0


def pack_limit(config: Config, state: State) -> tuple[int, int]:
    """The last (step, index) the feeder may pack: at most one step ahead, in ``serial`` never past open bookkeeping."""
    last_index = config.microbatches_per_step - 1
    if config.mode == "serial":
        return (state.step, -1) if state.bookkeep and not state.duties else (state.step, last_index)
    open_step = state.step + 1 if state.duties else state.step
    return (open_step + 1, 0)

"""What the schedule is told once (``Config``) and all it remembers (``State``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmstage.orchestrator.commands import Command, Key, Kind, Micro
from shmstage.settings import Boundary, WeightSync

Latch = Literal["on", "after_update", "off"]
"""Where the latch lets stages go: as the mode says, after the update at the earliest, nowhere."""


@dataclass(frozen=True, slots=True)
class Config:
    """What does not change during a run. ``last_step`` is ``None`` when only the input bounds it.

    ``recompute_logps``: every micro-batch is scored under the weights it is trained with, before its forward call.
    ``reference_logps``: every micro-batch is scored under the reference policy, before it is staged or sent.
    ``hook``: an update waits for the verdict on the checkpoint before it. ``weights_floor``: replayed steps below it
    publish no weights.
    """

    mode: Boundary
    microbatches_per_step: int
    last_step: int | None
    checkpoint_every: int = 0
    weight_sync: WeightSync = "off"
    first_step: int = 1
    stage_waits_for_deadline: bool = False
    recompute_logps: bool = False
    reference_logps: bool = False
    eval_every: int = 0
    hook: bool = False
    weights_floor: int = 0

    @property
    def stages(self) -> bool:
        return self.mode in ("staged_after_update", "staged_before_update")


@dataclass(frozen=True)
class State:
    """Hashable, so that it can be walked exhaustively; without slots, which ``frozen.replace`` cannot copy.

    ``step`` is the step whose micro-batches go out now, ``sent`` counts its forward calls. ``closed`` is the last step
    whose last call returned: ``duties`` are its, and when they are done ``step`` moves on. ``packed`` are micro-batches
    that lie in slots and were neither sent nor staged. ``last_step`` is set when the run has to end early, after that
    step's boundary. ``discarding``: a hook ended the run; nothing more is told to the trainer.
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
    finished: Key = (0, -1)
    landed: int = 0
    metrics_of: int = 0
    published: int = 0
    saved: int = 0
    verdicts_due: tuple[int, ...] = ()
    checkpoint_wanted: bool = False
    reference_sent: tuple[Key, ...] = ()
    reference_ready: tuple[Key, ...] = ()
    actor_sent: Key | None = None
    actor_ready: Key | None = None
    patched: Key | None = None
    exhausted: bool = False
    stage_wait_over: bool = False
    staging_on: bool = True
    latch: Latch = "on"
    last_step: int | None = None
    stopping: bool = False
    discarding: bool = False
    done: bool = False


def packed_as(state: State, key: Key) -> Micro | None:
    """The packed micro-batch of that name."""
    return next((m for m in state.packed if m.key == key), None)


def is_last(config: Config, state: State, step: int) -> bool:
    """No step follows ``step``, as far as that is known without the input."""
    return any(last is not None and step >= last for last in (config.last_step, state.last_step))


def checkpoint_is_due(config: Config, state: State, step: int) -> bool:
    """The setting asks for it, memory does, or the run ends early and this is what is left of it."""
    asked = config.checkpoint_every > 0 and step % config.checkpoint_every == 0
    return asked or state.checkpoint_wanted or step == state.last_step


def stage_is_planned(config: Config, state: State) -> bool:
    """Decided before step k's last call: not at the last step, not when the source is known to be exhausted.

    F's reference log-probs must have been asked for by then: while an update is deferred nothing is scored.
    """
    if not config.stages or not state.staging_on or state.latch == "off" or state.stopping or state.discarding:
        return False
    if is_last(config, state, state.step):
        return False
    first = (state.step + 1, 0)
    if config.reference_logps and first not in state.reference_sent:
        return False
    return not state.exhausted or packed_as(state, first) is not None


def last_call_defers(config: Config, state: State) -> bool:
    """Whether the last call of the step holds its update back."""
    return config.mode == "staged_before_update" and state.latch == "on" and stage_is_planned(config, state)

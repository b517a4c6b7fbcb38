"""Which command is allowed now. Pure: no device, no thread, no clock; a refused command changes nothing.

The worker asks ``admit`` before it does anything and reports what it did afterwards.

    closed ──restored──▶ open ──token failed──▶ failed
      ▲                   │                        │
      └────new epoch──────┴────────restored────────┘ (to open)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shmstage.errors import (
    GateClosedError,
    StageMismatchError,
    StageOccupiedError,
    TokenFailedError,
    TrainerError,
    UpdateDeferredError,
)
from shmstage.frozen import replace
from shmstage.memory.handle import Handle

COMMANDS = frozenset({
    "info", "compile", "fwd_bwd", "stage_fwd_bwd", "fwd_bwd_staged", "patch_staged", "apply_deferred_update", "update",
    "get_metrics", "get_step_timing", "eval_step", "per_token_logps", "save_checkpoint", "restore_checkpoint",
    "prepare_weight_sync", "ranges", "release_weight_sync", "shutdown",
})  # fmt: skip

WHEN_CLOSED = frozenset({"info", "compile", "ranges", "restore_checkpoint", "shutdown"})
WHEN_FAILED = frozenset({"restore_checkpoint", "shutdown"})
#: need the step closed: while an update is held back the state they would see is neither before nor after it
NOT_WHEN_DEFERRED = frozenset({
    "fwd_bwd", "fwd_bwd_staged", "update", "get_metrics", "save_checkpoint", "prepare_weight_sync", "per_token_logps",
    "eval_step",
})  # fmt: skip


@dataclass(frozen=True)
class GateState:
    """All that decides what is allowed; ``None`` = there is none.

    ``closed_step`` is the last step whose update was dispatched; ``open_step`` has gradients but no update yet.
    """

    phase: str = "closed"
    cause: str = ""
    staged: str | None = None
    deferred_step: int | None = None
    open_step: int | None = None
    last_index: int = -1
    closed_step: int = 0
    awaits_first_checkpoint: bool = False


@final
class Gate:
    """The worker's state as far as permission goes. Used by the command thread alone."""

    def __init__(self) -> None:
        self.state = GateState()

    # --- may it? ------------------------------------------------------------------------------------------

    def admit(self, command: str) -> None:
        """Raise what ``command`` is refused with, whatever its arguments: closed gate, failure, deferred update."""
        state = self.state
        if state.phase == "closed" and command not in WHEN_CLOSED:
            raise GateClosedError(f"{command}: the trainer has not restored yet; send restore_checkpoint first")
        if state.phase == "failed" and command not in WHEN_FAILED:
            raise TokenFailedError(f"{command}: {state.cause}; only restore_checkpoint and shutdown are accepted")
        if state.deferred_step is not None and command in NOT_WHEN_DEFERRED:
            raise UpdateDeferredError(
                f"{command}: update {state.deferred_step} is deferred; send apply_deferred_update first"
            )

    def admit_forward(self, handle: Handle) -> None:
        """May this micro-batch be trained next? Steps are taken in order, each micro-batch once."""
        state = self.state
        name = _name(handle)
        if state.awaits_first_checkpoint:
            raise GateClosedError(f"{name}: the checkpoint of step 0 is not durable yet; send save_checkpoint(0) first")
        if state.open_step is None:
            if handle.step != state.closed_step + 1:
                raise TrainerError(f"{name}: the next step is {state.closed_step + 1}")
        elif handle.step != state.open_step:
            raise TrainerError(f"{name}: step {state.open_step} is not updated yet; send update first")
        elif handle.index <= state.last_index:
            raise TrainerError(f"{name}: micro-batch {state.last_index} of this step was trained already")

    def admit_staged(self, request_id: str) -> None:
        """May ``fwd_bwd_staged`` (or a patch) take this one? The stage is kept if not."""
        staged = self.state.staged
        if staged is None:
            raise StageMismatchError(f"{request_id!r} is not staged: nothing is; send it with fwd_bwd")
        if staged != request_id:
            raise StageMismatchError(f"{request_id!r} is not staged: {staged!r} is, and stays")

    def admit_stage(self, handle: Handle) -> None:
        """May this micro-batch be staged?"""
        staged = self.state.staged
        if staged is not None:
            raise StageOccupiedError(f"{_name(handle)}: {staged!r} is staged and not trained; train it first")

    def admit_update(self) -> None:
        """``update`` closes a step whose last micro-batch was not marked final; there must be one."""
        if self.state.open_step is None:
            raise TrainerError(f"update: no micro-batch was trained since update {self.state.closed_step}")

    def admit_apply(self) -> None:
        """``apply_deferred_update`` needs a deferred update."""
        if self.state.deferred_step is None:
            raise TrainerError(f"apply_deferred_update: none is deferred; the last update is {self.state.closed_step}")

    def admit_snapshot(self, command: str, step: int, *, inside: bool = False) -> None:
        """Metrics, checkpoints and weights are of the last update, taken before the next step begins.

        ``inside``: or in it, for what its forward passes do not change.
        """
        state = self.state
        if step != state.closed_step:
            raise TrainerError(f"{command}({step}): the last update is {state.closed_step}")
        if inside:
            return
        if state.open_step is not None:
            raise TrainerError(f"{command}({step}): step {state.open_step} has begun; it goes before the first fwd_bwd")

    # --- what happened ------------------------------------------------------------------------------------

    def staged(self, request_id: str) -> None:
        self._set(staged=request_id)

    def unstaged(self) -> None:
        self._set(staged=None)

    def trained(self, handle: Handle, *, deferred: bool) -> None:
        """A forward call was dispatched; ``deferred``: its update is held back."""
        self._set(
            open_step=handle.step, last_index=handle.index, deferred_step=handle.step if deferred else None
        )

    def updated(self) -> None:
        """The open step's update was dispatched."""
        step = self.state.open_step
        assert step is not None, "an update needs an open step"
        self._set(closed_step=step, open_step=None, last_index=-1, deferred_step=None)

    def restored(self, step: int | None) -> None:
        """State is that of checkpoint ``step``, or the engine's initial one."""
        self.state = GateState(phase="open", closed_step=step or 0, awaits_first_checkpoint=step is None)

    def checkpoint_durable(self) -> None:
        self._set(awaits_first_checkpoint=False)

    def failed(self, cause: str) -> None:
        """Device work failed. The first cause is kept: later failures follow from it."""
        if self.state.phase != "failed":
            self._set(phase="failed", cause=cause)

    def detached(self) -> None:
        """A new epoch of the orchestrator took over."""
        self.state = GateState()

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)


def _name(handle: Handle) -> str:
    return f"micro-batch {handle.step}.{handle.index} ({handle.request_id})"

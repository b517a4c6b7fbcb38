"""The first of two phases: may this host run a command, and in what state is it? Nothing is changed by the answer.

The orchestrator of a trainer that spans hosts prepares a command on all of them, compares their states, and only then
has it run: no host dispatches a collective that another one refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from shmstage.errors import EngineError, ProtocolError
from shmstage.memory.handle import Handle
from shmstage.trainer.arguments import Arguments
from shmstage.trainer.engine import EVALUATE, SCORE, TRAIN
from shmstage.trainer.gate import Gate
from shmstage.trainer.scoring import Scorer, field_of
from shmstage.trainer.stepper import Stepper

#: what runs unprepared: reads only, or lets go of something
UNPREPARED = frozenset({"get_step_timing", "release_weight_sync", "ranges"})

Result = dict[str, Any]


@final
class Preparation:
    """Used by the command thread alone. ``read_news`` is what a worker does before it looks at its gate."""

    def __init__(
        self,
        gate: Gate,
        stepper: Stepper,
        scorer: Scorer,
        *,
        read_news: Callable[[], None],
        waits_for_snapshots: bool,
        owns_weights: bool,
    ) -> None:
        self._gate = gate
        self._stepper = stepper
        self._scorer = scorer
        self._read_news = read_news
        self._waits_for_snapshots = waits_for_snapshots
        self._owns_weights = owns_weights
        self._sequence = 0
        self._executed = 0
        self._prepared: tuple[str, Mapping[str, Any]] | None = None
        self.commands: dict[str, Callable[[Arguments], Result]] = {
            "prepare": self._prepare,
            "drop_staged": self._drop_staged,
        }
        self._checks: dict[str, Callable[[Arguments], Handle | None]] = {
            "info": self._info,
            "compile": self._compile,
            "fwd_bwd": self._fwd_bwd,
            "stage_fwd_bwd": self._stage_fwd_bwd,
            "fwd_bwd_staged": self._fwd_bwd_staged,
            "patch_staged": self._patch_staged,
            "apply_deferred_update": self._apply_deferred_update,
            "update": self._update,
            "get_metrics": self._get_metrics,
            "eval_step": self._eval_step,
            "per_token_logps": self._per_token_logps,
            "save_checkpoint": self._save_checkpoint,
            "restore_checkpoint": self._restore_checkpoint,
            "prepare_weight_sync": self._prepare_weight_sync,
            "shutdown": self._shutdown,
        }

    def begins(self, command: str, arguments: Mapping[str, Any]) -> bool:
        """True if this was prepared. What happened since is not looked at then: all hosts go on as they agreed.

        Raises ``ProtocolError`` if something else was prepared, on this or on another host.
        """
        lets_go = command in UNPREPARED or (command == "shutdown" and arguments.get("discard") is True)
        if not self._sequence or command in self.commands or lets_go:
            return False
        prepared, self._prepared = self._prepared, None
        if prepared != (command, arguments):
            what = "nothing" if prepared is None else f"{prepared[0]} with other arguments"
            if prepared is not None and prepared[0] != command:
                what = prepared[0]
            raise ProtocolError(
                f"{command}: what was prepared as number {self._sequence} is {what}; prepare it on all hosts first"
            )
        if command != "stage_fwd_bwd":  # whose only trace is the stage, which can be dropped
            self._executed = self._sequence
        return True

    def forget(self) -> None:
        """Another epoch or pool: its orchestrator counts anew."""
        self._sequence = self._executed = 0
        self._prepared = None

    # --- commands -------------------------------------------------------------------------------------------

    def _prepare(self, given: Arguments) -> Result:
        command, arguments, sequence = given.text("command"), given.mapping("arguments"), given.count("sequence")
        given.finish()
        check = self._checks.get(command)
        if check is None:
            raise ProtocolError(f"prepare: {command[:40]!r} is not one of {', '.join(sorted(self._checks))}")
        if sequence <= self._sequence:
            raise ProtocolError(
                f"prepare {command}: number {sequence} comes after {self._sequence}; the hosts hear commands in "
                "different orders"
            )
        self._prepared = None
        self._read_news()
        self._gate.admit(command)
        handle = check(Arguments(command, arguments))
        self._sequence, self._prepared = sequence, (command, arguments)
        return {"state": self._state(handle)}

    def _drop_staged(self, given: Arguments) -> Result:
        request_id = given.text("request_id")
        given.finish()
        stage = self._stepper.stage
        if stage is None or stage.handle.request_id != request_id:
            return {"dropped": False}
        self._stepper.drop_stage()
        return {"dropped": True}

    def _state(self, handle: Handle | None) -> Result:
        """Facts that are the same on all hosts, or the hosts have lost one another. No slots: each has its own."""
        state, stage = self._gate.state, self._stepper.stage
        staged = None if stage is None else _facts_of(stage.handle)
        return {
            "phase": state.phase,
            "staged": staged,
            "deferred_step": state.deferred_step,
            "open_step": state.open_step,
            "last_index": state.last_index,
            "closed_step": state.closed_step,
            "executed": self._executed,
            "microbatch": None if handle is None else _facts_of(handle),
        }

    # --- what each of them is refused with ------------------------------------------------------------------

    def _info(self, given: Arguments) -> None:
        given.flag("param_digest")
        given.finish()

    def _compile(self, given: Arguments) -> None:
        compile_uses(given, self._stepper)

    def _fwd_bwd(self, given: Arguments) -> Handle:
        handle, _ = given.handle(), given.flag("defer_update")
        given.finish()
        self._gate.admit_forward(handle)
        stage = self._stepper.stage
        if stage is None or stage.handle.request_id != handle.request_id:
            self._stepper.attachment.check(handle)
        elif stage.lease is None and stage.error:
            raise EngineError(f"the upload of {handle.request_id} failed: {stage.error}")
        return handle

    def _stage_fwd_bwd(self, given: Arguments) -> Handle:
        handle = given.handle()
        given.finish()
        stage = self._stepper.stage
        if stage is None or stage.handle.request_id != handle.request_id:
            self._gate.admit_stage(handle)
            self._stepper.attachment.check(handle)
        return handle

    def _fwd_bwd_staged(self, given: Arguments) -> Handle:
        request_id, _ = given.text("request_id"), given.flag("defer_update")
        given.finish()
        handle = self._staged(request_id)
        self._gate.admit_forward(handle)
        stage = self._stepper.stage
        if stage is not None and stage.error:
            raise EngineError(f"the upload of {request_id} failed: {stage.error}")
        return handle

    def _patch_staged(self, given: Arguments) -> Handle:
        request_id, fields, _ = given.text("request_id"), given.texts("fields"), given.count("loss_tokens")
        given.finish()
        self._scorer.admit_patch(request_id, fields)
        return self._staged(request_id)

    def _apply_deferred_update(self, given: Arguments) -> None:
        given.finish()
        self._gate.admit_apply()

    def _update(self, given: Arguments) -> None:
        given.finish()
        self._gate.admit_update()

    def _get_metrics(self, given: Arguments) -> None:
        step = given.count("step")
        given.finish()
        self._gate.admit_snapshot("get_metrics", step)

    def _eval_step(self, given: Arguments) -> Handle:
        handle = given.handle()
        given.finish()
        self._scorer.optional("eval_step")
        self._stepper.attachment.check(handle)
        return handle

    def _per_token_logps(self, given: Arguments) -> Handle:
        role = given.text("role")
        request_id = given.text("request_id") if given.has("request_id") else None
        handle = given.handle() if request_id is None else None
        given.finish()
        field_of(role)
        staged = self._staged(request_id) if request_id is not None else None
        self._scorer.optional("per_token_logps")
        if staged is not None:
            return staged
        assert handle is not None
        self._stepper.attachment.check(handle)
        return handle

    def _save_checkpoint(self, given: Arguments) -> None:
        step, _ = given.count("step"), given.mapping("metadata")
        given.finish()
        self._gate.admit_snapshot("save_checkpoint", step, inside=not self._waits_for_snapshots)

    def _restore_checkpoint(self, given: Arguments) -> None:
        given.pairs("withdrawn")
        if given.has("at_most"):
            given.count("at_most")
        given.finish()

    def _prepare_weight_sync(self, given: Arguments) -> None:
        version, _ = given.count("version"), given.flag("sync")
        given.finish()
        self._gate.admit_snapshot("prepare_weight_sync", version)
        if not self._owns_weights:
            raise EngineError(NO_IDENTITY)

    def _shutdown(self, given: Arguments) -> None:
        given.flag("discard")
        given.finish()

    def _staged(self, request_id: str) -> Handle:
        self._gate.admit_staged(request_id)
        stage = self._stepper.stage
        assert stage is not None
        return stage.handle


NO_IDENTITY = "prepare_weight_sync: this worker was made without an identity to own a pool with"


def compile_uses(given: Arguments, stepper: Stepper) -> tuple[dict[str, Any], list[str]]:
    """The example to compile for, and what for. Raises ``ProtocolError`` for a layout or a use nobody announced."""
    layout_id = given.count("layout_id")
    uses = given.texts("uses") if given.has("uses") else [TRAIN]
    given.finish()
    if not set(uses) <= {TRAIN, EVALUATE, SCORE}:
        raise ProtocolError(f"compile: uses = {uses}; want some of {TRAIN}, {EVALUATE}, {SCORE}")
    return stepper.attachment.example(layout_id), uses


def _facts_of(handle: Handle) -> str:
    """The micro-batch's name comes first, up to the comma."""
    kind = "final" if handle.is_final else "not final"
    return f"{handle.step}.{handle.index}, {kind}, digest {handle.digest.hex()}, {handle.loss_tokens} loss tokens"

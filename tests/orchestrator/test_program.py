"""The program gives the schedule hands: what it does when calls are lost, commands raise or device work fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shmstage.errors import (
    EngineError,
    LayoutError,
    ProtocolError,
    RunFailedError,
    ShmstageError,
    StaleHandleError,
    StoppedError,
    TokenFailedError,
    TrainerError,
    WaitTimeoutError,
)
from shmstage.memory.handle import Handle
from shmstage.orchestrator.feeder import EndOfInput, PackedMicrobatch
from shmstage.orchestrator.hooks import Verdict
from shmstage.orchestrator.late_fields import Patch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.program import Program
from shmstage.orchestrator.resume import ResumeState
from shmstage.orchestrator.saving import Saving
from shmstage.orchestrator.schedule import Config
from shmstage.orchestrator.summary import summarise
from shmstage.orchestrator.trainer_client import TrainerClient
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.testing.boundary_table import expected_calls, received_calls
from shmstage.wire.handles import handle_from_wire
from shmstage.wire.messages import TicketEvent, TokenEvent

MS = 1_000_000


class InstantTrainer:
    """Stands where the transport client stands; every command is done when it returns, its events come next."""

    sequence = 0

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.pending: list[TokenEvent | TicketEvent] = []
        self.fail: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.bad_token: str | None = None
        self.bad_ticket: str | None = None
        self.staged: Handle | None = None
        self.step = 0
        self.now = 0
        self.ticket = 0

    def wake(self) -> None:
        return

    def events(self, timeout_s: float = 0.0) -> list[TokenEvent | TicketEvent]:
        found, self.pending = self.pending, []
        return found

    def call(self, command: str, arguments: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        handle = handle_from_wire(arguments["handle"]) if "handle" in arguments else self.staged
        record = {"command": command, **{k: v for k, v in arguments.items() if k != "handle"}}
        if command in ("fwd_bwd", "stage_fwd_bwd", "fwd_bwd_staged"):
            assert handle is not None
            record |= {"step": handle.step, "index": handle.index}
        if command in self.fail:
            self.fail[command](record)
        self.received.append(record)
        self.now += MS
        if command == "stage_fwd_bwd":
            self.staged = handle
            self._token("staged", handle)
            return {"request_id": handle.request_id} if handle else {}
        if command in ("fwd_bwd", "fwd_bwd_staged"):
            return self._forward(command, handle, bool(arguments["defer_update"]))
        if command in ("apply_deferred_update", "update"):
            self._update()
            return {"updated": True, "snapshot_wait_s": 0.0}
        self.ticket += 1
        if command == "patch_staged":
            return {}
        step = int(arguments.get("step", handle.step if handle is not None else 0))
        self.pending.append(self._ticket_event(command, step, arguments))
        return {"ticket": self.ticket}

    def _forward(self, command: str, handle: Handle | None, defer: bool) -> dict[str, Any]:
        assert handle is not None
        self.step = handle.step
        if command == "fwd_bwd":
            self._token("staged", handle)
        else:
            self.staged = None
        self._token("fwd_bwd", handle)
        updated = handle.is_final and not defer
        if updated:
            self._update()
        return {
            "request_id": handle.request_id, "updated": updated, "upload_s": 0.001, "snapshot_wait_s": 0.0,
            "payload_digest": "",
        }  # fmt: skip

    def _update(self) -> None:
        self.now += MS
        self.pending.append(
            TokenEvent(
                number=0, kind="update", request_id=f"update.{self.step}", step=self.step, index=0,
                ok=self.bad_token != "update", error="boom",
                stamps={"dispatch_begin_ns": self.now - MS, "dispatch_end_ns": self.now, "ready_ns": self.now},
            )
        )  # fmt: skip

    def _token(self, kind: str, handle: Handle | None) -> None:
        assert handle is not None
        self.now += MS
        stamps = {"dispatch_begin_ns": self.now - MS, "dispatch_end_ns": self.now, "ready_ns": self.now}
        if kind == "staged":
            stamps = {"upload_begin_ns": self.now - MS, "staged_ready_ns": self.now}
        ok = self.bad_token != kind
        self.pending.append(TokenEvent(0, kind, handle.request_id, handle.step, handle.index, ok, "boom", stamps))

    def _ticket_event(self, command: str, step: int, arguments: dict[str, Any]) -> TicketEvent:
        values: dict[str, dict[str, Any]] = {
            "get_metrics": {"loss": 0.5, "grad_norm": 1.0, "denominator": 8.0},
            "per_token_logps": {"field": f"{arguments.get('role')}_logps", "digest": "d", "written": True},
            "save_checkpoint": {"path": f"checkpoints/{step}"},
            "eval_step": {"loss_sum": 4.0, "denominator": 8.0},
        }
        bad = self.bad_ticket in (command, f"{command} {step}")
        return TicketEvent(0, self.ticket, command, step, not bad, values.get(command, {}), "disk full", {})


def raise_from_peer(error: ShmstageError) -> None:
    error.from_peer = True
    raise error


class ImmediateFeeder:
    """Delivers each micro-batch the moment it is allowed to."""

    def __init__(self, per_step: int, count: int | None, error: BaseException | None = None) -> None:
        self.per_step = per_step
        self.count = count
        self.error = error
        self.next = 0
        self.ended = False
        self.limit = (0, -1)
        self.deliver: Callable[[Any], None] = lambda event: None
        self.wants_checkpoint = False
        self.told: list[tuple[str, int]] = []

    def landed(self, step: int) -> None:
        self.told.append(("landed", step))

    def durable(self, step: int) -> None:
        self.told.append(("durable", step))

    def start(self) -> None:
        self.allow(self.limit)

    def allow(self, limit: tuple[int, int]) -> None:
        self.limit = limit
        while not self.ended:
            step, index = self.next // self.per_step + 1, self.next % self.per_step
            if self.count is not None and self.next >= self.count:
                self.ended = True
                self.deliver(EndOfInput(self.error))
                return
            if (step, index) > limit:
                return
            self.next += 1
            handle = Handle(0, 2 * self.next, 1, bytes(16), 1, step, index, index == self.per_step - 1, 8, 1)
            self.deliver(PackedMicrobatch(handle, (), (), 8, 1, 0.0, 0.0, 0.0, 0))


def make(
    mode: Boundary,
    trainer: InstantTrainer,
    *,
    steps: int | None = 4,
    count: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    feeder_error: BaseException | None = None,
    out: Path | None = None,
    more: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Program, ImmediateFeeder, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    ledger = Ledger(mode=mode, tokens_per_microbatch=8, rows=1, slot_nbytes=64)
    program = Program(
        Config(mode, 3, steps, **config), TrainerClient(trainer, timeout_s=1.0), ledger,  # type: ignore[arg-type]
        Saving(out or Path("unused"), {}, start=ResumeState.start(), first_step=1),
        write_step=lambda line: lines.append(line) is None, stop_requested=stop, call_timeout_s=5.0, **(more or {}),
    )  # fmt: skip
    feeder = ImmediateFeeder(3, count if count is not None else (steps or 0) * 3, feeder_error)
    feeder.deliver = program.deliver
    return program, feeder, lines


def run(program: Program, feeder: ImmediateFeeder) -> None:
    program.run(feeder)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_the_trainer_receives_the_contracts_commands_and_each_step_gets_one_line(mode: Boundary) -> None:
    trainer = InstantTrainer()
    program, feeder, lines = make(mode, trainer)
    run(program, feeder)
    assert received_calls(trainer.received) == expected_calls(mode, microbatches=[3] * 4, microbatches_per_step=3)[1:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    summary = summarise(lines)
    assert summary["denominators"] == [8.0] * 4
    assert summary["staged_boundaries"] == (3 if mode.startswith("staged") else 0)
    assert all((line["not_staged_because"] is None) == line["staged"] for line in lines)


def test_a_stage_lost_on_the_way_is_said_once_and_the_run_goes_on_unstaged(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = InstantTrainer()

    def lose(record: dict[str, Any]) -> None:
        if record["step"] == 2 and record["index"] == 0:
            raise WaitTimeoutError("no answer")

    trainer.fail["stage_fwd_bwd"] = lose
    program, feeder, lines = make("staged_before_update", trainer)
    run(program, feeder)
    assert capsys.readouterr().out.count("staging is off for the rest of the run: no answer") == 1
    assert [line["staged"] for line in lines] == [False] * 4
    assert lines[1]["not_staged_because"] == "staging was switched off"
    commands = [r["command"] for r in trainer.received]
    assert commands.count("apply_deferred_update") == 1


@pytest.mark.parametrize("error", [EngineError, StaleHandleError, LayoutError, ProtocolError])
def test_a_stage_that_raised_ends_the_run_after_update_and_checkpoint_with_its_error(
    error: type[ShmstageError],
) -> None:
    trainer = InstantTrainer()

    def fail(record: dict[str, Any]) -> None:
        if record["step"] == 3 and record["index"] == 0:
            raise_from_peer(error("out of device memory"))

    trainer.fail["stage_fwd_bwd"] = fail
    program, feeder, lines = make("staged_before_update", trainer)
    with pytest.raises(error, match="out of device memory"):
        run(program, feeder)
    assert [r["command"] for r in trainer.received][-3:] == ["apply_deferred_update", "get_metrics", "save_checkpoint"]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("kind", ["fwd_bwd", "update", "staged"])
def test_a_failed_token_ends_the_run_and_names_step_and_microbatch(kind: str) -> None:
    trainer = InstantTrainer()
    trainer.bad_token = kind
    program, feeder, lines = make("staged_before_update", trainer)
    with pytest.raises(TokenFailedError, match=rf"{kind} of step 1, micro-batch \d failed on the device: boom"):
        run(program, feeder)
    assert lines == []


def test_an_upload_that_fails_after_its_call_returned_still_saves_update_and_checkpoint() -> None:
    trainer = InstantTrainer()

    def spoil(record: dict[str, Any]) -> None:
        trainer.bad_token = "staged" if record["step"] == 3 and record["index"] == 0 else None

    trainer.fail["stage_fwd_bwd"] = spoil
    program, feeder, lines = make("staged_before_update", trainer)
    with pytest.raises(TokenFailedError, match="staged of step 3, micro-batch 0 failed"):
        run(program, feeder)
    assert [r["command"] for r in trainer.received][-3:] == ["apply_deferred_update", "get_metrics", "save_checkpoint"]
    assert [line["step"] for line in lines] == [1, 2]


def test_a_timeout_that_the_trainer_reports_of_its_own_wait_is_a_stage_that_raised() -> None:
    trainer = InstantTrainer()

    def fail(record: dict[str, Any]) -> None:
        if record["step"] == 2 and record["index"] == 0:
            error = WaitTimeoutError("no device buffer retired")
            error.from_peer = True
            raise error

    trainer.fail["stage_fwd_bwd"] = fail
    program, feeder, lines = make("staged_before_update", trainer)
    with pytest.raises(WaitTimeoutError, match="no device buffer retired"):
        run(program, feeder)
    assert [line["step"] for line in lines] == [1]


@pytest.mark.parametrize("command", ["get_metrics", "save_checkpoint"])
def test_a_failed_ticket_ends_the_run(command: str) -> None:
    trainer = InstantTrainer()
    trainer.bad_ticket = command
    program, feeder, _ = make("serial", trainer)
    with pytest.raises(RunFailedError, match="disk full"):
        if command == "save_checkpoint":
            program.prepare(None)
        run(program, feeder)


def test_a_step_line_that_cannot_be_written_never_ends_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """B1"""
    trainer = InstantTrainer()
    program, feeder, lines = make("pipelined", trainer)

    def refuse(line: dict[str, Any]) -> None:
        raise OSError("disk full")

    program._write_step = refuse
    run(program, feeder)
    assert "step line 1 was not written: disk full" in capsys.readouterr().out
    assert received_calls(trainer.received)[-2:] == ["get_metrics 4", "save_checkpoint 4"]


def test_an_update_the_trainer_ran_against_the_plan_is_noticed() -> None:
    trainer = InstantTrainer()
    original = trainer._forward
    trainer._forward = lambda command, handle, defer: {**original(command, handle, defer), "updated": True}  # type: ignore[method-assign]
    program, feeder, _ = make("serial", trainer)
    with pytest.raises(RunFailedError, match="the trainer ran the update"):
        run(program, feeder)


def test_an_error_in_the_feeder_ends_the_run_with_that_error() -> None:
    program, feeder, _ = make("serial", InstantTrainer(), steps=None, count=4, feeder_error=EngineError("bad input"))
    with pytest.raises(EngineError, match="bad input"):
        run(program, feeder)


def test_a_stop_while_an_update_is_deferred_applies_it_first() -> None:
    trainer = InstantTrainer()
    deferred = lambda: any(r.get("defer_update") for r in trainer.received)  # noqa: E731
    program, feeder, lines = make("staged_before_update", trainer, stop=deferred)
    with pytest.raises(StoppedError, match="up to step 1 is saved"):
        run(program, feeder)
    assert [r["command"] for r in trainer.received][-3:] == ["apply_deferred_update", "get_metrics", "save_checkpoint"]
    assert [line["step"] for line in lines] == [1]


@pytest.mark.parametrize("mode", BOUNDARIES)
@pytest.mark.parametrize("refused", [False, True])
def test_a_stop_inside_a_step_saves_the_step_before_it_unless_the_trainer_refuses(
    mode: Boundary, refused: bool
) -> None:
    trainer = InstantTrainer()

    def inside_step_2() -> bool:
        return any(r["command"].startswith("fwd_bwd") and (r["step"], r["index"]) == (2, 0) for r in trainer.received)

    if refused:
        trainer.fail["save_checkpoint"] = lambda record: raise_from_peer(TrainerError("step 2 has begun"))
    program, feeder, _ = make(mode, trainer, stop=inside_step_2)
    with pytest.raises(StoppedError, match=f"up to step {0 if refused else 1} is saved"):
        run(program, feeder)
    saved = [r["step"] for r in trainer.received if r["command"] == "save_checkpoint"]
    assert saved == ([] if refused else [1])


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_input_that_ends_inside_a_step_still_gives_a_complete_last_line(mode: Boundary) -> None:
    """B5"""
    trainer = InstantTrainer()
    program, feeder, lines = make(mode, trainer, steps=None, count=7)
    run(program, feeder)
    assert [line["microbatches"] for line in lines] == [3, 3, 1]
    assert [r["command"] for r in trainer.received].count("update") == 1


# --- late fields, hooks, evaluation ---------------------------------------------------------------------


class Late:
    """Stands where ``LateFields`` stands; every token of a micro-batch loses its weight."""

    def __init__(self) -> None:
        self.before: list[tuple[int, int]] = []

    def before_scoring(self, handle: Handle) -> None:
        self.before.append((handle.step, handle.index))

    def after_scoring(self, handle: Handle) -> Patch:
        return Patch(("old_per_token_logps", "completion_mask"), 5)


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_loss_tokens_of_the_patch_replace_the_handles_and_late_digests_stand_in_the_line(mode: Boundary) -> None:
    trainer, late, handles = InstantTrainer(), Late(), []
    call = trainer.call

    def watch(command: str, arguments: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if command == "fwd_bwd":
            handles.append(handle_from_wire(arguments["handle"]).loss_tokens)
        return call(command, arguments, timeout_s=timeout_s)

    trainer.call = watch  # type: ignore[method-assign]
    program, feeder, lines = make(mode, trainer, more={"late": late}, recompute_logps=True, steps=2)
    run(program, feeder)
    assert late.before == [(k, i) for k in (1, 2) for i in range(3)]
    patched = [r["loss_tokens"] for r in trainer.received if r["command"] == "patch_staged"]
    assert patched + handles == [5] * 6
    assert lines[1]["late_digests"] == [{"actor_logps": "d"}] * 3


@pytest.mark.parametrize("how", ["call", "ticket"])
@pytest.mark.parametrize("mode", BOUNDARIES)
def test_if_reference_log_probs_for_f_fail_the_line_of_step_k_is_kept_and_the_run_ends_with_the_error(
    mode: Boundary, how: str
) -> None:
    trainer = InstantTrainer()
    score = trainer._ticket_event

    if how == "call":
        trainer.fail["per_token_logps"] = lambda record: _refuse_f(trainer, record)
    else:
        trainer._ticket_event = lambda command, step, arguments: (  # type: ignore[method-assign]
            replace(score(command, step, arguments), ok=False, error="scoring: out of memory")
            if command == "per_token_logps" and _key_of(arguments) == (2, 0)
            else score(command, step, arguments)
        )
    program, feeder, lines = make(mode, trainer, reference_logps=True, steps=4)
    with pytest.raises(ShmstageError, match="scoring: out of memory"):
        run(program, feeder)
    assert [line["step"] for line in lines] == [1]
    commands = [r["command"] for r in trainer.received]
    assert commands[-1] == "save_checkpoint"
    assert commands.count("get_metrics") == 1


def _key_of(arguments: dict[str, Any]) -> tuple[int, int]:
    handle = handle_from_wire(arguments["handle"])
    return handle.step, handle.index


def _refuse_f(trainer: InstantTrainer, record: dict[str, Any]) -> None:
    scored = sum(r["command"] == "per_token_logps" for r in trainer.received)
    if scored == 3:  # 1.0, 1.1 and 1.2 were; the next is 2.0
        raise EngineError("scoring: out of memory")


class StandInHooks:
    """Answers at once, on the calling thread."""

    decides = True

    def __init__(self, end_at: int | None = None) -> None:
        self.end_at = end_at
        self.asked: list[int] = []
        self.ended: list[int] = []
        self.deliver: Callable[[Any], None] = lambda verdict: None

    def verdict_of(self, step: int) -> bool | None:
        return None

    def ask(self, step: int, facts: Any) -> None:
        self.asked.append(step)
        self.deliver(Verdict(step, step != self.end_at))

    def step_ended(self, line: Any) -> None:
        self.ended.append(line["step"])


def with_hooks(mode: Boundary, trainer: InstantTrainer, hooks: StandInHooks, **config: Any) -> Any:
    made = make(mode, trainer, more={"hooks": hooks}, hook=True, checkpoint_every=1, **config)
    hooks.deliver = made[0].deliver
    return made


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_hook_is_asked_of_every_checkpoint_and_told_of_every_step(mode: Boundary) -> None:
    trainer, hooks = InstantTrainer(), StandInHooks()
    program, feeder, _ = with_hooks(mode, trainer, hooks)
    program.prepare(None)
    run(program, feeder)
    assert hooks.asked == [0, 1, 2, 3, 4]
    assert hooks.ended == [1, 2, 3, 4]
    assert program.ended_by is None


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_hook_that_ends_the_run_leaves_no_update_behind_it(mode: Boundary) -> None:
    trainer, hooks = InstantTrainer(), StandInHooks(end_at=2)
    program, feeder, lines = with_hooks(mode, trainer, hooks)
    program.prepare(None)
    run(program, feeder)
    assert program.ended_by == "hook at checkpoint 2"
    assert [line["step"] for line in lines] == [1, 2]
    saved = [r["step"] for r in trainer.received if r["command"] == "save_checkpoint"]
    assert saved == [0, 1, 2]


def test_a_hook_that_raises_ends_the_run_with_its_error() -> None:
    trainer, hooks = InstantTrainer(), StandInHooks()
    program, feeder, _ = with_hooks("staged_before_update", trainer, hooks)
    hooks.ask = lambda step, facts: hooks.deliver(Verdict(step, False, "on_checkpoint(1) raised KeyError: 'x'"))  # type: ignore[method-assign]
    with pytest.raises(RunFailedError, match=r"on_checkpoint\(1\) raised KeyError"):
        run(program, feeder)


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_ticket_that_fails_after_the_next_update_was_dispatched_ends_the_run_at_the_next_boundary(
    mode: Boundary,
) -> None:
    trainer = InstantTrainer()
    trainer.bad_ticket = "save_checkpoint 1"
    held: list[TicketEvent] = []
    events = trainer.events

    def late(timeout_s: float = 0.0) -> list[TokenEvent | TicketEvent]:
        found = []
        for event in events(timeout_s):
            if isinstance(event, TicketEvent) and not event.ok:
                held.append(event)
            else:
                found.append(event)
        landed = [r for r in trainer.received if r["command"] == "get_metrics" and r["step"] == 2]
        return [*found, *(held.pop() for _ in range(len(held)) if landed)]

    trainer.events = late  # type: ignore[method-assign]
    program, feeder, lines = make(mode, trainer, checkpoint_every=1)
    with pytest.raises(RunFailedError, match="disk full"):
        run(program, feeder)
    if mode == "serial":  # its bookkeeping waits for nothing of the checkpoint, so step 3 may have begun
        assert [line["step"] for line in lines] in ([1, 2], [1, 2, 3])
    else:
        assert [line["step"] for line in lines][:2] == [1, 2]
    assert lines[-1]["step"] < 4


def test_the_feeder_hears_of_landed_updates_and_of_steps_that_are_safe() -> None:
    program, feeder, _ = make("pipelined", InstantTrainer(), checkpoint_every=2)
    run(program, feeder)
    assert [step for what, step in feeder.told if what == "landed"] == [1, 2, 3, 4]
    assert [step for what, step in feeder.told if what == "durable"] == [2, 4]


class TwoEvals:
    def handles(self, step: int) -> Any:
        for index in range(2):
            yield Handle(3, 2, 2, step=step, index=index)


def test_the_figures_of_an_evaluation_stand_in_the_line_of_its_step() -> None:
    more = {"evaluator": TwoEvals()}
    program, feeder, lines = make("staged_before_update", InstantTrainer(), more=more, eval_every=2)
    run(program, feeder)
    assert [line["eval"] for line in lines] == [None, {"loss": 0.5, "denominator": 16.0}] * 2


def test_weights_older_than_those_published_before_a_restart_are_not_published_again(tmp_path: Path) -> None:
    Saving(tmp_path, {}, start=ResumeState.start(), first_step=1).publishing(5)
    for restored, published in [(3, []), (5, [5])]:
        trainer = InstantTrainer()
        program, _, _ = make("serial", trainer, out=tmp_path, weight_sync="async")
        program.prepare(restored)
        assert [r["version"] for r in trainer.received if r["command"] == "prepare_weight_sync"] == published


@pytest.mark.parametrize("mode", BOUNDARIES)
def test_a_line_waits_for_all_evaluations_of_its_step_also_those_not_sent_yet(mode: Boundary) -> None:
    trainer = InstantTrainer()
    events = trainer.events

    def one_evaluation_at_a_time(timeout_s: float = 0.0) -> list[TokenEvent | TicketEvent]:
        found = events(timeout_s)
        evaluations = [e for e in found if isinstance(e, TicketEvent) and e.kind == "eval_step"]
        trainer.pending = [*evaluations[1:], *trainer.pending]
        return [event for event in found if event not in evaluations[1:]]

    trainer.events = one_evaluation_at_a_time  # type: ignore[method-assign]
    hooks = StandInHooks()
    facts: list[Any] = []
    more = {"evaluator": TwoEvals(), "hooks": hooks}
    program, feeder, lines = make(mode, trainer, more=more, eval_every=1, hook=True, checkpoint_every=1, steps=3)
    hooks.deliver = program.deliver
    ask = hooks.ask
    hooks.ask = lambda step, given: (facts.append(given["eval"]), ask(step, given))[1]  # type: ignore[method-assign]
    run(program, feeder)
    assert [line["eval"]["denominator"] for line in lines] == [16.0] * 3
    assert [told["denominator"] for told in facts] == [16.0] * 3

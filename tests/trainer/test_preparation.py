"""``prepare`` says what a command would be refused with, in its words, and changes nothing; ``drop_staged`` drops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from trainer.rig import Rig, rigged

from shmstage.errors import EngineError, ProtocolError, ShmstageError, StageMismatchError
from shmstage.memory.handle import Handle
from shmstage.testing.engines import FailingEngine, MemoryStore, ToyEngine, toy_layout
from shmstage.trainer.gate import COMMANDS
from shmstage.trainer.preparation import UNPREPARED
from shmstage.wire.handles import handle_to_wire

State = Callable[[Rig], None]


def prepare(rig: Rig, command: str, sequence: int = 1000, **arguments: Any) -> dict[str, Any]:
    if isinstance(arguments.get("handle"), Handle):
        arguments["handle"] = handle_to_wire(arguments["handle"])
    given = {"command": command, "arguments": arguments, "sequence": sequence}
    state: dict[str, Any] = rig.worker.execute("prepare", given)["state"]
    return state


def outcome(run: Callable[[], Any]) -> tuple[type, str]:
    try:
        run()
    except ShmstageError as error:
        return type(error), str(error)
    return type(None), ""


# --- every state of a worker × every command ----------------------------------------------------------------


def opened(rig: Rig) -> None:
    rig.open()


def restored_without_a_checkpoint(rig: Rig) -> None:
    rig.call("restore_checkpoint")


def inside_a_step(rig: Rig) -> None:
    rig.open()
    rig.call("fwd_bwd", handle=rig.publish(1, 0))


def after_a_step(rig: Rig) -> None:
    rig.open()
    rig.train_step(1)


def deferred_and_staged(rig: Rig) -> None:
    rig.open()
    rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
    rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))


def staged(rig: Rig) -> None:
    after_a_step(rig)
    rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))


def staged_badly(rig: Rig) -> None:
    staged(rig)
    stage = rig.worker._stepper.stage
    assert stage is not None
    stage.error = "seeded"
    stage.lease = None


def failed(rig: Rig) -> None:
    after_a_step(rig)
    rig.worker._gate.failed("seeded")


STATES: list[State] = [
    lambda rig: None, opened, restored_without_a_checkpoint, inside_a_step, after_a_step, deferred_and_staged, staged,
    staged_badly, failed,
]  # fmt: skip
NAMES = ["closed", *(state.__name__ for state in STATES[1:])]


def attempts(rig: Rig) -> list[tuple[str, dict[str, Any]]]:
    """Every command, with arguments that may be right and with some that never are."""
    fresh = rig.publish(2, 1)
    stage = rig.worker._stepper.stage
    there = stage.handle.request_id if stage is not None else "2.0@9:9"
    moved = Handle(fresh.slot, fresh.generation + 2, fresh.layout_id, step=2, index=1)
    late = {"fields": ["old_per_token_logps"], "loss_tokens": 3}
    return [
        ("info", {}), ("info", {"param_digest": 1}), ("compile", {"layout_id": rig.layout.layout_id}),
        ("compile", {"layout_id": 77}), ("compile", {"layout_id": rig.layout.layout_id, "uses": ["guess"]}),
        ("fwd_bwd", {"handle": moved}), ("fwd_bwd", {"handle": fresh, "defer_update": 3}), ("fwd_bwd", {}),
        ("stage_fwd_bwd", {"handle": moved}), ("stage_fwd_bwd", {"handle": fresh, "more": 1}),
        ("fwd_bwd_staged", {"request_id": "5.5@1:2"}), ("patch_staged", {"request_id": "5.5@1:2", **late}),
        ("patch_staged", {"request_id": there, "fields": ["x"], "loss_tokens": 3}),
        ("patch_staged", {"request_id": there, **late, "loss_tokens": -1}),
        ("apply_deferred_update", {"step": 1}), ("update", {"step": 1}),
        ("get_metrics", {"step": 7}), ("get_metrics", {"step": 1}), ("get_metrics", {}),
        ("eval_step", {"handle": moved}), ("eval_step", {"handle": fresh}), ("eval_step", {}),
        ("per_token_logps", {"handle": moved, "role": "actor"}), ("per_token_logps", {"handle": fresh, "role": "cook"}),
        ("per_token_logps", {"request_id": "5.5@1:2", "role": "actor"}),
        ("per_token_logps", {"request_id": there, "role": "cook"}),
        ("save_checkpoint", {"step": 7, "metadata": {}}), ("save_checkpoint", {"step": 1}),
        ("prepare_weight_sync", {"version": 7}), ("prepare_weight_sync", {"version": 1, "sync": "yes"}),
        ("restore_checkpoint", {"at_most": -1}), ("restore_checkpoint", {"withdrawn": [1]}),
        ("shutdown", {"discard": 1}), ("shutdown", {"now": True}),
        # these may well be accepted, and then change something: one of them at a time, at the end
        ("apply_deferred_update", {}), ("update", {}), ("fwd_bwd_staged", {"request_id": there}),
        ("stage_fwd_bwd", {"handle": fresh}), ("fwd_bwd", {"handle": fresh}),
    ]  # fmt: skip


def observed(rig: Rig) -> tuple[Any, ...]:
    stage = rig.worker._stepper.stage
    return (rig.worker._gate.state, stage and stage.handle, rig.pool.free_slot_count(), len(rig.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=NAMES)
def test_what_a_command_is_refused_with_is_told_before_it_runs_and_in_the_same_words(state: State) -> None:
    refused = 0
    with rigged(make, opened=False, layout=toy_layout(late=True), slots=8, aux_slots=1) as rig:
        state(rig)
        rig.worker._read_news()
        for number, (command, arguments) in enumerate(attempts(rig), start=1):
            before = observed(rig)
            prepared = outcome(partial(prepare, rig, command, number, **arguments))
            assert observed(rig) == before, f"prepare {command} changed something"
            rig.worker._preparation.forget()  # what is not prepared may run where no fleet ever asked
            ran = outcome(partial(rig.call, command, **arguments))
            assert prepared == ran, f"{command} {arguments}"
            refused += ran[0] is not type(None)
    assert refused > 25


def make() -> Any:
    return ToyEngine(store=MemoryStore())


def test_every_command_can_be_prepared_or_needs_no_agreement() -> None:
    with rigged() as rig:
        known = set(rig.worker._preparation._checks)
    assert known | UNPREPARED == COMMANDS
    assert not known & UNPREPARED


def test_a_failure_that_is_news_is_read_before_the_answer() -> None:
    with rigged(lambda: FailingEngine(make(), frozenset({1}))) as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("fwd_bwd", handle=handle)
        rig.token("update", "update.1")
        with pytest.raises(ShmstageError, match="failed on the device"):
            prepare(rig, "get_metrics", step=1)


def test_what_was_agreed_runs_whatever_became_known_since() -> None:
    """Else one host would dispatch a collective that another one, which knows more, does not."""
    with rigged() as rig:
        handle = rig.publish(1, 0, final=True)
        prepare(rig, "fwd_bwd", handle=handle)
        uploaded = rig.worker.completions.upload_reporter(rig.publish(1, 1), "staged", 1)
        uploaded(2, "seeded: an upload of long ago failed")
        assert rig.call("fwd_bwd", handle=handle)["updated"]
        with pytest.raises(ShmstageError, match="an upload of long ago failed"):
            prepare(rig, "get_metrics", 1001, step=1)


def test_an_engine_without_the_method_says_so_in_time() -> None:
    class Bare:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            if name in ("eval_step", "per_token_logps"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    with rigged(lambda: Bare(make()), aux_slots=1) as rig:
        with pytest.raises(EngineError, match="has no such method"):
            prepare(rig, "eval_step", handle=rig.publish(1, 0, aux=True))
        with pytest.raises(EngineError, match="has no such method"):
            prepare(rig, "per_token_logps", handle=rig.publish(1, 0), role="actor")


# --- number and match ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [5, 4])
def test_a_number_that_is_not_higher_is_refused(sequence: int) -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        with pytest.raises(ProtocolError, match=f"number {sequence} comes after 5"):
            prepare(rig, "info", sequence)
        prepare(rig, "info", 6)


@pytest.mark.parametrize(
    ("command", "arguments", "what"),
    [
        ("get_metrics", {"step": 0}, "what was prepared as number 5 is info"),
        ("info", {"param_digest": True}, "what was prepared as number 5 is info with other arguments"),
    ],
)
def test_something_else_than_what_was_prepared_is_refused(command: str, arguments: dict[str, Any], what: str) -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        with pytest.raises(ProtocolError, match=what):
            rig.call(command, **arguments)


def test_what_was_prepared_runs_once() -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        assert rig.call("info")["gate"] == "open"
        with pytest.raises(ProtocolError, match="what was prepared as number 5 is nothing"):
            rig.call("info")


def test_a_refused_prepare_leaves_nothing_prepared() -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        with pytest.raises(ShmstageError):
            prepare(rig, "get_metrics", 6, step=9)
        with pytest.raises(ProtocolError, match="nothing"):
            rig.call("info")


def test_what_lets_go_of_something_needs_no_agreement() -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        rig.call("get_step_timing", step=0)
        rig.call("release_weight_sync", version=0)
        assert rig.call("drop_staged", request_id="1.0@0:2") == {"dropped": False}
        assert rig.call("info")["gate"] == "open", "they took the place of what was prepared"
        assert rig.call("shutdown", discard=True) == {"param_digest": ""}


def test_another_epoch_counts_anew() -> None:
    with rigged() as rig:
        prepare(rig, "info", 5)
        rig.call("info")
        rig.new_epoch()
        assert rig.call("info")["gate"] == "closed"
        assert prepare(rig, "info", 1)["executed"] == 0


def test_the_state_tells_what_was_executed_last_but_for_stages() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0)
        assert prepare(rig, "stage_fwd_bwd", 3, handle=handle)["executed"] == 0
        rig.call("stage_fwd_bwd", handle=handle)
        assert prepare(rig, "info", 4)["executed"] == 0
        rig.call("info")
        assert prepare(rig, "info", 5)["executed"] == 4


def test_the_state_has_no_slots_in_it() -> None:
    """Each host has the same micro-batch in a slot and generation of its own."""
    told = []
    for extra in (0, 1):
        with rigged() as rig:
            for _ in range(extra):
                rig.pool.acquire(rig.layout, timeout_s=1.0).abandon()
            handle = rig.publish(1, 0)
            rig.call("stage_fwd_bwd", handle=handle)
            told.append((handle.request_id, prepare(rig, "fwd_bwd_staged", request_id=handle.request_id)))
    assert told[0][0] != told[1][0]
    assert told[0][1] == told[1][1]
    assert told[0][1]["staged"] == f"1.0, not final, digest {'00' * 16}, 0 loss tokens" == told[0][1]["microbatch"]


# --- drop_staged --------------------------------------------------------------------------------------------


def test_a_stage_is_dropped_by_its_own_name_and_the_next_one_fits() -> None:
    with rigged() as rig:
        first, second = rig.publish(1, 0), rig.publish(1, 1)
        rig.call("stage_fwd_bwd", handle=first)
        assert rig.call("drop_staged", request_id=second.request_id) == {"dropped": False}
        assert rig.call("info")["staged"] == first.request_id
        assert rig.call("drop_staged", request_id=first.request_id) == {"dropped": True}
        assert rig.call("drop_staged", request_id=first.request_id) == {"dropped": False}
        assert rig.call("info")["staged"] is None
        with pytest.raises(StageMismatchError):
            rig.call("fwd_bwd_staged", request_id=first.request_id)
        rig.call("stage_fwd_bwd", handle=second)
        rig.call("fwd_bwd_staged", request_id=second.request_id)


def test_a_drop_is_accepted_whatever_the_gate_says() -> None:
    with rigged(opened=False) as rig:
        assert rig.call("drop_staged", request_id="1.0@0:2") == {"dropped": False}
    with rigged() as rig:
        rig.call("stage_fwd_bwd", handle=rig.publish(1, 0))
        stage = rig.worker._stepper.stage
        assert stage is not None
        rig.worker._gate.failed("seeded")
        assert rig.call("drop_staged", request_id=stage.handle.request_id) == {"dropped": True}

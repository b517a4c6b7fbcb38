"""A step line is written when everything in it is known, and says what happened as the trainer stamped it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shmstage.memory.handle import Handle
from shmstage.orchestrator.feeder import PackedMicrobatch
from shmstage.orchestrator.ledger import Ledger
from shmstage.orchestrator.trainer_client import ForwardResult
from shmstage.wire.messages import TokenEvent

MS = 1_000_000


def packed(step: int = 1, index: int = 0, *, loss_tokens: int = 5) -> PackedMicrobatch:
    handle = Handle(0, 2 * step, 1, step=step, index=index, is_final=index == 1, loss_tokens=loss_tokens)
    return PackedMicrobatch(handle, (f"t{step}.{index}",), (1,), 8, 1, 0.0, 0.0, 0.0, 0)


def token(kind: str, micro: PackedMicrobatch, begin_ms: int, ready_ms: int) -> TokenEvent:
    names = ("upload_begin_ns", "staged_ready_ns") if kind == "staged" else ("dispatch_begin_ns", "ready_ns")
    stamps = dict(zip(names, (begin_ms * MS, ready_ms * MS), strict=True))
    handle = micro.handle
    return TokenEvent(0, kind, handle.request_id, handle.step, handle.index, True, "", stamps)


def facts(ledger: Ledger, step: int, begin_ms: int) -> list[Callable[[], object]]:
    """All that is to be known of a step of two micro-batches, in an order in which it may become known."""
    micros = [packed(step, index) for index in range(2)]
    acts: list[Callable[[], object]] = []
    for number, micro in enumerate(micros):
        at = begin_ms + 10 * number
        acts += [
            lambda micro=micro: ledger.sent(micro),
            lambda micro=micro: ledger.forwarded(micro, ForwardResult(False, 0.0, 0.0, ""), staged=False),
            lambda micro=micro, at=at: ledger.token(token("staged", micro, at, at + 1)),
            lambda micro=micro, at=at: ledger.token(token("fwd_bwd", micro, at + 2, at + 9)),
        ]
    acts += [
        lambda: ledger.eval_sent(step),
        lambda: ledger.metrics(step, {"loss": 0.5, "grad_norm": 1.0, "denominator": 7.0}),
        lambda: ledger.token(token("update", micros[1], begin_ms + 20, begin_ms + 25)),
        lambda: ledger.eval_done(step, {"loss_sum": 2.0, "denominator": 4.0}),
    ]
    return acts


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(mode="serial", tokens_per_microbatch=8, rows=1, slot_nbytes=64)


def test_a_step_is_complete_when_all_of_it_is_known_and_not_before(ledger: Ledger) -> None:
    acts = facts(ledger, 1, 100)
    for act in acts:
        assert not ledger.is_complete(1)
        act()
    assert ledger.is_complete(1)


@pytest.mark.parametrize("missing", [6, 7, 9, 10, 11], ids=["upload", "forward", "metrics", "update", "evaluation"])
def test_a_step_of_which_one_thing_is_unknown_is_not_complete(ledger: Ledger, missing: int) -> None:
    for number, act in enumerate(facts(ledger, 1, 100)):
        if number != missing:
            act()
    assert not ledger.is_complete(1)


def test_the_denominator_of_a_line_is_the_trainers_and_not_what_was_packed(ledger: Ledger) -> None:
    for act in facts(ledger, 1, 100):
        act()
    line = ledger.close_step(1, attempt=2)
    assert (line["denominator"], line["loss_tokens"], line["loss"]) == (7.0, 10, 0.5)
    assert (line["attempt"], line["eval"]) == (2, {"loss": 0.5, "denominator": 4.0})
    assert line["trajectory_ids"] == ["t1.0", "t1.1"]
    assert line["instants_ns"]["ready"] == [109 * MS, 119 * MS]
    assert line["instants_ns"]["update_landed"] == 125 * MS


def test_a_step_lasts_from_landing_to_landing_and_its_idle_time_is_at_its_first_boundary(ledger: Ledger) -> None:
    for step, begin_ms in ((1, 100), (2, 140)):
        for act in facts(ledger, step, begin_ms):
            act()
    first, second = (ledger.close_step(step, attempt=1) for step in (1, 2))
    assert (first["step_s"], first["boundary_idle_s"]) == (0.023, None)
    assert second["step_s"] == 0.04
    # the update came 1 ms after the last micro-batch, the next dispatch 17 ms after it had landed
    assert second["boundary_idle_s"] == 0.018

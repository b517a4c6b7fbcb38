from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainer.rig import Rig, rigged, toy_engine

from shmstage.errors import (
    CheckpointError,
    EngineError,
    GateClosedError,
    PeerRestartedError,
    ProtocolError,
    StageMismatchError,
    StageOccupiedError,
    StaleHandleError,
    TokenFailedError,
    TrainerError,
    UpdateDeferredError,
    WaitTimeoutError,
)
from shmstage.memory.handle import Handle
from shmstage.memory.reader import Lease
from shmstage.testing.engines import FailingEngine, MemoryStore, ReplayingEngine, ToyEngine, toy_loss
from shmstage.trainer import aliasing, stepper, worker
from shmstage.trainer.completions import Completions
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow  # each compiles or at least runs real programs

STEPS = 4


# --- the same numbers in every order ------------------------------------------------------------------------


def serial(rig: Rig) -> list[dict[str, Any]]:
    return [rig.train_step(step) for step in range(1, STEPS + 1)]


def staged(rig: Rig, *, defer: bool) -> list[dict[str, Any]]:
    """The staged modes of the contract's table, one after the other."""
    tickets = []
    handle = rig.publish(1, 0)
    rig.call("fwd_bwd", handle=handle)
    for step in range(1, STEPS + 1):
        for index in (1, 2):
            handle = rig.publish(step, index, final=index == 2)
            rig.call("stage_fwd_bwd", handle=handle)
            deferred = defer and index == 2
            rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=deferred)
        if step < STEPS:
            following = rig.publish(step + 1, 0)
            rig.call("stage_fwd_bwd", handle=following)
        if defer:
            rig.call("apply_deferred_update")
        tickets.append(rig.call("get_metrics", step=step))
        rig.call("save_checkpoint", step=step, metadata={})
        if step < STEPS:
            rig.call("fwd_bwd_staged", request_id=following.request_id)
    return [rig.ticket(ticket).value for ticket in tickets]


@pytest.fixture(scope="module")
def reference() -> tuple[list[dict[str, Any]], str]:
    with rigged() as rig:
        return serial(rig), rig.digest()


@pytest.mark.parametrize("defer", [False, True], ids=["after_update", "before_update"])
@pytest.mark.parametrize("device_buffers", [2, 3])
def test_staged_orders_give_the_bits_of_the_serial_order(
    reference: tuple[list[dict[str, Any]], str], defer: bool, device_buffers: int
) -> None:
    with rigged(device_buffers=device_buffers) as rig:
        assert staged(rig, defer=defer) == reference[0]
        assert rig.digest() == reference[1]


def test_an_explicit_update_gives_the_bits_of_a_final_one(reference: tuple[list[dict[str, Any]], str]) -> None:
    with rigged() as rig:
        for step in range(1, STEPS + 1):
            for index in range(3):
                assert rig.call("fwd_bwd", handle=rig.publish(step, index))["updated"] is False
            assert rig.call("update")["updated"] is True
        assert rig.digest() == reference[1]


def test_restoring_and_replaying_gives_the_bits_of_an_undisturbed_run(
    reference: tuple[list[dict[str, Any]], str],
) -> None:
    with rigged() as rig:
        for step in (1, 2):
            rig.train_step(step)
        assert rig.ticket(rig.call("save_checkpoint", step=2, metadata={"cursor": 7})).ok
        rig.train_step(3)
        rig.call("fwd_bwd", handle=rig.publish(4, 0))
        restored = rig.call("restore_checkpoint")
        stamps = {"landed_ns", "landed_wall_s"}
        assert restored["step"] == 2
        assert {k: v for k, v in restored["metadata"].items() if k not in stamps} == {"cursor": 7, "step": 2}
        assert stamps < set(restored["metadata"])
        assert [rig.train_step(step) for step in (3, 4)] == reference[0][2:]
        assert rig.digest() == reference[1]


def test_payload_digests_are_the_same_staged_and_unstaged() -> None:
    with rigged(verify="full") as rig:
        first = rig.call("fwd_bwd", handle=rig.publish(1, 0, seed=5))["payload_digest"]
        handle = rig.publish(1, 1, seed=5)
        rig.call("stage_fwd_bwd", handle=handle)
        assert rig.call("fwd_bwd_staged", request_id=handle.request_id)["payload_digest"] == first
        assert rig.call("fwd_bwd", handle=rig.publish(1, 2, seed=6))["payload_digest"] != first
        assert len(first) == 32


# --- events -------------------------------------------------------------------------------------------------


def test_every_upload_forward_and_update_ends_in_one_event_with_its_stamps() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("fwd_bwd", handle=handle)
        upload = rig.token("staged", handle.request_id)
        forward = rig.token("fwd_bwd", handle.request_id)
        update = rig.token("update", "update.1")
    assert (forward.step, forward.index, forward.ok, forward.error) == (1, 0, True, "")
    assert upload.stamps["upload_begin_ns"] <= upload.stamps["staged_ready_ns"]
    for event in (forward, update):
        assert event.stamps["dispatch_begin_ns"] <= event.stamps["dispatch_end_ns"]
        assert event.stamps["dispatch_begin_ns"] <= event.stamps["ready_ns"]
    assert forward.stamps["ready_ns"] <= update.stamps["ready_ns"]
    assert sorted(event.kind for event in rig.tokens) == ["fwd_bwd", "staged", "update"]


def test_step_timing_is_told_in_seconds_before_the_reply() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("fwd_bwd", handle=handle)
        rig.token("update", "update.1")
        report = rig.call("get_step_timing", step=1)
    (micro,) = report["microbatches"]
    assert (micro["request_id"], micro["index"]) == (handle.request_id, 0)
    assert micro["dispatch_begin_ago_s"] >= micro["dispatch_end_ago_s"] >= 0
    assert micro["ready_ago_s"] >= report["update"]["ready_ago_s"] >= 0


def test_metrics_are_of_the_step_asked_for_although_later_ones_have_begun() -> None:
    with rigged() as rig:
        first = rig.train_step(1)
        ticket = rig.call("get_metrics", step=1)
        for index in range(3):
            rig.call("fwd_bwd", handle=rig.publish(2, index, final=index == 2))
        assert rig.ticket(ticket).value == first


class _NotComputed:
    """A metric of a device that has not come to it yet."""

    def __init__(self, value: Any, computed: threading.Event) -> None:
        self.shape, self.dtype = value.shape, value.dtype
        self._value, self._computed = value, computed

    @property
    def addressable_shards(self) -> Any:
        assert self._computed.wait(5.0), "a command waited for metrics"
        return self._value.addressable_shards


def test_metrics_that_are_not_computed_hold_up_no_command_of_the_next_step() -> None:
    """B3: else the second micro-batch's call would end when it is too late to stage the next."""
    computed = threading.Event()

    class LateMetrics:
        def __init__(self) -> None:
            self._inner = ToyEngine(store=MemoryStore())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def metrics(self) -> dict[str, Any]:
            return {name: _NotComputed(value, computed) for name, value in self._inner.metrics().items()}

    with rigged() as rig:
        wanted = [rig.train_step(1), rig.train_step(2)]
    with rigged(LateMetrics) as rig:
        tickets = []
        for step in (1, 2):
            for index in range(3):
                handle = rig.publish(step, index, final=index == 2)
                rig.call("stage_fwd_bwd", handle=handle)
                rig.call("fwd_bwd_staged", request_id=handle.request_id)
            tickets.append(rig.call("get_metrics", step=step))
        rig.token("update", "update.2")
        assert rig.tickets.keys().isdisjoint(ticket["ticket"] for ticket in tickets)
        computed.set()
        assert [rig.ticket(ticket).value for ticket in tickets] == wanted


def test_the_update_waits_for_a_checkpoint_copy_and_says_how_long() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store)) as rig:
        rig.train_step(1)
        # the writer holds one checkpoint, another waits behind it, so the copy of the third cannot be over
        store.hold.clear()
        tickets = [rig.call("save_checkpoint", step=1, metadata={"n": n}) for n in range(4)]
        threading.Timer(0.05, store.hold.set).start()
        result = rig.call("fwd_bwd", handle=rig.publish(2, 0, final=True))
        assert result["snapshot_wait_s"] > 0
        assert all(rig.ticket(ticket).ok for ticket in tickets)
        assert rig.call("fwd_bwd", handle=rig.publish(3, 0, final=True))["snapshot_wait_s"] == 0.0


def test_an_engine_that_declines_snapshots_is_waited_for() -> None:
    class Declining:
        snapshots = False

        def __init__(self) -> None:
            self._inner = ToyEngine(store=MemoryStore())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    with rigged(Declining) as rig:
        assert rig.call("info")["snapshots"] is False
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True))
        rig.call("get_metrics", step=1)
        assert rig.worker._snapshots._holding == []  # nothing is left for the update to wait for


def overflowing_engine() -> OptaxEngine:
    """Every micro-batch is replayed."""

    def overflowing(params: Any, batch: Any) -> Any:
        return *toy_loss(params, batch), jnp.bool_(True)

    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}
    return OptaxEngine(overflowing, params, optax.adam(1e-2), store=MemoryStore(), replay_loss_fn=toy_loss)


@pytest.mark.parametrize("make_engine", [toy_engine, overflowing_engine])
def test_a_checkpoint_saved_inside_a_step_is_of_the_update_before_and_disturbs_nothing(
    make_engine: Callable[[], OptaxEngine],
) -> None:
    """B6"""
    with rigged(make_engine) as rig:
        wanted = [rig.train_step(1), rig.train_step(2)]
        after_2 = rig.digest()
    with rigged(make_engine) as rig:
        assert rig.train_step(1) == wanted[0]
        after_1 = rig.digest()
        for index in (0, 1):
            rig.call("fwd_bwd", handle=rig.publish(2, index))
        assert rig.ticket(rig.call("save_checkpoint", step=1, metadata={"cursor": 7})).ok
        rig.call("fwd_bwd", handle=rig.publish(2, 2, final=True))
        assert rig.ticket(rig.call("get_metrics", step=2)).value == wanted[1]
        assert rig.digest() == after_2
        restored = rig.call("restore_checkpoint")
        assert (restored["step"], restored["metadata"]["cursor"]) == (1, 7)
        assert restored["metadata"]["landed_ns"] == rig.token("update", "update.1").stamps["ready_ns"]
        assert rig.digest() == after_1
        assert rig.train_step(2) == wanted[1]  # the optimizer's state came back, too
        assert rig.digest() == after_2


def test_the_update_of_a_step_waits_for_the_copy_of_a_checkpoint_saved_inside_it() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store)) as rig:
        rig.train_step(1)
        rig.call("fwd_bwd", handle=rig.publish(2, 0))
        store.hold.clear()
        try:
            for number in range(4):  # one is written, another waits, so the copy of the fourth cannot be over
                rig.call("save_checkpoint", step=1, metadata={"number": number})
            with pytest.raises(WaitTimeoutError, match="copy of checkpoint 1"):
                rig.worker._snapshots.wait_copies(0.01)
        finally:
            store.hold.set()
        rig.call("update")


def test_inside_a_step_metrics_weights_and_checkpoints_of_other_steps_stay_refused() -> None:
    with rigged() as rig:
        rig.train_step(1)
        rig.call("fwd_bwd", handle=rig.publish(2, 0))
        for command, arguments in (
            ("get_metrics", {"step": 1}),
            ("prepare_weight_sync", {"version": 1}),
            ("save_checkpoint", {"step": 0, "metadata": {}}),
            ("save_checkpoint", {"step": 2, "metadata": {}}),
        ):
            with pytest.raises(TrainerError, match="step 2 has begun|the last update is 1"):
                rig.call(command, **arguments)
        rig.call("fwd_bwd", handle=rig.publish(2, 1, final=True), defer_update=True)
        with pytest.raises(UpdateDeferredError):
            rig.call("save_checkpoint", step=1, metadata={})


def test_inside_a_step_an_engine_whose_forward_pass_changes_its_state_saves_nothing() -> None:
    engine = toy_engine()
    engine.snapshots = False
    with rigged(lambda: engine) as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        with pytest.raises(TrainerError, match="step 1 has begun"):
            rig.call("save_checkpoint", step=0, metadata={})


@pytest.mark.parametrize(
    ("make_engine", "wanted"),
    [
        (toy_engine, ["decodes_routing", "eval_step", "per_token_logps"]),
        (overflowing_engine, ["decodes_routing", "eval_step", "settle"]),
    ],
)
def test_info_says_which_optional_methods_the_engine_has(
    make_engine: Callable[[], OptaxEngine], wanted: list[str]
) -> None:
    with rigged(make_engine, opened=False) as rig:
        assert rig.call("info")["optional"] == wanted
        assert rig.worker.attach(rig.hello())["optional"] == wanted


# --- refusals -----------------------------------------------------------------------------------------------


def test_before_a_restore_training_is_refused() -> None:
    with rigged(opened=False) as rig:
        with pytest.raises(GateClosedError):
            rig.call("fwd_bwd", handle=rig.publish(1, 0))
        assert rig.call("info")["gate"] == "closed"
        assert rig.call("compile", layout_id=rig.layout.layout_id)["compile_s"] >= 0
        with pytest.raises(ProtocolError, match="uses = \\['sing'\\]; want some of train, evaluate, score"):
            rig.call("compile", layout_id=rig.layout.layout_id, uses=["sing"])


def test_the_first_forward_waits_until_checkpoint_zero_is_durable() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store), opened=False) as rig:
        assert rig.call("restore_checkpoint") == {"step": None, "metadata": {}}
        store.hold.clear()
        ticket = rig.call("save_checkpoint", step=0, metadata={})
        handle = rig.publish(1, 0)
        with pytest.raises(GateClosedError, match="not durable"):
            rig.call("fwd_bwd", handle=handle)
        store.hold.set()
        assert rig.ticket(ticket).ok
        rig.call("fwd_bwd", handle=handle)


def test_refused_commands_change_nothing() -> None:
    with rigged() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        following, third = rig.publish(2, 0), rig.publish(2, 1)
        rig.call("stage_fwd_bwd", handle=following)
        before = rig.call("info")
        with pytest.raises(UpdateDeferredError):
            rig.call("fwd_bwd_staged", request_id=following.request_id)
        with pytest.raises(UpdateDeferredError):
            rig.call("fwd_bwd", handle=third)
        with pytest.raises(StageOccupiedError):
            rig.call("stage_fwd_bwd", handle=third)
        assert rig.call("info") == before
        assert (before["deferred"], before["staged"]) == (1, following.request_id)
        rig.call("apply_deferred_update")
        with pytest.raises(StageMismatchError):
            rig.call("fwd_bwd_staged", request_id=third.request_id)
        assert rig.call("info")["staged"] == following.request_id
        rig.call("fwd_bwd_staged", request_id=following.request_id)
        rig.call("fwd_bwd", handle=third)  # its lease was never touched by the refusals


def test_fwd_bwd_uses_up_an_existing_stage_of_the_same_handle() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        result = rig.call("fwd_bwd", handle=handle)
        assert (result["request_id"], result["upload_s"]) == (handle.request_id, 0.0)
        assert rig.call("info")["staged"] is None


def test_staging_the_same_handle_again_changes_nothing() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0)
        assert rig.call("stage_fwd_bwd", handle=handle) == rig.call("stage_fwd_bwd", handle=handle)
        rig.call("fwd_bwd_staged", request_id=handle.request_id)
        assert len([e for e in rig.tokens if e.kind == "staged"]) <= 1


def test_a_second_update_for_one_step_is_refused() -> None:
    with rigged() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        rig.call("update")
        digest = rig.digest()
        with pytest.raises(TrainerError, match="no micro-batch"):
            rig.call("update")
        with pytest.raises(TrainerError, match="none is deferred"):
            rig.call("apply_deferred_update")
        assert rig.digest() == digest


def test_a_stale_or_lying_handle_trains_nothing() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0)
        rig.call("fwd_bwd", handle=handle)
        stale = Handle(handle.slot, handle.generation, handle.layout_id, step=1, index=1)
        with pytest.raises(StaleHandleError):
            rig.call("fwd_bwd", handle=stale)
        with pytest.raises(ProtocolError):
            rig.call("fwd_bwd", handle=Handle(77, 2, handle.layout_id, step=1, index=1))
        with pytest.raises(ProtocolError, match="layout 12345"):
            rig.call("fwd_bwd", handle=Handle(0, 2, 12345, step=1, index=1))
        assert rig.call("info")["gate"] == "open"
        rig.call("fwd_bwd", handle=rig.publish(1, 1))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("nonsense", {}),
        ("fwd_bwd", {}),
        ("fwd_bwd", {"handle": [1, 2]}),
        ("stage_fwd_bwd", {"handle": "x"}),
        ("get_metrics", {"step": "1"}),
        ("get_metrics", {"step": -1}),
        ("update", {"step": 1}),
        ("save_checkpoint", {"step": 0, "metadata": []}),
        ("restore_checkpoint", {"withdrawn": [[1]]}),
        ("shutdown", {"discard": 1}),
        ("per_token_logps", {"request_id": "1.0@0:2", "role": "critic"}),
    ],
)
def test_malformed_commands_are_refused(command: str, arguments: dict[str, Any]) -> None:
    with rigged() as rig:
        before = rig.call("info")
        with pytest.raises(ProtocolError):
            rig.call(command, **arguments)
        assert rig.call("info") == before
        assert not rig.worker.finished


# --- failures -----------------------------------------------------------------------------------------------


def test_a_failed_token_closes_the_gate_until_a_restore() -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({2}))) as rig:
        digest = rig.digest()
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        bad = rig.publish(1, 1)
        rig.call("fwd_bwd", handle=bad)  # returns: a return proves dispatch only
        event = rig.token("fwd_bwd", bad.request_id)
        assert not event.ok
        assert "seeded device failure" in event.error
        for command in ("info", "update"):
            with pytest.raises(TokenFailedError, match=bad.request_id.replace(".", r"\.")):
                rig.call(command)
        assert rig.call("restore_checkpoint")["step"] == 0
        assert rig.digest() == digest
        rig.train_step(1)


def test_a_failed_token_fails_the_update_metrics_and_snapshots_of_its_step() -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({2}))) as rig:
        rig.engine.over.clear()
        for index in range(3):
            rig.call("fwd_bwd", handle=rig.publish(1, index, final=index == 2))
        tickets = [
            rig.call("get_metrics", step=1),
            rig.call("save_checkpoint", step=1, metadata={}),
            rig.call("prepare_weight_sync", version=1),
        ]
        rig.engine.over.set()
        assert not rig.token("update", "update.1").ok
        for kind, event in zip(("metrics", "checkpoint", "weights"), map(rig.ticket, tickets), strict=True):
            assert not event.ok
            assert re.match(f"{kind} of step 1: step 1 failed: .*seeded device failure", event.error)
        assert rig.engine._inner._store.steps() == [0]


def test_failures_of_work_a_restore_dropped_are_not_told_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({2}))) as rig:
        rig.engine.over.clear()
        for index in range(2):
            rig.call("fwd_bwd", handle=rig.publish(1, index))
        reset = rig.worker._stepper.reset
        # the work fails inside the restore, after the news before it were read
        monkeypatch.setattr(rig.worker._stepper, "reset", lambda: (reset(), rig.engine.over.set()))
        assert rig.call("restore_checkpoint")["step"] == 0
        assert rig.call("info")["gate"] == "open"
        rig.train_step(1)


def test_after_a_restore_that_failed_nothing_is_trained_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged() as rig:
        wanted = rig.train_step(1)
        rig.call("restore_checkpoint")
        rig.call("fwd_bwd", handle=rig.publish(1, 0))  # its gradients go with the restore
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine._store, "load", lambda *_: (_ for _ in ()).throw(CheckpointError("gone")))
            with pytest.raises(CheckpointError, match="gone"):
                rig.call("restore_checkpoint")
        with pytest.raises(TokenFailedError, match="restore_checkpoint did not succeed"):
            rig.call("fwd_bwd", handle=rig.publish(1, 1))
        rig.call("restore_checkpoint")
        assert rig.train_step(1) == wanted


def test_an_engine_that_raises_needs_a_restore() -> None:
    class Raising:
        def __init__(self) -> None:
            self._inner = ToyEngine(store=MemoryStore())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def fwd_bwd(self, batch: Any) -> Any:
            raise ValueError("no such axis")

    with rigged(Raising) as rig:
        with pytest.raises(EngineError, match="no such axis"):
            rig.call("fwd_bwd", handle=rig.publish(1, 0))
        with pytest.raises(TokenFailedError, match="no such axis"):
            rig.call("update")
        rig.call("restore_checkpoint")


def test_a_failed_save_is_told_by_its_ticket() -> None:
    with rigged() as rig:
        rig.train_step(1)
        rig.engine._store.save = lambda *_: (_ for _ in ()).throw(OSError("disk full"))
        event = rig.ticket(rig.call("save_checkpoint", step=1, metadata={}))
        assert (event.ok, event.kind, event.step) == (False, "checkpoint", 1)
        assert re.match("checkpoint of step 1: .*disk full", event.error)
        rig.train_step(2)


def test_a_checkpoint_whose_facts_cannot_travel_is_told_as_failed() -> None:
    class Talkative:
        def __init__(self) -> None:
            self._inner = ToyEngine(store=MemoryStore())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def save(self, step: int, metadata: Any) -> Any:
            snapshot = self._inner.save(step, metadata)
            write = snapshot.write
            facts = np.int64(3) if step == 0 else {1, 2}
            snapshot.write = lambda: {**write(), "parts": facts}
            return snapshot

    with rigged(Talkative) as rig:
        (first,) = rig.tickets.values()
        assert (first.ok, first.value["parts"]) == (True, 3)
        rig.train_step(1)
        event = rig.ticket(rig.call("save_checkpoint", step=1, metadata={}))
        assert (event.ok, event.value) == (False, {})
        assert re.match("checkpoint of step 1 cannot be reported: .*parts is builtins.set", event.error)


def test_without_a_checkpoint_a_trained_engine_cannot_go_back_to_the_start() -> None:
    with rigged() as rig:
        rig.train_step(1)
        rig.engine._store.kept.clear()
        with pytest.raises(TrainerError, match="1 updates away"):
            rig.call("restore_checkpoint")


def test_an_old_save_is_committed_before_a_restore_chooses() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store)) as rig:
        rig.train_step(1)
        store.hold.clear()
        rig.call("save_checkpoint", step=1, metadata={})
        threading.Timer(0.05, store.hold.set).start()
        assert rig.call("restore_checkpoint")["step"] == 1


def test_a_stage_whose_upload_failed_is_not_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged(payload_shift=4) as rig:
        monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
        first, handle = rig.publish(1, 0, final=True), rig.publish(2, 0)
        rig.call("fwd_bwd", handle=first, defer_update=True)
        assert rig.token("staged", first.request_id).ok
        lost = StaleHandleError("the slot has moved on")
        monkeypatch.setattr(Lease, "check", _raises_at(2, lost))
        rig.call("stage_fwd_bwd", handle=handle)
        assert not rig.token("staged", handle.request_id).ok
        assert rig.call("apply_deferred_update")["updated"]  # step 1 is none the worse for it
        assert rig.ticket(rig.call("get_metrics", step=1)).ok
        with pytest.raises(EngineError, match="the slot has moved on"):
            rig.call("fwd_bwd_staged", request_id=handle.request_id)


def _raises_at(count: int, error: Exception) -> Callable[[Lease], None]:
    calls = itertools.count(1)

    def check(lease: Lease) -> None:
        if next(calls) == count:
            raise error

    return check


def test_a_restore_drops_stage_deferral_and_gradients() -> None:
    with rigged() as rig:
        wanted = rig.train_step(1)
        rig.call("restore_checkpoint")
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))
        rig.call("restore_checkpoint")
        info = rig.call("info")
        assert (info["staged"], info["deferred"], info["last_step"]) == (None, None, 0)
        assert rig.train_step(1) == wanted


# --- epochs -------------------------------------------------------------------------------------------------


def test_a_new_epoch_unmaps_the_old_pool_drops_the_stage_and_closes_the_gate() -> None:
    """S52"""
    with rigged() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))
        old = rig.pool.name
        info = rig.new_epoch()
        assert (info["gate"], info["staged"], info["deferred"]) == ("closed", None, None)
        rig.pools[0].close()
        assert old.strip("/") not in Path("/proc/self/maps").read_text()
        with pytest.raises(GateClosedError):
            rig.call("update")
        rig.call("restore_checkpoint")
        rig.train_step(1)


def test_a_repeated_hello_keeps_the_stage_and_ends_withdrawn_leases() -> None:
    with rigged() as rig:
        staged_handle, lost = rig.publish(1, 0), rig.publish(1, 1)
        rig.call("stage_fwd_bwd", handle=staged_handle)
        free = rig.pool.free_slot_count()
        info = rig.worker.attach(rig.hello(withdrawn=[[lost.slot, lost.generation], [0, 9998]]))
        assert info["staged"] == staged_handle.request_id
        assert rig.pool.free_slot_count() == free + 1
        rig.call("fwd_bwd_staged", request_id=staged_handle.request_id)


def test_an_older_epoch_is_refused() -> None:
    with rigged() as rig:
        old = rig.hello()
        rig.new_epoch()
        with pytest.raises(PeerRestartedError):
            rig.worker.attach(old)


# --- buffers ------------------------------------------------------------------------------------------------


def test_the_slot_is_released_when_the_copy_is_over_not_when_it_is_trained() -> None:
    with rigged(slots=1) as rig:
        rig.call("stage_fwd_bwd", handle=rig.publish(1, 0))
        rig.publish(1, 1)  # takes the only slot again


def test_replays_are_settled_for_the_one_before_and_for_all_before_the_update() -> None:
    engine = ReplayingEngine(ToyEngine(store=MemoryStore()))
    with rigged(lambda: engine) as rig:
        for index in range(3):
            rig.call("fwd_bwd", handle=rig.publish(1, index, final=index == 2))
    assert engine.log == ["fwd_bwd 1", "fwd_bwd 2", "settle 1", "fwd_bwd 3", "settle 2", "settle 3", "update"]


def test_a_stage_that_only_an_unsettled_microbatch_could_make_room_for_names_its_holders() -> None:
    with rigged(lambda: ReplayingEngine(ToyEngine(store=MemoryStore())), device_buffers=1) as rig:
        first = rig.publish(1, 0)
        rig.call("fwd_bwd", handle=first)
        with pytest.raises(TrainerError, match="raise device_buffers") as caught:
            rig.call("stage_fwd_bwd", handle=rig.publish(1, 1))
        assert first.request_id in str(caught.value)


def test_waiting_for_a_buffer_has_a_deadline_that_names_who_holds_it() -> None:
    with rigged() as rig:
        rig.worker._buffers._timeout_s = 0.01
        kept: list[Any] = []
        forward = rig.engine.fwd_bwd

        class Hoarding:
            def __getattr__(self, name: str) -> Any:
                return getattr(rig.engine, name)

            def fwd_bwd(self, batch: Any) -> Any:
                kept.append(dict(batch))
                return forward(batch)

        rig.worker._stepper._engine = Hoarding()
        handles = [rig.publish(1, index) for index in range(3)]
        for handle in handles[:2]:
            rig.call("fwd_bwd", handle=handle)
        with pytest.raises(WaitTimeoutError, match="still referenced") as caught:
            rig.call("fwd_bwd", handle=handles[2])
        assert handles[0].request_id in str(caught.value)
        kept.clear()
        rig.call("fwd_bwd", handle=handles[2])  # nothing was changed by the refusal


# --- the end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discard", [False, True])
def test_shutdown_applies_a_deferred_update_unless_told_to_discard(discard: bool) -> None:
    with rigged() as rig:
        before = rig.digest()
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        told = rig.call("shutdown", discard=discard)["param_digest"]
        assert rig.worker.finished
        assert (rig.digest() == before) is discard
        assert told == ("" if discard else rig.digest())


def test_shutdown_that_discards_answers_while_the_device_and_the_disk_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    with rigged(lambda: FailingEngine(ToyEngine(store=store), frozenset({2}))) as rig:
        rig.train_step(1, microbatches=1)
        store.hold.clear()
        rig.engine.over.clear()
        try:
            rig.call("save_checkpoint", step=1, metadata={})
            rig.call("fwd_bwd", handle=rig.publish(2, 0))
            rig.call("stage_fwd_bwd", handle=rig.publish(2, 1))
            with monkeypatch.context() as patch:
                patch.setattr(rig.worker, "_timeout_s", 0.05)
                patch.setattr(worker, "param_digest", lambda engine: pytest.fail("nobody asked for it"))
                assert rig.call("shutdown", discard=True) == {"param_digest": ""}
            assert rig.worker.finished
            assert rig.worker._stepper.stage is None
        finally:
            rig.engine.over.set()
            store.hold.set()


def test_shutdown_after_a_failure_it_has_to_wait_for_gives_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({1}))) as rig:
        rig.engine.over.clear()
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        drain = rig.worker.completions.drain
        with monkeypatch.context() as patch:
            patch.setattr(Completions, "drain", lambda self, timeout_s: (rig.engine.over.set(), drain(timeout_s)))
            assert rig.call("shutdown") == {"param_digest": ""}


def test_received_commands_are_recorded_refused_ones_too(tmp_path: Path) -> None:
    """B1"""
    path = tmp_path / "calls.jsonl"
    with rigged(calls_path=path) as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=True)
        with pytest.raises(UpdateDeferredError):
            rig.call("get_metrics", step=1)
        with pytest.raises(ProtocolError):
            rig.call("stage_fwd_bwd", handle=["garbage"])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["command"] for record in records] == [
        *("hello", "restore_checkpoint", "save_checkpoint", "stage_fwd_bwd", "fwd_bwd_staged", "get_metrics"),
        "stage_fwd_bwd",
    ]
    assert records[3] == {"command": "stage_fwd_bwd", "step": 1, "index": 0, "request_id": handle.request_id}
    assert records[4] == {**records[3], "command": "fwd_bwd_staged", "defer_update": True}
    assert records[5] == {"command": "get_metrics", "step": 1}
    assert "malformed" in records[6]


class HearsBeforeItUpdates:
    """An engine whose update returns only when the forward pass before it was told to be over."""

    def __init__(self) -> None:
        self._engine = ToyEngine(store=MemoryStore())
        self.hear: Callable[[], object] = lambda: None

    def update(self) -> Any:
        self.hear()
        return self._engine.update()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_what_is_held_is_watched_before_an_update_that_may_block() -> None:
    with rigged(HearsBeforeItUpdates) as rig:
        handle = rig.publish(1, 0, final=True)
        rig.engine.hear = lambda: rig.token("fwd_bwd", handle.request_id)
        rig.worker.completions.hold()
        assert rig.call("fwd_bwd", handle=handle)["updated"]
        rig.worker.completions.release()
        assert rig.token("update", "update.1").ok


def test_what_is_held_is_watched_before_a_payload_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    with rigged(verify="full") as rig:
        handle = rig.publish(1, 0)
        monkeypatch.setattr(rig.worker.completions._uploads, "_at_once", False)
        hashed = stepper.decoded_digest

        def hash_when_uploaded(arrays: Any) -> str:
            assert rig.token("staged", handle.request_id).ok
            return hashed(arrays)

        monkeypatch.setattr(stepper, "decoded_digest", hash_when_uploaded)
        rig.worker.completions.hold()
        assert rig.call("fwd_bwd", handle=handle)["payload_digest"]
        rig.worker.completions.release()

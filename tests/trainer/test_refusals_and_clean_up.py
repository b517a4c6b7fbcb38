"""The contract's "Refusals and clean-up in the worker", sentence by sentence, each by a real worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from skipping import skip_unless_ci
from trainer.rig import Rig, rigged

from shmstage import _native
from shmstage.errors import (
    CancelledError,
    EngineError,
    GateClosedError,
    LayoutError,
    PoolError,
    ShmstageError,
    StageMismatchError,
    StageOccupiedError,
    TokenFailedError,
    UpdateDeferredError,
)
from shmstage.memory.handle import Handle
from shmstage.testing.engines import FailingEngine, MemoryStore, ReplayingEngine, ToyEngine, toy_loss
from shmstage.trainer import device_buffers
from shmstage.trainer.gate import COMMANDS
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow

STATE = ("gate", "deferred", "staged", "last_step")


def arguments_of(rig: Rig, command: str, handle: Handle) -> dict[str, Any]:
    """What a well-formed ``command`` carries."""
    found: dict[str, dict[str, Any]] = {
        "fwd_bwd": {"handle": handle},
        "stage_fwd_bwd": {"handle": handle},
        "eval_step": {"handle": handle},
        "per_token_logps": {"handle": handle, "role": "actor"},
        "fwd_bwd_staged": {"request_id": handle.request_id},
        "patch_staged": {"request_id": handle.request_id, "fields": [], "loss_tokens": 0},
        "get_metrics": {"step": 1},
        "get_step_timing": {"step": 1},
        "save_checkpoint": {"step": 1, "metadata": {}},
        "prepare_weight_sync": {"version": 1},
        "release_weight_sync": {"version": 1},
        "compile": {"layout_id": rig.layout.layout_id},
    }
    return found.get(command, {})


def observed(rig: Rig) -> dict[str, Any]:
    info = rig.call("info")
    return {**{key: info[key] for key in STATE}, "free": rig.pool.free_slot_count(), "digest": rig.digest()}


# --- while an update is deferred --------------------------------------------------------------------------------

NEED_THE_STEP_CLOSED = (
    *("fwd_bwd", "fwd_bwd_staged", "update", "get_metrics", "save_checkpoint", "prepare_weight_sync"),
    *("per_token_logps", "eval_step"),
)


@pytest.mark.parametrize("command", NEED_THE_STEP_CLOSED)
def test_while_an_update_is_deferred_it_raises_update_deferred_error_and_changes_nothing(command: str) -> None:
    with rigged() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        following = rig.publish(2, 0)
        rig.call("stage_fwd_bwd", handle=following)
        before, tickets = observed(rig), rig.worker._snapshots._number
        with pytest.raises(UpdateDeferredError):
            rig.call(command, **arguments_of(rig, command, following))
        assert observed(rig) == before
        assert rig.worker._snapshots._number == tickets
        rig.call("apply_deferred_update")
        rig.call("fwd_bwd_staged", request_id=following.request_id)


# --- stages -----------------------------------------------------------------------------------------------------


def test_fwd_bwd_staged_with_another_id_is_refused_the_stage_kept() -> None:
    with rigged() as rig:
        staged, other = rig.publish(1, 0), rig.publish(1, 1)
        rig.call("stage_fwd_bwd", handle=staged)
        before = observed(rig)
        with pytest.raises(StageMismatchError, match="is, and stays"):
            rig.call("fwd_bwd_staged", request_id=other.request_id)
        assert observed(rig) == before
        rig.call("fwd_bwd_staged", request_id=staged.request_id)


def test_fwd_bwd_of_a_staged_handle_consumes_the_existing_stage() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.call("fwd_bwd", handle=handle)
        assert rig.call("info")["staged"] is None
        rig.token("update", "update.1")
        assert [e.kind for e in rig.tokens] == ["staged", "fwd_bwd", "update"]  # uploaded once, trained once


def test_staging_another_over_an_unused_stage_raises_stage_occupied_error() -> None:
    with rigged() as rig:
        staged, other = rig.publish(1, 0), rig.publish(1, 1)
        rig.call("stage_fwd_bwd", handle=staged)
        before = observed(rig)
        with pytest.raises(StageOccupiedError):
            rig.call("stage_fwd_bwd", handle=other)
        assert observed(rig) == before
        rig.call("fwd_bwd_staged", request_id=staged.request_id)
        rig.call("fwd_bwd", handle=other)  # its lease was not touched


# --- which commands when ----------------------------------------------------------------------------------------

ALWAYS = frozenset({"info", "compile", "ranges", "restore_checkpoint", "shutdown"})


@pytest.mark.parametrize("occasion", ["a trainer start", "a new orchestrator epoch"])
@pytest.mark.parametrize("command", sorted(COMMANDS - ALWAYS))
def test_after_it_only_info_compile_restore_checkpoint_and_shutdown_are_accepted(command: str, occasion: str) -> None:
    with rigged(opened=occasion != "a trainer start") as rig:
        if occasion != "a trainer start":
            rig.train_step(1)
            rig.new_epoch()
        handle = rig.publish(1, 0)
        before = observed(rig)
        with pytest.raises(GateClosedError):
            rig.call(command, **arguments_of(rig, command, handle))
        assert observed(rig) == before


@pytest.mark.parametrize("command", sorted(COMMANDS - {"restore_checkpoint", "shutdown"}))
def test_after_a_failed_token_only_restore_checkpoint_and_shutdown_are_accepted(command: str) -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({1}))) as rig:
        handle, following = rig.publish(1, 0), rig.publish(1, 1)
        rig.call("fwd_bwd", handle=handle)
        assert not rig.token("fwd_bwd", handle.request_id).ok
        with pytest.raises(TokenFailedError):
            rig.call(command, **arguments_of(rig, command, following))
        assert rig.call("restore_checkpoint")["step"] == 0
        rig.train_step(1)


def test_after_a_failed_token_shutdown_is_accepted() -> None:
    with rigged(lambda: FailingEngine(ToyEngine(store=MemoryStore()), frozenset({1}))) as rig:
        handle = rig.publish(1, 0)
        rig.call("fwd_bwd", handle=handle)
        assert not rig.token("fwd_bwd", handle.request_id).ok
        assert rig.call("shutdown", discard=True) == {"param_digest": ""}


# --- restore ----------------------------------------------------------------------------------------------------


def test_restore_first_joins_the_snapshot_thread_so_an_old_save_does_not_commit_after_the_choice() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store)) as rig:
        rig.train_step(1)
        store.hold.clear()
        ticket = rig.call("save_checkpoint", step=1, metadata={})
        steps = store.steps
        chosen: list[list[int]] = []
        store.steps = lambda: chosen.append(steps()) or steps()  # type: ignore[method-assign, func-returns-value]
        threading.Timer(0.05, store.hold.set).start()
        assert rig.call("restore_checkpoint")["step"] == 1
        assert chosen[0] == [0, 1]
        assert rig.ticket(ticket).ok


def test_restore_zeroes_accumulators_denominators_and_metrics() -> None:
    with rigged() as rig:
        wanted = rig.train_step(1)
        rig.call("restore_checkpoint")
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        rig.call("restore_checkpoint")
        assert rig.ticket(rig.call("get_metrics", step=0)).value == {}
        assert rig.train_step(1) == wanted  # loss, grad_norm and denominator are of its own micro-batches alone


def test_restore_zeroes_what_was_not_settled_of_an_engine_that_may_overflow() -> None:
    def overflowing(params: Any, batch: Any) -> Any:
        return *toy_loss(params, batch), jnp.bool_(True)

    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}
    engine = OptaxEngine(overflowing, params, optax.sgd(1e-2), store=MemoryStore(), replay_loss_fn=toy_loss)
    with rigged(lambda: engine) as rig:
        wanted = rig.train_step(1)
        assert wanted["denominator"] == 12.0
        rig.call("restore_checkpoint")
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        rig.call("restore_checkpoint")
        assert rig.train_step(1) == wanted


def test_restore_drops_stage_deferral_and_tickets() -> None:
    with rigged() as rig:
        free = rig.pool.free_slot_count()
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))
        rig.call("restore_checkpoint")
        info = rig.call("info")
        assert (info["staged"], info["deferred"], info["last_step"]) == (None, None, 0)
        assert rig.worker._snapshots._open == []
        assert rig.pool.free_slot_count() == free
        assert sorted(rig.worker._buffers.retired()) == [0, 1]


def test_restore_without_a_checkpoint_keeps_the_initial_state_replies_step_null_and_opens_the_gate() -> None:
    with rigged(opened=False) as rig:
        before = rig.digest()
        assert rig.call("restore_checkpoint") == {"step": None, "metadata": {}}
        assert rig.digest() == before
        assert rig.call("info")["gate"] == "open"


@pytest.mark.parametrize("command", ["fwd_bwd", "fwd_bwd_staged"])
def test_save_checkpoint_0_must_be_durable_before_the_first_forward_call(command: str) -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store), opened=False) as rig:
        rig.call("restore_checkpoint")
        handle = rig.publish(1, 0)
        if command == "fwd_bwd_staged":
            rig.call("stage_fwd_bwd", handle=handle)
        store.hold.clear()
        try:
            with pytest.raises(GateClosedError, match="send save_checkpoint"):
                rig.call(command, **arguments_of(rig, command, handle))
            ticket = rig.call("save_checkpoint", step=0, metadata={})
            with pytest.raises(GateClosedError, match="not durable yet"):
                rig.call(command, **arguments_of(rig, command, handle))
        finally:
            store.hold.set()
        assert rig.ticket(ticket).ok
        rig.call(command, **arguments_of(rig, command, handle))


def test_a_checkpoint_0_that_failed_does_not_open_the_way_to_the_first_forward_call() -> None:
    with rigged(opened=False) as rig:
        rig.call("restore_checkpoint")
        save, rig.engine._store.save = rig.engine._store.save, lambda *_: (_ for _ in ()).throw(OSError("full"))
        assert not rig.ticket(rig.call("save_checkpoint", step=0, metadata={})).ok
        handle = rig.publish(1, 0)
        with pytest.raises(GateClosedError):
            rig.call("fwd_bwd", handle=handle)
        rig.engine._store.save = save
        assert rig.ticket(rig.call("save_checkpoint", step=0, metadata={})).ok
        rig.call("fwd_bwd", handle=handle)


def test_on_restore_the_withdrawn_slots_that_the_producer_lists_have_their_leases_ended() -> None:
    with rigged() as rig:
        free = rig.pool.free_slot_count()
        lost = [rig.publish(1, index) for index in range(2)]
        pairs = [[handle.slot, handle.generation] for handle in lost]
        assert rig.pool.free_slot_count() == free - 2
        rig.call("restore_checkpoint", withdrawn=[*pairs, [0, 9998], [0, 3]])  # not published, or being written
        assert rig.pool.free_slot_count() == free


def test_on_reconnect_the_withdrawn_slots_that_the_producer_lists_have_their_leases_ended() -> None:
    with rigged() as rig:
        free = rig.pool.free_slot_count()
        kept, lost = rig.publish(1, 0), rig.publish(1, 1)
        rig.worker.attach(rig.hello(withdrawn=[[lost.slot, lost.generation]]))
        assert rig.pool.free_slot_count() == free - 1
        rig.call("fwd_bwd", handle=kept)


# --- handshake --------------------------------------------------------------------------------------------------


def spoiled(rig: Rig, how: str) -> Any:
    """A hello of the next epoch that is not as it says."""
    rig.epoch += 1
    hello = rig.hello()  # names the living pool, which is of the epoch before
    rig.epoch -= 1
    if how == "a pool of another epoch":
        return hello
    if how == "a pool that is gone":
        return replace(hello, pool=hello.pool[:-5] + "zzzzz")
    if how == "another's object":
        return replace(hello, pool="/etc/passwd")
    assert how == "a layout that is none", how
    return replace(hello, layouts=[[["x", "float32", [4], 0, 7, False]]])


BAD = ("a pool of another epoch", "a pool that is gone", "another's object", "a layout that is none")


@pytest.mark.parametrize("how", BAD)
def test_a_hello_with_a_bad_pool_or_layout_does_not_end_the_living_session(how: str) -> None:
    with rigged() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        following = rig.publish(2, 0)
        rig.call("stage_fwd_bwd", handle=following)
        before = observed(rig)
        with pytest.raises((PoolError, LayoutError)):
            rig.worker.attach(spoiled(rig, how))
        assert observed(rig) == before
        rig.call("apply_deferred_update")
        rig.call("fwd_bwd_staged", request_id=following.request_id)
        rig.new_epoch()  # a good one takes over all the same


def test_the_new_epoch_handshake_cancels_a_wait_for_a_device_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    engine = FailingEngine(ToyEngine(store=MemoryStore()), frozenset({1}))
    engine.over.clear()
    with rigged(lambda: engine, cancelled=waiting.is_set) as rig:
        monkeypatch.setattr(device_buffers, "POLL_S", 0.001)
        handles = [rig.publish(1, index) for index in range(3)]
        for handle in handles[:2]:
            rig.call("fwd_bwd", handle=handle)
        waiting.set()
        with pytest.raises(CancelledError):
            rig.call("stage_fwd_bwd", handle=handles[2])
        engine.over.set()
        rig.new_epoch()


def test_the_new_epoch_handshake_cancels_an_updates_wait_for_a_copy() -> None:
    waiting, store = threading.Event(), MemoryStore()
    with rigged(lambda: ToyEngine(store=store), cancelled=waiting.is_set) as rig:
        rig.train_step(1)
        store.hold.clear()
        try:
            for number in range(4):  # one is written, one waits for it, so the third is not copied
                rig.call("save_checkpoint", step=1, metadata={"number": number})
            rig.call("fwd_bwd", handle=rig.publish(2, 0))
            waiting.set()
            with pytest.raises(CancelledError, match="the update waits for the copy of checkpoint 1; given up"):
                rig.call("update")
            assert rig.call("info")["last_step"] == 1
        finally:
            store.hold.set()
        rig.new_epoch()
        assert rig.call("restore_checkpoint")["step"] == 1


def test_the_old_pool_is_unmapped_by_the_handshake_and_not_under_a_running_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copying = copies = 0
    copy_guarded: Callable[..., bool] = _native.copy_guarded

    def counted(destination: Any, source: Any) -> bool:
        nonlocal copying, copies
        copying, copies = copying + 1, copies + 1
        copied = copy_guarded(destination, source)
        copying -= 1
        return copied

    with rigged() as rig:
        monkeypatch.setattr(_native, "copy_guarded", counted)
        rig.call("stage_fwd_bwd", handle=rig.publish(1, 0))
        rig.call("prepare_weight_sync", version=0)  # a copy on the snapshot thread, whose pool is not the one unmapped
        old, attachment = rig.pool.name, rig.worker._stepper.current
        assert attachment is not None
        close = attachment.close
        seen: list[int] = []
        monkeypatch.setattr(type(attachment), "close", lambda self: (seen.append(copying), close())[0])
        assert copies > 0  # else another function copies, and nothing is counted here
        rig.new_epoch()
        assert seen == [0]
        rig.pools[0].close()
        assert old.strip("/") not in Path("/proc/self/maps").read_text()


# --- identity, records and the end --------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_identity_in_metrics_and_events_comes_from_the_handle_alone(staged: bool) -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0, final=True)
        if staged:
            rig.call("stage_fwd_bwd", handle=handle)
            result = rig.call("fwd_bwd_staged", request_id=handle.request_id)
        else:
            result = rig.call("fwd_bwd", handle=handle)
        forward = rig.token("fwd_bwd", handle.request_id)
        assert result["request_id"] == handle.request_id
        assert (forward.step, forward.index) == (handle.step, handle.index)
        (timed,) = rig.call("get_step_timing", step=1)["microbatches"]
        assert (timed["request_id"], timed["index"]) == (handle.request_id, handle.index)


@pytest.mark.parametrize(
    "arguments",
    [
        {"handle": [None]},
        {"handle": {"\ud800": 1}},
        {"request_id": "no.number@"},
        {"request_id": 7},
        {"step": float("nan")},
        {"version": b"\xff"},
        {"role": {1, 2}},
    ],
)
def test_a_log_line_can_never_raise(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with rigged(calls_path=tmp_path / "calls.jsonl") as rig:
        with pytest.raises(ShmstageError):
            rig.call("fwd_bwd", **arguments)
        rig.train_step(1)


def test_a_record_on_a_full_disk_does_not_stop_a_command() -> None:
    full = Path("/dev/full")
    if not full.exists():
        skip_unless_ci("this system has no /dev/full")
    with rigged(calls_path=full) as rig:
        rig.train_step(1)


def test_a_stop_while_deferred_applies_the_update_first_and_a_discarding_one_does_not() -> None:
    digests = []
    for discard in (False, True):
        with rigged() as rig:
            rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
            rig.call("stage_fwd_bwd", handle=rig.publish(2, 0))
            rig.call("shutdown", discard=discard)
            digests.append(rig.digest())
            assert rig.worker._stepper.stage is None
    assert digests[0] != digests[1]


# --- snapshots, not waits -----------------------------------------------------------------------------------------


class Declining:
    """Wraps an engine that mutates state in its forward pass: it declines snapshots."""

    snapshots = False

    def __init__(self) -> None:
        self._inner = ToyEngine(store=MemoryStore())
        self.copied: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, step: int, metadata: Any) -> Any:
        snapshot = self._inner.save(step, metadata)
        copy = snapshot.copy_to_host
        snapshot.copy_to_host = lambda: (copy(), self.copied.append(f"checkpoint {step}"))
        return snapshot


def test_an_engine_that_declines_snapshots_is_waited_for_by_every_snapshot_command() -> None:
    with rigged(Declining) as rig:
        assert rig.call("info")["snapshots"] is False
        for step in (1, 2):
            rig.call("fwd_bwd", handle=rig.publish(step, 0, final=True))
            for command in ("get_metrics", "save_checkpoint", "prepare_weight_sync"):
                of = {"version": step} if command == "prepare_weight_sync" else {"step": step}
                rig.call(command, **of, **({"metadata": {}} if command == "save_checkpoint" else {}))
                assert all(ticket.copied.is_set() for ticket in rig.worker._snapshots._open), command
        assert rig.engine.copied == ["checkpoint 0", "checkpoint 1", "checkpoint 2"]


def test_a_checkpoint_and_its_time_stamp_are_of_update_k_landed() -> None:
    wall = [1_000.0]
    engine = FailingEngine(ToyEngine(store=MemoryStore()), frozenset())
    with rigged(lambda: engine, wall_s=lambda: wall[0]) as rig:
        rig.train_step(1)
        rig.call("save_checkpoint", step=1, metadata={"cursor": 7})
        rig.train_step(2)
        ticket = rig.call("save_checkpoint", step=2, metadata={"cursor": 8})
        assert rig.ticket(ticket).ok
        update = rig.token("update", "update.2")
        metadata = engine._inner._store.kept[2][1]
        assert metadata["landed_ns"] == update.stamps["ready_ns"]
        assert metadata["cursor"] == 8
        assert metadata["landed_wall_s"] < wall[0]  # the wall clock's now, less the time since it landed
        first = engine._inner._store.kept[0][1]
        assert 0 < first["landed_ns"] <= update.stamps["dispatch_begin_ns"]


def test_a_checkpoint_is_not_stamped_before_its_update_landed() -> None:
    engine = FailingEngine(ToyEngine(store=MemoryStore()), frozenset({1}))
    engine.over.clear()
    with rigged(lambda: engine) as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True))
        metadata: dict[str, Any] = {"cursor": 1}
        ticket = rig.call("save_checkpoint", step=1, metadata=metadata)
        assert "landed_ns" not in metadata
        engine.over.set()
        assert not rig.ticket(ticket).ok
        assert "landed_ns" not in metadata
        assert 1 not in engine._inner._store.kept


def test_replaying_engines_without_tokens_of_replays_are_driven_as_before() -> None:
    with rigged(lambda: ReplayingEngine(ToyEngine(store=MemoryStore()))) as rig:
        rig.train_step(1)
        assert not [e for e in rig.tokens if e.kind == "replay"]


def test_an_upload_that_failed_is_told_by_name() -> None:
    with rigged() as rig:
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.worker._stepper.upload_failed(handle.request_id, "seeded")
        with pytest.raises(EngineError, match=f"{handle.request_id} failed: seeded"):
            rig.call("fwd_bwd_staged", request_id=handle.request_id)

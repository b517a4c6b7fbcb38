from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainer.rig import RUN, Rig, microbatch, rigged

from shmstage.errors import (
    EngineError,
    ProtocolError,
    StageMismatchError,
    StaleHandleError,
    UpdateDeferredError,
)
from shmstage.memory.handle import Handle
from shmstage.memory.reader import Lease, PoolReader
from shmstage.testing.engines import MemoryStore, ReplayingEngine, ToyEngine, toy_layout, toy_loss
from shmstage.trainer import aliasing
from shmstage.trainer.digests import payload_digest
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow

LATE = ("old_per_token_logps", "ref_per_token_logps")


def late_rig(**options: Any) -> Any:
    return rigged(layout=toy_layout(late=True), **options)


def scores(rig: Rig, handle: Handle, seed: int) -> np.ndarray[Any, Any]:
    params = {name: np.asarray(leaf) for name, leaf in rig.engine.weights().items()}
    return microbatch(rig.layout, seed)["x"] * params["w"] + params["b"]


def field_in_slot(rig: Rig, handle: Handle, name: str) -> np.ndarray[Any, Any]:
    reader = PoolReader.attach(rig.pool.name, run_id=RUN, epoch=rig.epoch)
    reader.register(rig.layout)
    lease = reader.lease(handle)
    values = np.array(lease.late_views[name])
    del lease
    reader.close()
    return values


def train_staged(rig: Rig, handle: Handle) -> float:
    rig.call("fwd_bwd_staged", request_id=handle.request_id)
    return float(rig.ticket(rig.call("get_metrics", step=handle.step)).value["loss"])


@pytest.mark.parametrize(("role", "name"), [("actor", LATE[0]), ("reference", LATE[1])])
def test_scores_of_a_staged_microbatch_land_in_its_slot(role: str, name: str) -> None:
    with late_rig() as rig:
        handle = rig.publish(1, 0, seed=3)
        rig.call("stage_fwd_bwd", handle=handle)
        event = rig.ticket(rig.call("per_token_logps", request_id=handle.request_id, role=role))
        want = scores(rig, handle, 3)
        assert event.ok
        assert event.value == {
            "request_id": handle.request_id,
            "field": name,
            "written": True,
            "version": 1,
            "digest": payload_digest({name: want}),
        }
        np.testing.assert_array_equal(field_in_slot(rig, handle, name), want)


def test_the_reference_stays_where_it_started() -> None:
    with late_rig() as rig:
        first = rig.ticket(rig.call("per_token_logps", handle=rig.publish(1, 0, seed=3), role="reference"))
        rig.call("fwd_bwd", handle=rig.publish(1, 1, final=True))
        handle = rig.publish(2, 0, seed=3)
        again = rig.ticket(rig.call("per_token_logps", handle=handle, role="reference"))
        actor = rig.ticket(rig.call("per_token_logps", handle=handle, role="actor"))
        assert again.value["digest"] == first.value["digest"] != actor.value["digest"]


def test_unstaged_scores_are_trained_with() -> None:
    with late_rig() as rig:
        handle = rig.publish(1, 0, final=True, seed=3)
        rig.ticket(rig.call("per_token_logps", handle=handle, role="actor"))
        unstaged = rig.call("fwd_bwd", handle=handle)
        unstaged_loss = rig.ticket(rig.call("get_metrics", step=1)).value["loss"]
        assert unstaged["updated"]
    with late_rig() as rig:
        handle = rig.publish(1, 0, final=True, seed=3)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.ticket(rig.call("per_token_logps", request_id=handle.request_id, role="actor"))
        rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[0]], loss_tokens=4)
        assert train_staged(rig, handle) == unstaged_loss


def test_a_staged_microbatch_is_trained_with_what_was_patched() -> None:
    losses = []
    for patched in (False, True):
        with late_rig(verify="full") as rig:
            handle = rig.publish(1, 0, seed=3)
            rig.call("stage_fwd_bwd", handle=handle)
            rig.ticket(rig.call("per_token_logps", request_id=handle.request_id, role="actor"))
            if patched:
                rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[0]], loss_tokens=4)
                assert rig.token("patched", handle.request_id).ok
            digest = rig.call("fwd_bwd_staged", request_id=handle.request_id)["payload_digest"]
            losses.append(digest)
            want = microbatch(rig.layout, 3)
            if patched:
                want[LATE[0]] = scores(rig, handle, 3)
            assert digest == payload_digest(want)
    assert losses[0] != losses[1]


def test_patching_twice_changes_nothing() -> None:
    with late_rig() as rig:
        handle = rig.publish(1, 0, final=True)
        rig.call("stage_fwd_bwd", handle=handle)
        for _ in range(2):
            rig.call("patch_staged", request_id=handle.request_id, fields=list(LATE), loss_tokens=9)
        assert rig.worker._stepper.stage is not None
        assert rig.worker._stepper.stage.handle.loss_tokens == 9
        rig.call("fwd_bwd_staged", request_id=handle.request_id)


def test_the_lease_is_kept_until_every_late_field_is_patched() -> None:
    with late_rig() as rig:
        free = rig.pool.free_slot_count()
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[0]], loss_tokens=4)
        assert rig.pool.free_slot_count() == free - 1
        rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[1]], loss_tokens=4)
        assert rig.pool.free_slot_count() == free


def test_the_lease_of_an_unpatched_stage_ends_when_it_is_trained() -> None:
    with late_rig() as rig:
        free = rig.pool.free_slot_count()
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        assert rig.pool.free_slot_count() == free - 1
        rig.call("fwd_bwd_staged", request_id=handle.request_id)
        assert rig.pool.free_slot_count() == free


def test_patched_arrays_do_not_change_when_the_slot_does() -> None:
    """S55"""
    with late_rig(verify="full") as rig:
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        rig.call("patch_staged", request_id=handle.request_id, fields=list(LATE), loss_tokens=4)
        overwrite_free_slots(rig)
        digest = rig.call("fwd_bwd_staged", request_id=handle.request_id)["payload_digest"]
        assert digest == payload_digest(microbatch(rig.layout, 100))


def overwrite_free_slots(rig: Rig) -> None:
    for slot in [rig.pool.acquire(rig.layout, timeout_s=1.0) for _ in range(rig.pool.free_slot_count())]:
        for view in slot.views.values():
            view.fill(np.nan)
        slot.abandon()


def test_only_late_fields_of_the_staged_microbatch_can_be_patched() -> None:
    with late_rig() as rig:
        handle = rig.publish(1, 0)
        with pytest.raises(StageMismatchError):
            rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[0]], loss_tokens=4)
        rig.call("stage_fwd_bwd", handle=handle)
        with pytest.raises(ProtocolError, match="'x'"):
            rig.call("patch_staged", request_id=handle.request_id, fields=["x"], loss_tokens=4)


def test_scoring_is_refused_while_an_update_is_deferred_and_patching_is_not() -> None:
    with late_rig() as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
        handle = rig.publish(2, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        with pytest.raises(UpdateDeferredError):
            rig.call("per_token_logps", request_id=handle.request_id, role="actor")
        rig.call("patch_staged", request_id=handle.request_id, fields=[LATE[1]], loss_tokens=4)


def test_evaluation_trains_nothing_and_gives_its_buffer_and_slot_back() -> None:
    with rigged() as rig:
        digest, free = rig.digest(), rig.pool.free_slot_count()
        for seed in range(5):
            event = rig.ticket(rig.call("eval_step", handle=rig.publish(1, 0, seed=seed)))
            assert event.ok
            assert event.value["denominator"] == 4.0
        assert rig.pool.free_slot_count() == free
        assert rig.digest() == digest
        rig.train_step(1)


# --- buffers and leases of what is scored by handle --------------------------------------------------------------


@pytest.mark.parametrize("role", ["actor", "reference"])
def test_scoring_by_handle_takes_no_place_of_the_double_buffer(role: str) -> None:
    """With both places taken by micro-batches that only the next forward call settles, waiting would never end."""
    with rigged(lambda: ReplayingEngine(ToyEngine(store=MemoryStore())), layout=toy_layout(late=True)) as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        following = rig.publish(1, 1, final=True)
        rig.call("stage_fwd_bwd", handle=following)
        assert rig.worker._buffers.retired() == []
        scored = rig.publish(2, 0)
        assert rig.ticket(rig.call("per_token_logps", handle=scored, role=role)).ok
        assert rig.ticket(rig.call("eval_step", handle=rig.publish(2, 1))).ok
        rig.call("fwd_bwd_staged", request_id=following.request_id)
        rig.call("fwd_bwd", handle=scored)


def test_scoring_again_waits_for_the_score_before_and_not_for_ever() -> None:
    with late_rig(slots=6) as rig:
        tickets = [rig.call("per_token_logps", handle=rig.publish(1, n), role="actor") for n in range(5)]
        assert all(rig.ticket(ticket).ok for ticket in tickets)


@pytest.mark.parametrize("late", [True, False])
def test_a_training_slot_that_was_scored_keeps_its_lease(late: bool) -> None:
    with rigged(layout=toy_layout(late=late)) as rig:
        free = rig.pool.free_slot_count()
        handle = rig.publish(1, 0)
        event = rig.ticket(rig.call("per_token_logps", handle=handle, role="reference"))
        assert (event.ok, event.value["written"], event.value["version"]) == (True, late, int(late))
        assert rig.pool.free_slot_count() == free - 1
        rig.call("fwd_bwd", handle=handle)
        assert rig.pool.free_slot_count() == free


@pytest.mark.parametrize("command", ["per_token_logps", "eval_step"])
def test_the_lease_of_an_aux_slot_ends_with_its_upload(command: str) -> None:
    with late_rig(aux_slots=1) as rig:
        arguments = {"role": "actor"} if command == "per_token_logps" else {}
        for seed in range(3):  # there is one aux slot: each needs the lease before it ended
            event = rig.ticket(rig.call(command, handle=rig.publish(1, 0, seed=seed, aux=True), **arguments))
            assert event.ok
        if command == "per_token_logps":
            assert event.value["written"] is False


def test_late_fields_are_versioned_by_how_often_they_were_scored() -> None:
    with late_rig() as rig:
        handle = rig.publish(1, 0, seed=3)
        versions = []
        for role in ("actor", "reference", "actor"):
            event = rig.ticket(rig.call("per_token_logps", handle=handle, role=role))
            versions.append((event.value["field"], event.value["version"]))
        assert versions == [(LATE[0], 1), (LATE[1], 1), (LATE[0], 2)]
        assert event.value["digest"] == payload_digest({LATE[0]: field_in_slot(rig, handle, LATE[0])})


@pytest.mark.parametrize("command", ["per_token_logps", "eval_step"])
def test_scores_read_from_a_slot_that_moved_on_are_told_as_failed(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with rigged(payload_shift=4) as rig:
        monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
        handle = rig.publish(1, 0)
        checks = itertools.count(1)

        def check(lease: Lease) -> None:
            if next(checks) == 2:  # the first is before the upload
                raise StaleHandleError("the slot has moved on")

        monkeypatch.setattr(Lease, "check", check)
        arguments = {"role": "actor"} if command == "per_token_logps" else {}
        event = rig.ticket(rig.call(command, handle=handle, **arguments))
        assert not event.ok
        assert "the slot has moved on" in event.error


def test_an_engine_that_cannot_score_or_evaluate_says_so() -> None:
    class TrainsOnly:
        def __init__(self) -> None:
            inner = ToyEngine(store=MemoryStore())
            for name in ("shardings", "fwd_bwd", "update", "metrics", "save", "restore", "weights"):
                setattr(self, name, getattr(inner, name))

        def per_token_logps(self, batch: Any, role: str) -> Any:
            raise NotImplementedError("no reference model")

    with rigged(TrainsOnly) as rig:
        handle = rig.publish(1, 0)
        with pytest.raises(EngineError, match="TrainsOnly does not do it: no reference model"):
            rig.call("per_token_logps", handle=handle, role="actor")
        with pytest.raises(EngineError, match="TrainsOnly has no such method; give it one or leave eval_every off"):
            rig.call("eval_step", handle=rig.publish(1, 1))
        rig.train_step(1)


def test_an_optax_engine_without_logps_fn_says_which_settings_need_it() -> None:
    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}
    with rigged(lambda: OptaxEngine(toy_loss, params, optax.sgd(0.5), store=MemoryStore())) as rig:
        assert rig.call("info")["optional"] == ["decodes_routing", "eval_step"]
        wanted = "OptaxEngine has no such method; .*leave recompute_old_logps and reference_logps off"
        with pytest.raises(EngineError, match=wanted):
            rig.call("per_token_logps", handle=rig.publish(1, 0), role="reference")


def test_scores_and_evaluations_do_not_wait_for_the_disk() -> None:
    store = MemoryStore()
    with rigged(lambda: ToyEngine(store=store), layout=toy_layout(late=True)) as rig:
        handle = rig.publish(1, 0)
        rig.call("stage_fwd_bwd", handle=handle)
        store.hold.clear()
        try:
            for number in range(3):  # one is written, one waits for it, so the third is not handed over
                rig.call("save_checkpoint", step=0, metadata={"number": number})
            assert rig.ticket(rig.call("per_token_logps", request_id=handle.request_id, role="actor")).ok
            assert rig.ticket(rig.call("per_token_logps", handle=rig.publish(1, 1), role="actor")).ok
            assert rig.ticket(rig.call("eval_step", handle=rig.publish(1, 2))).ok
        finally:
            store.hold.set()


def test_sent_whole_after_a_stage_whose_answer_was_lost_a_microbatch_is_trained_with_the_scores_of_its_slot() -> None:
    with late_rig(verify="full") as rig:
        handle = rig.publish(1, 0, seed=3)
        rig.call("stage_fwd_bwd", handle=handle)
        want = microbatch(rig.layout, 3)
        want[LATE[0]] = scores(rig, handle, 3)
        # the orchestrator does not know of the stage: it scores the slot and sends the micro-batch whole
        rig.ticket(rig.call("per_token_logps", handle=handle, role="actor"))
        result = rig.call("fwd_bwd", handle=handle)
        assert result["payload_digest"] == payload_digest(want)
        assert rig.call("info")["staged"] is None
        assert rig.pool.free_slot_count() == rig.pool.slots, "its lease has ended"

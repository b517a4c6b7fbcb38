"""Overflow replay: first attempts that overflowed count for nothing, their replays once, in one order for all modes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trainer.packed_by_seed import packed_layout, packed_microbatch
from trainer.rig import Rig, rigged
from trainer.test_poison import poison

from shmstage.errors import EngineError, SettingsError, TokenFailedError
from shmstage.testing.engines import MemoryStore, toy_loss
from shmstage.testing.engines_moe import CAPACITY, MoeEngine, MoeSettings, make_moe_engine, token_logps
from shmstage.testing.engines_placing import place_private_copies
from shmstage.testing.reference_loop import reference_loop
from shmstage.trainer.digests import param_digest
from shmstage.trainer.host_copy import host_copy
from shmstage.trainer.optax_engine import OptaxEngine

pytestmark = pytest.mark.slow

LAYOUT = packed_layout()
STEPS, MICROBATCHES = 3, 3
CHOICES = {"first": "0", "middle": "1", "last": "2", "first and last": "0,2", "every": "all", "none": "none"}


def engine_of(overflow: str, optimizer: str = "adamw") -> MoeEngine:
    return MoeEngine(MoeSettings(overflow=overflow, optimizer=optimizer), store=MemoryStore())


def moe_rig(overflow: str, **options: Any) -> Any:
    return rigged(lambda: engine_of(overflow), layout=LAYOUT, content=packed_microbatch, **options)


def arrays_of(step: int, index: int) -> dict[str, np.ndarray[Any, Any]]:
    return packed_microbatch(LAYOUT, step * 100 + index)


def by_the_reference_loop(overflow: str) -> tuple[list[dict[str, float]], str]:
    engine = engine_of(overflow)
    shardings = engine.shardings(LAYOUT)
    seen: list[dict[str, float]] = []
    steps = [(k, [arrays_of(k, i) for i in range(MICROBATCHES)]) for k in range(1, STEPS + 1)]
    reference_loop(
        engine,
        steps,
        lambda arrays: place_private_copies(arrays, shardings),
        lambda number, metrics: seen.append({name: float(host_copy(value)) for name, value in metrics.items()}),
    )
    return seen, param_digest(engine)


def serial(rig: Rig) -> list[Any]:
    return [rig.train_step(step, MICROBATCHES) for step in range(1, STEPS + 1)]


def staged(rig: Rig, *, defer: bool) -> list[Any]:
    """Every released slot and retired buffer is overwritten after each stage."""
    tickets = []
    following = rig.publish(1, 0)
    rig.call("fwd_bwd", handle=following)
    for step in range(1, STEPS + 1):
        for index in range(1, MICROBATCHES):
            final = index == MICROBATCHES - 1
            handle = rig.publish(step, index, final=final)
            rig.call("stage_fwd_bwd", handle=handle)
            poison(rig)
            rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=defer and final)
        if step < STEPS:
            following = rig.publish(step + 1, 0)
            rig.call("stage_fwd_bwd", handle=following)
            poison(rig)
        if defer:
            rig.call("apply_deferred_update")
        tickets.append(rig.call("get_metrics", step=step))
        if step < STEPS:
            rig.call("fwd_bwd_staged", request_id=following.request_id)
    return [rig.ticket(ticket).value for ticket in tickets]


# --- equal in every order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", CHOICES.values(), ids=CHOICES)
def test_replays_give_the_bits_of_the_reference_loop_in_every_order(overflow: str) -> None:
    wanted = by_the_reference_loop(overflow)
    for device_buffers in (2, 3):
        orders: dict[str, Callable[[Rig], list[Any]]] = {
            "serial": serial,
            "after_update": lambda rig: staged(rig, defer=False),
            "before_update": lambda rig: staged(rig, defer=True),
        }
        for name, order in orders.items():
            with moe_rig(overflow, device_buffers=device_buffers) as rig:
                assert (order(rig), rig.digest()) == wanted, (name, device_buffers)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replays_of_short_steps_give_the_bits_of_the_serial_order(microbatches: int) -> None:
    found = []
    for defer in (False, True):
        with moe_rig("all") as rig:
            handle, staged_now = rig.publish(1, 0, final=microbatches == 1), False
            for step in (1, 2, 3):
                for index in range(microbatches):
                    final = index == microbatches - 1
                    if index:
                        handle, staged_now = rig.publish(step, index, final=final), False
                    deferred = defer and final
                    if staged_now:
                        rig.call("fwd_bwd_staged", request_id=handle.request_id, defer_update=deferred)
                    else:
                        rig.call("fwd_bwd", handle=handle, defer_update=deferred)
                handle = rig.publish(step + 1, 0, final=microbatches == 1)
                if defer:
                    rig.call("stage_fwd_bwd", handle=handle)
                    rig.call("apply_deferred_update")
                    staged_now = True
            found.append(rig.digest())
    assert found[0] == found[1]


@pytest.mark.parametrize("overflow", ["0", "1", "2", "all"])
def test_replayed_gradients_are_those_of_a_dropless_run(overflow: str) -> None:
    changes = []
    for choice in (overflow, "none"):
        engine = engine_of(choice, "sgd")
        before = {name: np.array(leaf) for name, leaf in engine.weights().items()}
        metrics = trained_step(engine)
        changes.append({name: np.asarray(leaf) - before[name] for name, leaf in engine.weights().items()})
        assert metrics["denominator"] == sum(counted(arrays_of(1, i)) for i in range(MICROBATCHES))
    for name, change in changes[1].items():
        np.testing.assert_allclose(changes[0][name], change, rtol=1e-5, atol=1e-8)


def trained_step(engine: Any) -> dict[str, float]:
    shardings = engine.shardings(LAYOUT)
    for index in range(MICROBATCHES):
        engine.fwd_bwd(place_private_copies(arrays_of(1, index), shardings))
    engine.update()
    return {name: float(host_copy(value)) for name, value in engine.metrics().items()}


def counted(arrays: dict[str, np.ndarray[Any, Any]]) -> float:
    predicted = np.zeros_like(arrays["segment_ids"], bool)
    predicted[:, 1:] = (arrays["segment_ids"][:, 1:] == arrays["segment_ids"][:, :-1]) & (
        arrays["segment_ids"][:, 1:] != 0
    )
    return float(np.sum(arrays["completion_mask"] * predicted))


def test_tokens_over_capacity_are_really_dropped() -> None:
    """Else every comparison here compares a run with itself."""
    engine = engine_of("none")
    batch = {name: jnp.array(values) for name, values in arrays_of(1, 0).items()}
    whole, fits = token_logps(engine.inner._params, batch, 10_000)
    less, overflow = token_logps(engine.inner._params, batch, 1)
    assert (bool(fits), bool(overflow)) == (False, True)
    assert not np.array_equal(whole, less)


def test_capacity_alone_decides_who_overflows() -> None:
    found = set()
    for factor in (0.1, 100.0):
        engine = make_moe_engine({"capacity_factor": factor, "checkpoint_dir": None})
        shardings = engine.shardings(LAYOUT)
        engine.fwd_bwd(place_private_copies(arrays_of(1, 0), shardings))
        found.add((factor, len(engine.settle(1))))
    assert found == {(0.1, 1), (100.0, 0)}


def test_a_staged_microbatch_is_trained_once_and_unchanged_when_the_one_before_is_replayed() -> None:
    digests = []
    for overflow in ("all", "none"):
        with moe_rig(overflow, verify="full") as rig:
            rig.call("fwd_bwd", handle=rig.publish(1, 0, final=True), defer_update=True)
            following = rig.publish(2, 0, final=True)
            rig.call("stage_fwd_bwd", handle=following)
            rig.call("apply_deferred_update")  # the replay of 1.0 goes out here, past the staged arrays
            poison(rig)
            digests.append(rig.call("fwd_bwd_staged", request_id=following.request_id)["payload_digest"])
            metrics = rig.ticket(rig.call("get_metrics", step=2)).value
            assert metrics["denominator"] == counted(arrays_of(2, 0))
            events = [e.kind for e in rig.tokens if e.request_id == following.request_id]
            assert events.count("fwd_bwd") <= 1
    assert digests[0] == digests[1]


# --- buffers and tokens -----------------------------------------------------------------------------------------


def test_a_replay_is_told_by_an_event_of_its_own_before_the_update_lands() -> None:
    with moe_rig("0") as rig:
        handles = [rig.publish(1, index, final=index == 1) for index in range(2)]
        for handle in handles:
            rig.call("fwd_bwd", handle=handle)
        rig.token("update", "update.1")
        told = [(e.kind, e.request_id) for e in rig.tokens if e.kind != "staged"]
        assert sorted(told[:-1]) == sorted(
            [("fwd_bwd", handles[0].request_id), ("fwd_bwd", handles[1].request_id), ("replay", handles[0].request_id)]
        )
        assert told[-1] == ("update", "update.1")
        replay = rig.token("replay", handles[0].request_id)
        assert (replay.step, replay.index, replay.ok) == (1, 0, True)
        first = rig.token("fwd_bwd", handles[0].request_id)
        assert replay.stamps["ready_ns"] >= first.stamps["ready_ns"]
        overflowed, fitted = rig.call("get_step_timing", step=1)["microbatches"]
        assert overflowed["replay"]["ready_ago_s"] == overflowed["ready_ago_s"] > 0
        assert fitted["replay"] is None


class Held:
    """Wraps an engine that may overflow; the replays' tokens resolve, or fail, when ``over`` is called."""

    def __init__(self, inner: MoeEngine, error: str = "") -> None:
        self.over = threading.Event()
        self._inner = inner
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle(self, upto: int) -> dict[int, Any]:
        return {number: _HeldToken(token, self) for number, token in self._inner.settle(upto).items()}


class _HeldToken:
    def __init__(self, token: jax.Array, holder: Held) -> None:
        self._token, self._holder = token, holder

    def block_until_ready(self) -> None:
        self._holder.over.wait()
        self._token.block_until_ready()
        if self._holder._error:
            raise RuntimeError(self._holder._error)


@pytest.fixture
def held_rig() -> Iterator[Rig]:
    with rigged(lambda: Held(engine_of("0")), layout=LAYOUT, content=packed_microbatch, device_buffers=3) as rig:
        yield rig
        rig.engine.over.set()


def test_a_device_buffer_is_retired_only_after_its_replays_token_resolved(held_rig: Rig) -> None:
    rig = held_rig
    first = rig.publish(1, 0)
    rig.call("fwd_bwd", handle=first)
    rig.call("fwd_bwd", handle=rig.publish(1, 1))  # settles and replays 1.0
    rig.token("fwd_bwd", first.request_id)
    buffers = rig.worker._buffers
    gc.collect()
    assert buffers._buffers[0].settled
    assert 0 not in buffers.retired()
    rig.engine.over.set()
    rig.token("replay", first.request_id)
    while 0 not in buffers.retired():  # JAX drops what the replay read a little later
        gc.collect()


def test_a_failed_replay_fails_its_step() -> None:
    held = Held(engine_of("0"), "seeded replay failure")
    with rigged(lambda: held, layout=LAYOUT, content=packed_microbatch) as rig:
        first = rig.publish(1, 0)
        rig.call("fwd_bwd", handle=first)
        rig.call("fwd_bwd", handle=rig.publish(1, 1, final=True))
        tickets = [rig.call("get_metrics", step=1), rig.call("save_checkpoint", step=1, metadata={})]
        held.over.set()
        assert not rig.token("replay", first.request_id).ok
        update = rig.token("update", "update.1")
        assert not update.ok
        for ticket in tickets:
            event = rig.ticket(ticket)
            assert not event.ok
            assert f"replay of {first.request_id}: RuntimeError: seeded replay failure" in event.error
        with pytest.raises(TokenFailedError, match="replay of"):
            rig.call("info")
        assert rig.call("restore_checkpoint")["step"] == 0


def test_after_settling_nothing_holds_the_arrays_any_more() -> None:
    engine = engine_of("all")
    shardings = engine.shardings(LAYOUT)
    batches = [place_private_copies(arrays_of(1, index), shardings) for index in range(2)]
    alive = [weakref.ref(batch["advantages"]) for batch in batches]
    tokens = [engine.fwd_bwd(batch) for batch in batches]
    batches.clear()
    assert all(ref() is not None for ref in alive)  # a replay may still need them
    tokens += engine.settle(1).values()
    assert [ref() is None for ref in alive] == [True, False]
    tokens += engine.settle(2).values()
    assert [ref() is None for ref in alive] == [True, True]
    assert len(tokens) == 4


def test_settling_twice_replays_once() -> None:
    engine = engine_of("all")
    shardings = engine.shardings(LAYOUT)
    engine.fwd_bwd(place_private_copies(arrays_of(1, 0), shardings))
    assert list(engine.settle(1)) == [1]
    assert engine.settle(1) == {}
    engine.update()
    assert float(engine.metrics()["denominator"]) == counted(arrays_of(1, 0))


def test_settle_is_there_only_for_a_loss_that_may_overflow() -> None:
    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}
    assert not hasattr(OptaxEngine(toy_loss, params, optax.sgd(0.5)), "settle")
    assert hasattr(engine_of("none"), "settle")


def test_a_restore_forgets_what_was_not_settled() -> None:
    with moe_rig("all") as rig:
        wanted = rig.train_step(1)
        rig.call("restore_checkpoint")
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        rig.call("fwd_bwd", handle=rig.publish(1, 1))
        rig.call("restore_checkpoint")
        assert rig.train_step(1) == wanted


def test_a_replay_of_an_unknown_microbatch_closes_the_gate() -> None:
    class Confused(Held):
        def settle(self, upto: int) -> dict[int, Any]:
            return {upto + 7: jnp.zeros(())}

    with rigged(lambda: Confused(engine_of("0")), layout=LAYOUT, content=packed_microbatch) as rig:
        rig.call("fwd_bwd", handle=rig.publish(1, 0))
        with pytest.raises(EngineError, match=r"replayed fwd_bwd 8 of this step; unsettled were \[1, 2\]"):
            rig.call("fwd_bwd", handle=rig.publish(1, 1))
        with pytest.raises(TokenFailedError):
            rig.call("update")
        rig.engine.over.set()


# --- what is refused --------------------------------------------------------------------------------------------


def losses(*, first: Any, replay: Any) -> OptaxEngine:
    return OptaxEngine(first, {"w": jnp.ones(3)}, optax.sgd(0.5), replay_loss_fn=replay)


def good(params: Any, batch: Any) -> Any:
    return jnp.sum(params["w"] * batch["x"]), jnp.float32(3), {"m": jnp.float32(1)}


def test_losses_that_do_not_fit_each_other_are_refused() -> None:
    batch = {"x": jnp.ones(3)}
    with pytest.raises(EngineError, match=r"returned 3 values; want \(loss_sum, denominator, metrics, overflow\)"):
        losses(first=good, replay=good).fwd_bwd(batch)
    with pytest.raises(EngineError, match=r"returned overflow float32\[\]; want bool\[\]"):
        losses(first=lambda p, b: (*good(p, b), jnp.float32(0)), replay=good).fwd_bwd(batch)
    with pytest.raises(EngineError, match=r"replay_loss_fn returned the metrics \[\]; loss_fn returns \['m'\]"):
        losses(first=lambda p, b: (*good(p, b), jnp.bool_(0)), replay=lambda p, b: (*good(p, b)[:2], {})).fwd_bwd(batch)


def test_what_dropped_tokens_made_infinite_does_not_reach_the_sums() -> None:
    def overflowing(params: Any, batch: Any) -> Any:
        loss = jnp.sum(params["w"] * batch["x"]) / 0.0
        return loss, jnp.float32(3), {"m": loss}, jnp.bool_(1)

    engine = losses(first=overflowing, replay=good)
    engine.fwd_bwd({"x": jnp.ones(3)})
    engine.update()
    assert {name: float(value) for name, value in engine.metrics().items()}["loss"] == 1.0
    np.testing.assert_allclose(engine.weights()["w"], 1 - 0.5 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"overflow": "first"}, {"overflow": "0;1"}, {"capacity": 2}, {"capacity_factor": 0}, {"optimizer": "x"}],
)
def test_wrong_moe_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        make_moe_engine(settings)


def test_compiling_first_leaves_nothing_to_compile_for_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowing(params: Any, batch: Any) -> Any:
        return *good(params, batch), jnp.bool_(1)

    engine = losses(first=overflowing, replay=lambda params, batch: good(params, batch))
    batch = {"x": jax.device_put(np.ones(3, np.float32), jax.devices()[0])}
    engine.compile({"x": jax.ShapeDtypeStruct((3,), np.float32, sharding=batch["x"].sharding)})
    with jax.log_compiles():
        compiled: list[str] = []
        monkeypatch.setattr(
            "jax._src.interpreters.pxla.logger.log", lambda level, text, *a, **k: compiled.append(text % a)
        )
        engine.fwd_bwd(batch)
        assert list(engine.settle(1)) == [1]
        engine.update()
    assert not [line for line in compiled if "forward" in line or "update" in line]


def test_compiling_the_moe_engine_first_compiles_what_is_run() -> None:
    engine = MoeEngine(MoeSettings(overflow="all"))
    shardings = engine.shardings(LAYOUT)
    engine.compile(
        {f.name: jax.ShapeDtypeStruct(f.shape, np.dtype(f.dtype), sharding=shardings[f.name]) for f in LAYOUT.fields}
    )
    batch = {name: jax.device_put(value, shardings[name]) for name, value in arrays_of(1, 0).items()}
    engine.fwd_bwd(batch)
    held = engine.inner._replays._open[0].batch[CAPACITY]
    assert (held.shape, held.dtype, held.sharding) == ((), jnp.int32, batch["segment_ids"].sharding)


def test_a_replay_that_fails_fails_the_update_of_a_small_model_too() -> None:
    params = {"b": jnp.zeros(()), "w": jnp.ones(32)}

    def overflowing(params: Any, batch: Any) -> Any:
        return (*toy_loss(params, batch), jnp.bool_(True))

    def held() -> Any:
        store = MemoryStore()
        return Held(OptaxEngine(overflowing, params, optax.sgd(0.5), store=store, replay_loss_fn=toy_loss), "seeded")

    with rigged(held) as rig:
        rig.engine.over.set()
        handle = rig.publish(1, 0, final=True)
        rig.call("fwd_bwd", handle=handle)
        assert rig.token("fwd_bwd", handle.request_id).ok
        assert not rig.token("update", "update.1").ok
        assert not rig.token("replay", handle.request_id).ok

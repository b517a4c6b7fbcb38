"""All leaves of a micro-batch go to the devices in one call: eight leaves then cost about twice one leaf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from trainer.rig import Rig, rigged
from trainer.test_device_buffers import Lease
from trainer.test_double_buffer import Published

from shmstage.memory.handle import Handle
from shmstage.testing.engines import MemoryStore, ToyEngine, toy_layout
from shmstage.trainer import aliasing
from shmstage.trainer.device_buffers import DeviceBuffers
from shmstage.trainer.double_buffer import DoubleBuffer
from shmstage.trainer.tokens import TokenWatcher

pytestmark = pytest.mark.slow

LATE = ["old_per_token_logps", "ref_per_token_logps"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many leaves each ``device_put`` since then had."""
    leaves: list[int] = []
    device_put = jax.device_put

    def counting(x: Any, *placed: Any, **options: Any) -> Any:
        leaves.append(len(jax.tree.leaves(x)))
        return device_put(x, *placed, **options)

    monkeypatch.setattr(jax, "device_put", counting)
    return leaves


class Evaluating:
    """A toy engine with ``eval_step``."""

    def __init__(self) -> None:
        self._inner = ToyEngine(store=MemoryStore())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def eval_step(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"sum": batch["x"].sum()}


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged(Evaluating, layout=toy_layout(late=True), aux_slots=1) as rig:
        rig.train_step(1)
        yield rig


def fields_of(rig: Rig) -> int:
    return len(rig.layout.fields)


def test_a_microbatch_is_uploaded_for_training_in_one_call(rig: Rig, calls: list[int]) -> None:
    rig.call("fwd_bwd", handle=rig.publish(2, 0))
    assert calls == [fields_of(rig)]


def test_a_microbatch_is_staged_in_one_call_and_trained_without_another(rig: Rig, calls: list[int]) -> None:
    handle = rig.publish(2, 0)
    rig.call("stage_fwd_bwd", handle=handle)
    rig.call("fwd_bwd_staged", request_id=handle.request_id)
    assert calls == [fields_of(rig)]


def test_late_fields_are_patched_in_one_call(rig: Rig, calls: list[int]) -> None:
    handle = rig.publish(2, 0)
    rig.call("stage_fwd_bwd", handle=handle)
    calls.clear()
    rig.call("patch_staged", request_id=handle.request_id, fields=LATE, loss_tokens=7)
    assert calls == [2]


def test_a_microbatch_is_scored_in_one_call(rig: Rig, calls: list[int]) -> None:
    rig.ticket(rig.call("per_token_logps", handle=rig.publish(2, 0), role="reference"))
    assert calls == [fields_of(rig)]


def test_a_microbatch_is_evaluated_in_one_call(rig: Rig, calls: list[int]) -> None:
    handle: Handle = rig.publish(1, 0, aux=True)
    rig.ticket(rig.call("eval_step", handle=handle))
    assert calls == [fields_of(rig)]


def test_the_double_buffer_uploads_in_one_call(calls: list[int]) -> None:
    source = Published(2)
    with DoubleBuffer(source) as batches:
        assert len(next(batches)) == 2
        assert calls == [2, 2]  # this one, and the next one ahead


def test_a_slot_is_uploaded_in_one_call_where_devices_read_it_themselves(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    watcher = TokenWatcher("test")
    shardings = dict.fromkeys(("x", "late"), SingleDeviceSharding(jax.local_devices()[0]))
    # four bytes off a boundary: the CPU backend then copies, as a device does
    batch = DeviceBuffers(2, watcher.watch).upload(Lease(1, offset=4), shardings)  # type: ignore[arg-type]
    watcher.close()
    assert calls == [2] and float(batch.take()["x"].sum()) == 64

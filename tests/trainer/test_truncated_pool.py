"""A pool's file that is cut short under the trainer, and slots whose upload failed: errors, and nobody waits."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from trainer.rig import Rig, rigged, toy_engine

from shmstage.errors import LayoutError, PoolError, WaitTimeoutError
from shmstage.memory import mapping
from shmstage.memory.names import SHM_DIR
from shmstage.memory.reader import Lease
from shmstage.testing.engines import toy_layout
from shmstage.trainer.device_buffers import DeviceBuffers
from shmstage.trainer.double_buffer import DoubleBuffer
from shmstage.transport.consumer import Consumer
from shmstage.transport.producer import Producer

pytestmark = pytest.mark.slow


@pytest.fixture
def rig() -> Iterator[Rig]:
    with rigged(toy_engine, layout=toy_layout()) as rig:
        yield rig


def cut_after(lease_check: Any, path: str) -> Any:
    """A ``Lease.check`` that cuts the file once it has found everything in order."""

    def check(self: Lease) -> None:
        lease_check(self)
        os.truncate(path, 4096)

    return check


def test_a_pool_that_is_cut_while_the_trainer_copies_fails_the_command_and_not_the_process(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S31: the size was looked at before the copy began; what would be SIGBUS names the pool and what is left of it."""
    handle = rig.publish(1, 0, final=True)
    monkeypatch.setattr(Lease, "check", cut_after(Lease.check, SHM_DIR + rig.pool.name))
    with pytest.raises(PoolError, match=rf"pool {rig.pool.name} was shrunk to 4096 bytes under its users"):
        rig.call("fwd_bwd", handle=handle)
    monkeypatch.undo()
    assert rig.call("info")["last_step"] == 0  # the process is there and answers
    for command in ("fwd_bwd", "stage_fwd_bwd"):
        with pytest.raises(PoolError, match="shrunk to 4096 bytes"):
            rig.call(command, handle=handle)
    rig.new_epoch()  # what follows is another pool
    rig.open()
    rig.train_step(1)


class Failing:
    """Shardings that no upload gets past."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        raise self.error


def test_the_slot_of_an_upload_that_failed_is_given_back_to_its_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """S58: one that only found no place is kept, and uploaded by the next call."""
    with Producer("stream", {"x": ("float32", (2, 8))}, slots=1) as producer, Consumer("stream") as consumer:

        def put(value: float) -> None:
            with producer.acquire(20.0) as slot:
                slot.views["x"][...] = value
                slot.publish()

        batches = DoubleBuffer(consumer)
        put(1.0)
        with monkeypatch.context() as failing:
            failing.setattr(DeviceBuffers, "upload", Failing(LayoutError("not to be placed")))
            with pytest.raises(LayoutError):
                next(batches)
        put(2.0)  # the only slot is free again
        with monkeypatch.context() as failing:
            failing.setattr(DeviceBuffers, "upload", Failing(WaitTimeoutError("no place")))
            with pytest.raises(WaitTimeoutError):
                next(batches)
        with pytest.raises(WaitTimeoutError):
            producer.acquire(0.0)
        assert np.array_equal(jax.device_get(next(batches)["x"]), np.full((2, 8), 2.0, np.float32))
        batches.close()
        producer.acquire(20.0).abandon()
        producer._ended = True  # the consumer leaves in good order


def test_the_aux_slot_of_an_evaluation_that_could_not_be_uploaded_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rigged(toy_engine, layout=toy_layout(), aux_slots=1) as rig:
        handle = rig.publish(1, 0, aux=True)
        with monkeypatch.context() as failing:
            failing.setattr(DeviceBuffers, "upload", Failing(WaitTimeoutError("no place")))
            with pytest.raises(WaitTimeoutError):
                rig.call("eval_step", handle=handle)
        rig.pool.acquire(rig.layout, timeout_s=0.0, aux=True).abandon()


def test_a_pool_that_cannot_be_mapped_whole_is_refused_to_its_orchestrator_and_the_old_one_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S36: the hello is answered with the error, nothing of the new pool stays mapped, and nothing has changed."""
    rig.train_step(1)
    old = rig.pool
    real = mapping.mmap.mmap
    calls = 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 + owner_maps:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*arguments, **more)

    def mapped(name: str) -> int:
        with open("/proc/self/maps") as maps:
            return sum(name in line for line in maps)

    owner_maps = 1  # the rig makes the pool in this process, too
    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as limited:
        limited.setattr(mapping.mmap, "mmap", failing)
        with pytest.raises(PoolError) as caught:
            rig.new_epoch()
    # while the error is at hand, whose frames hold on to all that was made
    assert "of a pool: Cannot allocate memory; " in str(caught.value) and "ulimit -v" in str(caught.value)
    assert mapped(rig.pool.name) == owner_maps
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1  # the owner's
    rig.pools.pop().close()
    rig.epoch -= 1
    assert rig.pool is old
    rig.train_step(2)

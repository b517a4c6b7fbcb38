"""The producer's part in late fields, in a real pool with a real reader on the other side."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))

from shmstage.errors import StaleHandleError
from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.orchestrator.importance import sampler_is_weights
from shmstage.orchestrator.late_fields import LateFields
from shmstage.packing.fields import OLD_LOGPS, RECOMPUTED, SAMPLER_IS_WEIGHTS, microbatch_layout

LAYOUT = microbatch_layout(2, 8, late=RECOMPUTED)


@pytest.fixture
def pool() -> Iterator[Pool]:
    identity = ProcessIdentity.create("late", "test")
    pool = Pool.create("late", epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    yield pool
    pool.close()
    identity.close()


@pytest.fixture
def reader(pool: Pool) -> Iterator[PoolReader]:
    reader = PoolReader.attach(pool.name, run_id="late", epoch=1, writes_late=True)
    reader.register(LAYOUT)
    yield reader
    reader.close()


def published(pool: Pool) -> Handle:
    with pool.acquire(LAYOUT, timeout_s=5) as slot:
        for view in slot.views.values():
            view.fill(0)
        slot.views[OLD_LOGPS][:] = -2.0
        slot.views["completion_mask"][:, 1:5] = 1.0
        return slot.publish(step=1, loss_tokens=8)


def test_the_producer_writes_the_samplers_weights_from_its_own_and_the_trainers_log_probs(
    pool: Pool, reader: PoolReader
) -> None:
    handle = published(pool)
    late = LateFields(pool, sampler_is_cap=2.0)
    late.before_scoring(handle)
    with reader.lease(handle) as lease:
        lease.late_views[OLD_LOGPS][:] = np.where(np.arange(8) % 2, -2.5, -1.0)  # what the trainer writes
        lease.commit_late(OLD_LOGPS)
        patch = late.after_scoring(handle)
        assert patch.fields == (OLD_LOGPS, "completion_mask", SAMPLER_IS_WEIGHTS)
        assert patch.loss_tokens == 8
        row = lease.late_views[SAMPLER_IS_WEIGHTS][0]
        np.testing.assert_allclose(row, [0, np.exp(-0.5), 2.0, np.exp(-0.5), 2.0, 0, 0, 0], rtol=1e-6)
        assert lease.late_version(SAMPLER_IS_WEIGHTS) == 1
        assert lease.late_version("completion_mask") == 0
        lease.check()  # late fields lie outside the generation


def test_late_fields_of_a_slot_that_has_moved_on_are_refused(pool: Pool, reader: PoolReader) -> None:
    handle = published(pool)
    late = LateFields(pool, sampler_is_cap=2.0)
    late.before_scoring(handle)
    reader.lease(handle).end()
    for _ in range(2):
        with pool.acquire(LAYOUT, timeout_s=5) as slot:
            newer = slot.publish(step=2)
            reader.end_lease(newer.slot, newer.generation)
    with pytest.raises(StaleHandleError, match="has moved on"):
        late.after_scoring(handle)
    with pytest.raises(StaleHandleError, match="has moved on"):
        pool.commit_late(handle, SAMPLER_IS_WEIGHTS)


def test_importance_weights_are_capped_masked_and_finite() -> None:
    sampled = np.array([[0.0, -100.0, 0.0, np.nan]], np.float32)
    recomputed = np.array([[-1.0, 0.0, -100.0, 0.0]], np.float32)
    mask = np.array([[1.0, 1.0, 1.0, 0.0]], np.float32)
    weights = sampler_is_weights(sampled, recomputed, mask, 2.0)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, [[np.exp(-1.0), 2.0, np.exp(-20.0), 0.0]], rtol=1e-6)

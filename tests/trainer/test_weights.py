from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from trainer.rig import RUN, Rig, rigged

from shmstage.errors import StaleHandleError, TrainerError
from shmstage.memory.inspect import read_pools
from shmstage.memory.layout import Layout
from shmstage.memory.reader import Lease, PoolReader
from shmstage.testing.engines import MemoryStore, ToyEngine
from shmstage.wire.handles import handle_from_wire

pytestmark = pytest.mark.slow


def sync(rig: Rig, version: int) -> dict[str, Any]:
    rig.reach(version)
    event = rig.ticket(rig.call("prepare_weight_sync", version=version))
    assert (event.ok, event.kind) == (True, "weights")
    return event.value


class Reader:
    """Another process's view of the weights pool."""

    def __init__(self, published: dict[str, Any]) -> None:
        self._reader = PoolReader.attach(published["pool"], run_id=RUN, epoch=published["epoch"])
        self._reader.register(Layout.from_wire(published["layout"]))

    def lease(self, published: dict[str, Any]) -> Lease:
        return self._reader.lease(handle_from_wire(published["handle"]))

    def close(self) -> None:
        self._reader.close()


def test_published_weights_are_those_of_the_update_before() -> None:
    with rigged() as rig:
        rig.train_step(1)
        want = {name: np.array(leaf) for name, leaf in rig.engine.weights().items()}
        ticket = rig.call("prepare_weight_sync", version=1)
        rig.train_step(2)
        published = rig.ticket(ticket).value
        reader = Reader(published)
        lease = reader.lease(published)
        for name, values in want.items():
            np.testing.assert_array_equal(lease.views[name], values)
        assert not np.array_equal(want["w"], np.asarray(rig.engine.weights()["w"]))
        lease.end()
        reader.close()


def test_the_weights_pool_is_spread_over_the_nodes_as_the_other_one_is() -> None:
    """S33"""
    with rigged(numa="interleave") as rig:
        pool = sync(rig, 1)["pool"].strip("/")
        assert [found.numa for found in read_pools(RUN) if found.name == pool] == ["interleaved"]


def test_a_released_version_is_stale_for_its_readers() -> None:
    with rigged() as rig:
        published = sync(rig, 1)
        reader = Reader(published)
        lease = reader.lease(published)
        assert rig.call("release_weight_sync", version=1) == {"released": True}
        assert rig.call("release_weight_sync", version=1) == {"released": False}
        with pytest.raises(StaleHandleError):
            lease.check()
        del lease
        reader.close()


def test_versions_go_on_although_nobody_reads_or_releases_them() -> None:
    with rigged() as rig:
        published = [sync(rig, version) for version in range(1, 6)]
        reader = Reader(published[-1])
        for newest in published[-2:]:
            reader.lease(newest).end()
        with pytest.raises(StaleHandleError):
            reader.lease(published[0])
        reader.close()


def test_weights_are_published_under_the_step_they_are_of_and_before_the_next_one_begins() -> None:
    with rigged() as rig:
        rig.reach(2)
        for other in (0, 1, 3):
            with pytest.raises(TrainerError, match=rf"prepare_weight_sync\({other}\): the last update is 2"):
                rig.call("prepare_weight_sync", version=other)
        rig.call("fwd_bwd", handle=rig.publish(3, 0))
        with pytest.raises(TrainerError, match="step 3 has begun"):
            rig.call("prepare_weight_sync", version=2)
        rig.call("update")
        assert sync(rig, 3)["skipped"] is False


def test_the_pool_goes_with_the_worker() -> None:
    with rigged() as rig:
        name = sync(rig, 1)["pool"]
    with pytest.raises(Exception, match="cannot open pool"):
        PoolReader.attach(name, run_id=RUN, epoch=1)


def test_a_layout_over_the_frame_limit_fails_the_ticket_with_step_and_reason() -> None:
    class Wide:
        def __init__(self) -> None:
            self._inner = ToyEngine(store=MemoryStore())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def weights(self) -> dict[str, Any]:
            return {f"layer_{number}": self._inner.weights()["b"] for number in range(200)}

    with rigged(Wide, frame_limit_nbytes=4096) as rig:
        rig.reach(1)
        event = rig.ticket(rig.call("prepare_weight_sync", version=1))
        assert (event.ok, event.value, event.step) == (False, {}, 1)
        assert re.match("weights of step 1 cannot be reported: .* the frame limit is 4096", event.error)


def test_a_publication_that_fails_is_told_with_step_and_reason() -> None:
    with rigged() as rig:
        rig.train_step(1)
        rig.engine.weights = lambda: {"w": np.zeros(3)}  # not an array of a device
        event = rig.ticket(rig.call("prepare_weight_sync", version=1))
        assert not event.ok
        assert re.match("weights of step 1: AttributeError: .*addressable_shards", event.error)

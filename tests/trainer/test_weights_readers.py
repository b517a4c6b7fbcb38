"""The weights pool and its readers: what is read is not written, what is dead does not block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from trainer.rig import RUN, Rig, rigged

import shmstage
from shmstage import _native
from shmstage.errors import EndpointBusyError, ProtocolError, SlotStateError, WaitTimeoutError
from shmstage.memory.sweep import sweep
from shmstage.transport.weights_reader import WeightsReader
from shmstage.wire.messages import TicketEvent

pytestmark = pytest.mark.slow


def publish(rig: Rig, version: int, *, sync: bool = False) -> TicketEvent:
    rig.reach(version)
    return rig.ticket(rig.call("prepare_weight_sync", version=version, sync=sync))


def first(rig: Rig) -> dict[str, Any]:
    event = publish(rig, 1)
    assert event.ok
    return event.value


@contextmanager
def readers(published: dict[str, Any], count: int) -> Iterator[list[WeightsReader]]:
    with ExitStack() as stack:
        yield [stack.enter_context(WeightsReader(published)) for _ in range(count)]


def stuck(rig: Rig, found: list[WeightsReader]) -> None:
    """Every reader holds another version: three of them hold the whole pool."""
    for version, reader in enumerate(found, start=1):
        assert reader.take().version == version
        if version < len(found):
            assert publish(rig, version + 1).value["skipped"] is False


def test_the_public_name_is_this_class() -> None:
    assert shmstage.WeightsReader is WeightsReader


def test_a_reader_takes_the_newest_version_each_time() -> None:
    with rigged() as rig, readers(first(rig), 1) as (reader,):
        for version in range(2, 7):
            rig.reach(version)
            want = {name: np.array(leaf) for name, leaf in rig.engine.weights().items()}
            assert publish(rig, version).value["skipped"] is False
            with reader.take() as weights:
                assert weights.version == version
                assert list(weights.arrays) == sorted(want)
                for name, values in want.items():
                    np.testing.assert_array_equal(weights.arrays[name], values)
                    assert not weights.arrays[name].flags.writeable


def test_what_is_read_is_not_written_while_versions_go_on() -> None:
    with rigged() as rig, readers(first(rig), 1) as (reader,):
        with reader.take() as weights:
            before = {name: np.array(values) for name, values in weights.arrays.items()}
            for version in range(2, 6):
                assert publish(rig, version).value["skipped"] is False
            assert weights.version == 1
            for name, values in before.items():
                np.testing.assert_array_equal(weights.arrays[name], values)
        with reader.take() as weights:
            assert weights.version == 5
            assert not np.array_equal(weights.arrays["w"], before["w"])


def test_with_no_free_place_an_async_round_is_skipped_and_counted() -> None:
    with rigged() as rig, readers(first(rig), 3) as found:
        stuck(rig, found)
        for total in (1, 2):
            event = publish(rig, 3 + total)
            assert (event.ok, event.value) == (True, {"version": 3 + total, "skipped": True, "skipped_total": total})
        rig.train_step(6)  # nothing waits for a reader
        found[0].close()
        event = publish(rig, 6)
        assert (event.value["skipped"], event.value["skipped_total"]) == (False, 2)
        with readers(event.value, 1) as (fresh,):
            assert fresh.take().version == 6


def test_with_no_free_place_a_sync_round_fails_at_its_deadline_naming_the_reader() -> None:
    with rigged() as rig, readers(first(rig), 3) as found:
        stuck(rig, found)
        rig.worker._timeout_s = 0.05
        event = publish(rig, 4, sync=True)
        assert not event.ok
        for version in (1, 2, 3):
            assert f"reader {os.getpid()}" in event.error and f"read version {version}" in event.error
        rig.worker._timeout_s = 30.0
        found[1].close()
        assert publish(rig, 5, sync=True).value["version"] == 5


def test_a_sync_round_waits_for_a_reader_that_ends_in_time() -> None:
    with rigged() as rig, readers(first(rig), 3) as found:
        stuck(rig, found)
        rig.reach(4)
        ticket = rig.call("prepare_weight_sync", version=4, sync=True)
        open_now = found[0]._open  # the last one holds the newest version, which is never written over
        assert open_now is not None
        open_now.end()
        event = rig.ticket(ticket)
        assert (event.ok, event.value["version"]) == (True, 4)


def test_a_new_epoch_ends_the_wait_for_a_reader() -> None:
    with rigged() as rig, readers(first(rig), 3) as found:
        stuck(rig, found)
        rig.reach(4)
        ticket = rig.call("prepare_weight_sync", version=4, sync=True)
        rig.new_epoch()  # joins the snapshot thread, whose deadline is far
        event = rig.ticket(ticket)
        assert not event.ok
        assert "given up" in event.error
        rig.open()
        found[0].close()
        assert publish(rig, 5, sync=True).ok


READER = """
import json, sys
from shmstage.transport.weights_reader import WeightsReader
reader = WeightsReader(json.loads(sys.stdin.readline()))
print(reader.take().version, flush=True)
sys.stdin.readline()
"""


def reading_process(published: dict[str, Any]) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(json.dumps({key: published[key] for key in ("run_id", "pool", "epoch", "layout")}) + "\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == str(published["version"])
    return child


def test_a_reader_that_was_killed_blocks_nobody_and_gives_its_cell_up() -> None:
    """S12"""
    with rigged() as rig, ExitStack() as stack:
        children = []
        for version in (1, 2, 3):
            children.append(reading_process(publish(rig, version).value))
            stack.callback(children[-1].wait)
            stack.callback(children[-1].kill)
        assert publish(rig, 4).value["skipped"] is True
        rig.worker._timeout_s = 0.05
        event = publish(rig, 5, sync=True)
        assert f"weights reader {children[1].pid}" in event.error
        rig.worker._timeout_s = 30.0
        children[1].send_signal(signal.SIGKILL)
        children[1].wait()
        assert publish(rig, 6, sync=True).value["version"] == 6
        pool = rig.worker._weights._pool
        owners = [pool._headers.cell(index)[0] for index in range(_native.MAX_CONSUMERS)]
        assert sum(owner != 0 for owner in owners) == 2
        for child in children:
            child.kill()
            child.wait()
        sweep(RUN)  # the lock files that only a killed process leaves


def test_readers_keep_the_old_weights_until_the_new_incarnation_has_published() -> None:
    with rigged(incarnation=1) as old:
        published = first(old)
        reader = WeightsReader(published)
        with reader.take() as weights:
            want = {name: np.array(values) for name, values in weights.arrays.items()}
    # the trainer is gone, its pool unlinked
    with reader.take() as weights:
        assert weights.version == 1
        np.testing.assert_array_equal(weights.arrays["w"], want["w"])
    with rigged(incarnation=2) as new:
        event = publish(new, 7)
        with reader.take() as weights, pytest.raises(SlotStateError, match="version 1 is still held"):
            reader.follow(event.value)
        reader.follow(event.value)
        reader.follow(event.value)  # the same pool: nothing to do
        with reader.take() as weights:
            assert weights.version == 7
            assert not np.array_equal(weights.arrays["w"], want["w"])
    reader.close()


def test_a_follow_that_fails_leaves_the_old_weights_readable() -> None:
    with rigged() as rig:
        published = first(rig)
        with readers(published, 1) as (reader,):
            with pytest.raises(Exception, match="cannot open pool|not the name of a pool"):
                reader.follow({**published, "pool": published["pool"][:-5] + "zzzzz"})
            with reader.take() as weights:
                assert weights.version == 1


def test_one_version_at_a_time_per_reader_and_none_after_its_end() -> None:
    with rigged() as rig, readers(first(rig), 1) as (reader,):
        weights = reader.take()
        with pytest.raises(SlotStateError, match="version 1 is still held"):
            reader.take()
        weights.end()
        weights.end()
        with pytest.raises(SlotStateError, match="after it was ended"):
            _ = weights.arrays


def test_a_released_version_is_not_taken_any_more_but_may_be_read_to_the_end() -> None:
    with rigged() as rig, readers(first(rig), 1) as (reader,):
        with reader.take() as weights:
            before = np.array(weights.arrays["w"])
            assert rig.call("release_weight_sync", version=1) == {"released": True}
            for version in (2, 3, 4):
                assert publish(rig, version).value["skipped"] is False
            np.testing.assert_array_equal(weights.arrays["w"], before)
        assert rig.call("release_weight_sync", version=4) == {"released": True}
        with pytest.raises(WaitTimeoutError, match="no version is published"):
            reader.take()


def test_after_a_restore_readers_do_not_go_back_to_an_older_version() -> None:
    with rigged() as rig, readers(first(rig), 1) as (reader,):
        assert publish(rig, 2).value["skipped"] is False
        assert rig.call("restore_checkpoint")["step"] == 0
        for step in (0, 1):
            event = publish(rig, step)
            assert (event.ok, event.value) == (True, {"version": step, "skipped": True, "skipped_total": step + 1})
            with reader.take() as weights:
                assert weights.version == 2
        assert publish(rig, 2, sync=True).value["skipped"] is False
        assert publish(rig, 3).value["skipped"] is False
        with reader.take() as weights:
            assert weights.version == 3


def test_a_pool_has_so_many_readers_and_says_so() -> None:
    with rigged() as rig:
        published = first(rig)
        with readers(published, _native.MAX_CONSUMERS) as found:
            with pytest.raises(EndpointBusyError, match="all 24 readers' cells"):
                WeightsReader(published)
            found[3].close()
            found[3].close()
            WeightsReader(published).close()


@pytest.mark.parametrize("key", ["run_id", "pool", "epoch", "layout"])
def test_a_value_that_is_no_publication_is_refused(key: str) -> None:
    with rigged() as rig:
        published = first(rig)
        with pytest.raises(ProtocolError, match=f"has {key} = None"):
            WeightsReader({**published, key: None})


def test_whatever_readers_do_they_never_see_two_versions_mixed() -> None:
    """Readers and writer at full speed; every array of version v was filled from the same v."""
    with rigged() as rig:
        published = first(rig)
        pool = rig.worker._weights
        stop, faults = threading.Event(), list[str]()

        def read() -> None:
            with WeightsReader(published) as reader:
                while not stop.is_set():
                    with reader.take() as weights:
                        values = {float(array.flat[0]) for array in weights.arrays.values()}
                        values |= {float(array.flat[-1]) for array in weights.arrays.values()}
                        if values != {float(weights.version)} and weights.version > 1:
                            faults.append(f"version {weights.version} holds {values}")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        like = rig.engine.weights()
        for version in range(2, 40):
            pool.publish(version, {name: leaf * 0 + version for name, leaf in like.items()}, sync=False)
        stop.set()
        for thread in threads:
            thread.join()
        assert not faults


def test_the_newest_version_is_not_written_over_although_nobody_reads_it() -> None:
    with rigged() as rig:
        versions = [first(rig), *(publish(rig, version).value for version in (2, 3, 4, 5))]
        slots = [value["handle"][0] for value in versions]
        assert all(before != after for before, after in pairwise(slots))

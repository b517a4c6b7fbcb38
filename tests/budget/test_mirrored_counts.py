"""Counts of the trainer and the orchestrator that the formula repeats, because its layer must not import them."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "orchestrator"))
from schedule_driver import Driver

from shmstage.budget.formula import HELD_STEPS, MAX_LEAVES, SNAPSHOT_COPIES, WEIGHTS_PLACES, WRITER_COPIES
from shmstage.errors import LayoutError, WaitTimeoutError
from shmstage.memory.layout import Layout
from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config
from shmstage.settings import BOUNDARIES, Boundary
from shmstage.trainer.snapshots import Snapshots
from shmstage.trainer.weights import BUFFERS
from shmstage.wire.messages import TicketEvent

DEADLINE_S = 10.0


def test_the_weights_pool_has_as_many_places_as_are_counted() -> None:
    assert WEIGHTS_PLACES == BUFFERS


def test_a_layout_takes_as_many_arrays_as_are_said_and_not_one_more() -> None:
    specs = {f"w{number}": ("float32", (1,)) for number in range(MAX_LEAVES + 1)}
    with pytest.raises(LayoutError, match=str(MAX_LEAVES)):
        Layout.of(specs)
    specs.popitem()
    assert len(Layout.of(specs).fields) == MAX_LEAVES


def test_a_slow_disk_makes_as_many_host_copies_as_are_counted_and_one_update_more() -> None:
    """The next snapshot is not copied, and the update after it waits: so many steps are covered by none of them."""
    events: queue.SimpleQueue[TicketEvent] = queue.SimpleQueue()
    snapshots, disk, copies = Snapshots(events.put), threading.Event(), queue.SimpleQueue[int]()
    try:
        for step in range(SNAPSHOT_COPIES):
            snapshots.submit(
                "checkpoint", step, lambda step=step: copies.put(step), lambda: {"waited": disk.wait(DEADLINE_S)},
                holds=True,
            )  # fmt: skip
            snapshots.wait_copies(DEADLINE_S)
        snapshots.submit("checkpoint", SNAPSHOT_COPIES, lambda: copies.put(SNAPSHOT_COPIES), dict, holds=True)
        with pytest.raises(WaitTimeoutError):
            snapshots.wait_copies(0.05)
        assert copies.qsize() == SNAPSHOT_COPIES
    finally:
        disk.set()
        snapshots.close()


@pytest.mark.parametrize("mode", BOUNDARIES)
@pytest.mark.parametrize("device_is_slow", [True, False])
def test_as_many_steps_are_begun_beyond_the_last_that_was_closed_as_are_counted(
    mode: Boundary, device_is_slow: bool
) -> None:
    """Of the second of them one micro-batch; in serial mode none, and nothing beyond an update that has not landed."""
    most, under_way = (0, 0), 0

    def look(schedule: BoundarySchedule, command: Command) -> bool:
        nonlocal most, under_way
        step, index = max(driver.packed, default=(0, 0))
        most = max(most, (step - schedule.state.closed, index))
        under_way = max(under_way, step - schedule.state.landed)
        return False

    driver = Driver(Config(mode=mode, microbatches_per_step=2, last_step=6), device_is_slow=device_is_slow, fault=look)
    driver.run()
    assert most == ((1, 1) if mode == "serial" else (HELD_STEPS, 0))
    assert mode != "serial" or under_way == 1


SAVE = """
import sys
from pathlib import Path
import numpy as np
from shmstage.trainer.checkpoints import OrbaxStore

def kept(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

store, random = OrbaxStore(Path(sys.argv[1])), np.random.default_rng(0)
store.save(0, {"first": np.zeros(4, np.float32)}, {})
tree = {f"w{n}": random.random(1 << 23, dtype=np.float32) for n in range(5)}
before = kept("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
store.save(1, tree, {})
print((kept("VmHWM") - before) / sum(leaf.nbytes for leaf in tree.values()))
"""


@pytest.mark.slow
def test_the_checkpoint_writer_holds_no_more_than_is_counted(tmp_path: Path) -> None:
    """And more than one copy of what it writes: numbers that no encoding makes smaller, in a process of their own."""
    command = [sys.executable, "-c", SAVE, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert 1 < float(done.stdout) <= WRITER_COPIES + 0.25

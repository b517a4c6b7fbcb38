"""Fetching ahead: what is waited for is not forgotten, however much is wanted after it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from shmstage.launch.fetch_ahead import AHEAD, REMEMBERED, FetchAhead, Fetched
from shmstage.packing.parts import WindowPart, part_of, read_part
from shmstage.packing.pieces import encode_pieces
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.packing.reference import Key, TrajectoryReference
from shmstage.packing.trajectory import Trajectory
from shmstage.packing.window import Window

TOKENS = 16
ONES = np.ones(TOKENS, np.float32)
TRAJECTORY = Trajectory(
    trajectory_id="t", group_id="g", batch_index=0, tokens=np.arange(TOKENS, dtype=np.int32), loss_mask=ONES,
    advantages=ONES, old_logprobs=-ONES,
)  # fmt: skip


class Slow:
    """A store whose answers are held back."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked = threading.Semaphore(0)

    def pieces(self, store: int, numbers: Any, begins: Any, ends: Any) -> list[np.ndarray[Any, Any]]:
        self.asked.release()
        assert self.may_answer.wait(30.0)
        return encode_pieces([TRAJECTORY] * len(numbers), list(zip(begins.tolist(), ends.tolist(), strict=True)))


def part() -> WindowPart:
    planner = Planner(PlanSettings(rows=1, tokens=TOKENS))
    planner.add(0, TOKENS)
    (plan,) = planner.close_window()
    window = Window(0, 1, 0, TOKENS)
    sent = part_of(plan, {0: TrajectoryReference.of(TRAJECTORY, Key(0, 7))}, window)
    return read_part(sent.plan, sent.digests, window)


def test_what_somebody_waits_for_is_not_forgotten_however_much_is_wanted_after_it() -> None:
    stores = Slow()
    fetching = FetchAhead(stores, limit_nbytes=1 << 30, verify_full=False)
    wanted, waits = part(), threading.Event()
    got: list[Fetched] = []

    def given_up() -> bool:
        waits.set()
        return False

    taking = threading.Thread(
        target=lambda: got.append(
            fetching.take(b"first", wanted, deadline=time.monotonic() + 30, given_up=given_up)
        )
    )
    try:
        for number in range(AHEAD):  # the threads have all they can do, so that "first" is not begun
            fetching.want(b"%d" % number, wanted, 1)
            assert stores.asked.acquire(timeout=30)
        taking.start()
        assert waits.wait(30)
        for number in range(AHEAD, AHEAD + 2 * REMEMBERED):
            fetching.want(b"%d" % number, wanted, 1)
        stores.may_answer.set()
        taking.join(30)
        assert [list(each.pieces) for each in got] == [[0]]
        assert fetching.wanted(b"0") is None, "what nobody waits for is forgotten, the oldest first"
        assert fetching.wanted(b"%d" % (AHEAD + 2 * REMEMBERED - 1)) is not None
    finally:
        stores.may_answer.set()
        fetching.close()

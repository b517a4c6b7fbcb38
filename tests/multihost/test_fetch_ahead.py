"""Fetching ahead: what is begun, what is forgotten, and what ends a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from shmstage.errors import ProtocolError, StoppedError, WaitTimeoutError
from shmstage.launch.fetch_ahead import AHEAD, REMEMBERED, FetchAhead, Fetched
from shmstage.packing.parts import Wanted, WindowPart, part_of, read_part
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

    def __init__(self, trajectory: Trajectory = TRAJECTORY) -> None:
        self.trajectory = trajectory
        self.may_answer = threading.Event()
        self.asked = threading.Semaphore(0)

    def ask(self, wanted: Sequence[Wanted]) -> Held:
        return Held(self, wanted)


class Held:
    def __init__(self, store: Slow, wanted: Sequence[Wanted]) -> None:
        self.store, self.wanted = store, wanted

    def get(self) -> list[list[np.ndarray[Any, Any]]]:
        self.store.asked.release()
        assert self.store.may_answer.wait(30.0)
        return [
            encode_pieces([self.store.trajectory] * len(each.numbers), list(zip(each.begins, each.ends, strict=True)))
            for each in self.wanted
        ]

    def unanswered(self) -> list[str]:
        return [f"host {each.store}" for each in self.wanted]


def part(trajectory: Trajectory = TRAJECTORY) -> WindowPart:
    planner = Planner(PlanSettings(rows=1, tokens=TOKENS))
    planner.add(0, TOKENS)
    (plan,) = planner.close_window()
    window = Window(0, 1, 0, TOKENS)
    sent = part_of(plan, {0: TrajectoryReference.of(trajectory, Key(0, 7))}, window)
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


def test_bytes_fetched_ahead_stay_below_the_limit_but_for_what_is_packed_next() -> None:
    fetching = FetchAhead(stores := Slow(), limit_nbytes=100, verify_full=False)
    stores.may_answer.set()
    wanted = part()

    def begun() -> list[bytes]:
        return [key for key, wish in fetching._wishes.items() if wish.request is not None]

    def take(key: bytes) -> None:
        fetching.take(key, wanted, deadline=time.monotonic() + 30, given_up=lambda: False)

    try:
        for key, nbytes in ((b"large", 1000), (b"first", 60), (b"second", 40), (b"third", 1)):
            fetching.want(key, wanted, nbytes)
        assert begun() == [b"large"], "one is fetched ahead, however large it is"
        take(b"large")
        assert begun() == [b"first", b"second"]
        take(b"third")
        assert begun() == [b"first", b"second"]
        take(b"first")
        take(b"second")
        assert fetching._wishes == {}
    finally:
        fetching.close()


def test_a_wait_for_pieces_ends_when_nobody_wants_them_any_more() -> None:
    fetching = FetchAhead(stores := Slow(), limit_nbytes=1 << 30, verify_full=False)
    asked = 0

    def given_up() -> bool:
        nonlocal asked
        asked += 1
        if asked > 1:
            stores.may_answer.set()
        return True

    try:
        with pytest.raises(StoppedError, match="stopped while waiting for pieces"):
            fetching.take(b"only", part(), deadline=time.monotonic() + 3600, given_up=given_up)
    finally:
        stores.may_answer.set()
        fetching.close()


def test_full_verification_finds_values_that_are_not_those_of_their_digest() -> None:
    wrong = Trajectory(
        trajectory_id="wrong", group_id="g", batch_index=0, tokens=TRAJECTORY.tokens, loss_mask=ONES, advantages=ONES,
        old_logprobs=ONES,
    )  # fmt: skip
    object.__setattr__(wrong, "digest", TRAJECTORY.digest)
    for full in (False, True):
        fetching = FetchAhead(stores := Slow(wrong), limit_nbytes=1 << 30, verify_full=full)
        stores.may_answer.set()
        try:
            take = partial(
                fetching.take, b"only", part(), deadline=time.monotonic() + 30, given_up=lambda: False
            )
            if full:
                with pytest.raises(ProtocolError, match="'wrong': what came has digest"):
                    take()
            else:
                assert list(take().pieces) == [0]
        finally:
            fetching.close()


def test_what_has_not_been_asked_for_says_whose_answers_hold_it_up() -> None:
    """Every thread waits for a store that hangs, and what nobody prefetched comes after them."""
    fetching = FetchAhead(stores := Slow(), limit_nbytes=1 << 30, verify_full=False)
    try:
        for number in range(AHEAD):
            fetching.want(b"%d" % number, part(), 1)
            assert stores.asked.acquire(timeout=30)
        with pytest.raises(WaitTimeoutError, match="no pieces in time from the store of host 0: dead, unreachable"):
            fetching.take(b"evaluation", part(), deadline=time.monotonic(), given_up=lambda: False)
    finally:
        stores.may_answer.set()
        fetching.close()


def test_what_comes_at_the_last_look_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for it timed out, and then it was done."""
    fetching = FetchAhead(stores := Slow(), limit_nbytes=1 << 30, verify_full=False)
    begin, looked = fetching._begin, []

    def begun(wish: Any) -> Any:
        request = begin(wish)
        result = request.result

        def late(timeout: float | None = None) -> Fetched:
            if not looked:
                looked.append(timeout)
                stores.may_answer.set()
                result()
                raise TimeoutError
            return result(timeout)

        request.result = late
        return request

    monkeypatch.setattr(fetching, "_begin", begun)
    try:
        fetched = fetching.take(b"only", part(), deadline=time.monotonic() + 30, given_up=lambda: False)
        assert (list(fetched.pieces), len(looked)) == ([0], 1)
    finally:
        stores.may_answer.set()
        fetching.close()

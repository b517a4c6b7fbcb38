"""A launcher that hangs is ended; one that looks around is not. The clock is set by hand."""

from __future__ import annotations

import threading

from shmstage.launch.watchdog import Watchdog
from shmstage.testing.fake_clock import FakeClock


def test_who_looks_around_no_more_is_found_hung_once() -> None:
    clock, hung, called = FakeClock(), threading.Event(), []

    def found() -> None:
        called.append(clock())
        hung.set()

    with Watchdog(found, limit_s=10.0, look_s=0.001, clock=clock):
        clock.advance(11.0)
        assert hung.wait(30.0)
    assert called == [11.0]


def test_who_looks_around_in_time_is_left_alone() -> None:
    clock, looked, called = FakeClock(), threading.Semaphore(0), []

    def seen() -> float:
        looked.release()
        return clock()

    with Watchdog(lambda: called.append("hung"), limit_s=10.0, look_s=0.001, clock=seen) as dog:
        for _ in range(5):
            clock.advance(9.0)
            dog.beat()
            while looked.acquire(blocking=False):
                pass
            for _ in range(3):  # it has looked since
                assert looked.acquire(timeout=30.0)
    assert called == []

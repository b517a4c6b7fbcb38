from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from shmstage.errors import WaitTimeoutError
from shmstage.trainer.tokens import TokenWatcher, _Watched

DEADLINE_S = 10.0


@pytest.fixture(params=[False, True], ids=["in_order", "at_once"])
def watcher(request: pytest.FixtureRequest) -> Iterator[TokenWatcher]:
    watcher = TokenWatcher("test", at_once=request.param, clock_ns=lambda: 7)
    yield watcher
    watcher.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_report_that_raises_is_made_again_as_a_failure_and_the_thread_lives(watcher: TokenWatcher) -> None:
    calls: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def on_ready(ready_ns: int, error: str) -> None:
        calls.put((ready_ns, error))
        if not error:
            raise ValueError("no place for it")

    watcher.watch(jnp.zeros(()), on_ready)
    assert calls.get(timeout=DEADLINE_S) == (7, "")
    assert calls.get(timeout=1.0) == (7, "reporting it raised ValueError: no place for it")
    watcher.drain(1.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_report_that_raises_twice_is_given_up(watcher: TokenWatcher) -> None:
    def on_ready(ready_ns: int, error: str) -> None:
        raise ValueError("never")

    watcher.watch(jnp.zeros(()), on_ready)
    watcher.drain(1.0)


def test_only_what_is_ready_when_given_overtakes_what_still_waits() -> None:
    class Busy:
        def __init__(self) -> None:
            self.over = threading.Event()

        def is_ready(self) -> bool:
            return self.over.is_set()

        def block_until_ready(self) -> None:
            self.over.wait(DEADLINE_S)

    watcher, busy, told = TokenWatcher("test", at_once=True), Busy(), []
    watcher.watch(busy, lambda ready_ns, error: told.append("busy"))
    watcher.watch(jnp.zeros(()), lambda ready_ns, error: told.append("ready"))
    assert told == ["ready"]
    with pytest.raises(WaitTimeoutError, match=r"not over after 0.01 s .*raise call_timeout_s"):
        watcher.drain(0.01)
    busy.over.set()
    watcher.drain(DEADLINE_S)
    assert told == ["ready", "busy"]
    watcher.close()


def test_what_is_held_is_watched_when_it_is_let_go_in_its_order() -> None:
    watcher = TokenWatcher("test", clock_ns=lambda: 7)
    seen: list[str] = []
    try:
        watcher.hold()
        watcher.watch(jnp.zeros(()), lambda ready_ns, error: seen.append("first"))
        reached = threading.Event()
        watcher._waiting.put(_Watched((), lambda ready_ns, error: reached.set()))
        assert reached.wait(DEADLINE_S) and seen == []  # it would have come before
        watcher.flush()
        watcher.watch(jnp.zeros(()), lambda ready_ns, error: seen.append("second"))
        watcher.drain(DEADLINE_S)  # waits for everything, held or not
        assert seen == ["first", "second"]
        watcher.release()
        watcher.watch(jnp.zeros(()), lambda ready_ns, error: seen.append("third"))
        watcher.drain(DEADLINE_S)
        assert seen[2:] == ["third"]
    finally:
        watcher.close()

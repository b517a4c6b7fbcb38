"""Waiting for device work off the command path: a thread per kind of work, stamps on the monotonic clock."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax

from shmstage.errors import WaitTimeoutError
from shmstage.trainer.jax_seam import wait_ready
from shmstage.trainer.reporting import describe

log = logging.getLogger(__name__)

OnReady = Callable[[int, str], None]
"""Called with (ready_ns, error text or ""), as a rule on the watcher's thread. If it raises, it is called once more
with that as the error: work that nobody hears of would be waited for until a deadline."""


@dataclass(slots=True)
class _Watched:
    arrays: Any
    on_ready: OnReady


@final
class TokenWatcher:
    """Waits for arrays in the order they were given. Work of one device queue ends in that order.

    Use one watcher for computations and one for uploads: an upload is often ready long before the computation
    dispatched ahead of it. With ``at_once`` what is ready when it is given is reported on the calling thread, ahead of
    what still waits: on the CPU backend that is every upload, and a switch of threads costs more than a small one.
    """

    def __init__(
        self, name: str, *, at_once: bool = False, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._at_once = at_once
        self._clock_ns = clock_ns
        self._waiting: queue.SimpleQueue[_Watched | None] = queue.SimpleQueue()
        self._held: list[_Watched] | None = None
        self._thread = threading.Thread(target=self._run, name=f"shmstage-{name}", daemon=True)
        self._thread.start()

    def watch(self, arrays: Any, on_ready: OnReady) -> None:
        """Call ``on_ready`` once every array of the pytree is ready or failed. The references are dropped first."""
        leaves = arrays if type(arrays) is list else jax.tree.leaves(arrays)
        if self._at_once and all(array.is_ready() for array in leaves):
            _tell(on_ready, self._clock_ns(), failure_of(arrays))
            return
        if self._held is not None:
            self._held.append(_Watched(arrays, on_ready))
        else:
            self._waiting.put(_Watched(arrays, on_ready))

    def hold(self) -> None:
        """From now to ``release`` what is given is kept until ``flush``: the thread is not woken in the middle of what
        the calling thread has to do. For the one thread that calls ``watch``."""
        if self._held is None:
            self._held = []

    def flush(self) -> None:
        """Wait for what was held: before anything that may block. Harmless without ``hold``."""
        if self._held:
            for item in self._held:
                self._waiting.put(item)
            self._held.clear()

    def release(self) -> None:
        """Hold no more."""
        self.flush()
        self._held = None

    def drain(self, timeout_s: float) -> None:
        """Return when everything watched so far has resolved; ``WaitTimeoutError`` past the deadline."""
        self.flush()
        reached = threading.Event()
        self._waiting.put(_Watched((), lambda ready_ns, error: reached.set()))
        if not reached.wait(timeout_s):
            raise WaitTimeoutError(
                f"device work was not over after {timeout_s:g} s ({self._thread.name}); if the device is only slow, "
                "raise call_timeout_s"
            )

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait for what is watched, then end the thread."""
        self.release()
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            error = failure_of(item.arrays)
            ready_ns = self._clock_ns()
            item.arrays = None
            _tell(item.on_ready, ready_ns, error)
            del item  # else the last one lives until the next arrives


def _tell(on_ready: OnReady, ready_ns: int, error: str) -> None:
    try:
        on_ready(ready_ns, error)
    except Exception as raised:
        log.exception("reporting that device work is over raised; it is reported as failed")
        try:
            on_ready(ready_ns, error or f"reporting it raised {describe(raised)}")
        except Exception:
            log.exception("finished device work could not be reported")


def failure_of(arrays: Any) -> str:
    """Wait until the arrays are ready; "" if they are, else the first line of why not."""
    try:
        wait_ready(arrays)
    except Exception as error:  # XLA raises its own and plain RuntimeErrors
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
    return ""

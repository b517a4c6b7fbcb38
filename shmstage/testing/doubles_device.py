"""A device queue whose work ends when it is told to: in order, each piece by an event, never by time.

Work is named ``1.2`` (micro-batch 2 of step 1) and ``update 1``. The host waits in three places only, and there the
device gets on by itself, as far as that wait needs: a throttled dispatch, a call that blocks on purpose, and a wait for
a device buffer (``nudged``, which a worker polls as its ``cancelled``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

DEADLINE_S = 60.0


@final
@dataclass(eq=False, slots=True)
class Work:
    """One dispatched program."""

    name: str
    until: str
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Return when it has ended; ``TimeoutError`` says what would end it."""
        if not self.ended.wait(DEADLINE_S):
            raise TimeoutError(f"{self.name} did not end in {DEADLINE_S:g} s; it ends at {self.until or 'its turn'}")


@final
class Device:
    """``ends`` maps work to the call that must have been *received* before it ends; other work ends at its turn.

    ``log`` is one order of everything: ``received CALL``, ``began WORK``, ``ended WORK``. Any thread.
    """

    def __init__(self, ends: Mapping[str, str] | None = None) -> None:
        self._ends = dict(ends or {})
        self._queue: list[Work] = []
        self._heard: set[str] = set()
        self._lock = threading.RLock()
        self.log: list[str] = []

    def begin(self, name: str) -> Work:
        """Work was dispatched."""
        with self._lock:
            work = Work(name, self._ends.get(name, ""))
            self._queue.append(work)
            self.log.append(f"began {name}")
            self._get_on()
            return work

    def heard(self, call: str) -> None:
        """The trainer received a call."""
        with self._lock:
            self._heard.add(call)
            self.log.append(f"received {call}")
            self._get_on()

    @property
    def unfinished(self) -> int:
        with self._lock:
            return len(self._queue)

    def end_all_but(self, kept: int) -> None:
        """The host waits until at most ``kept`` are unfinished."""
        with self._lock:
            while len(self._queue) > kept:
                self._end_first()
            self._get_on()

    def end_through(self, work: Work) -> None:
        """The host waits for ``work``."""
        with self._lock:
            while work in self._queue:
                self._end_first()
            self._get_on()

    def nudged(self) -> bool:
        """The host waits for whatever comes first. Always False: polled where a worker asks whether to give up."""
        with self._lock:
            if self._queue:
                self._end_first()
                self._get_on()
        return False

    def position(self, entry: str) -> int:
        """Where in the log; raises ``ValueError`` if it is not there."""
        with self._lock:
            return self.log.index(entry)

    def _get_on(self) -> None:
        while self._queue and (not self._queue[0].until or self._queue[0].until in self._heard):
            self._end_first()

    def _end_first(self) -> None:
        work = self._queue.pop(0)
        self.log.append(f"ended {work.name}")
        work.ended.set()

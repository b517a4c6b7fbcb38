"""The core of ``scale.py``: a heap of events, processes that wait, resources with queues. It knows nothing of training.

A process is a generator. It yields a number of seconds, or a ``Signal``, and goes on when that is over. At one instant,
who asked first goes on first, so that the same model always ends in the same instants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from heapq import heappop, heappush
from math import isfinite
from typing import final

Process = Generator["float | Signal", None, None]


class StuckError(Exception):
    """Nothing is left to happen, and somebody still waits."""


@final
class Signal:
    """Happens once; whoever waits for it goes on then, and whoever asks later goes on at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.at: float | None = None
        self.waiting: list[Process] = []

    @property
    def when(self) -> float:
        """Seconds of the model's clock. Raises ``StuckError`` if it has not happened."""
        if self.at is None:
            raise StuckError(f"{self.name} has not happened")
        return self.at


@final
class Simulation:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._asked = 0
        self._blocked: dict[Process, Signal] = {}

    def spawn(self, process: Process, name: str = "process") -> Signal:
        """Begin ``process`` at this instant; the signal happens when it ends."""
        ended = Signal(f"the end of {name}")
        self._at(self.now, self._whole(process, ended))
        return ended

    def fire(self, signal: Signal) -> None:
        if signal.at is not None:
            raise ValueError(f"{signal.name} happened at {signal.at} already")
        signal.at = self.now
        for process in signal.waiting:
            del self._blocked[process]
            self._at(self.now, process)
        signal.waiting.clear()

    def run(self) -> None:
        """Until nothing is left to happen. Raises ``StuckError`` if a process waits for what never comes."""
        while self._events:
            self.now, _, process = heappop(self._events)
            self._go_on(process)
        if self._blocked:
            names = ", ".join(sorted({signal.name for signal in self._blocked.values()}))
            raise StuckError(f"at {self.now:.3f} s nothing is left to happen, and somebody waits for: {names}")

    def _go_on(self, process: Process) -> None:
        try:
            wanted = next(process)
        except StopIteration:
            return
        if isinstance(wanted, Signal):
            if wanted.at is None:
                wanted.waiting.append(process)
                self._blocked[process] = wanted
                return
            wanted = 0.0
        if not (isfinite(wanted) and wanted >= 0):
            raise ValueError(f"a process waits {wanted} seconds: want a finite number, 0 or more")
        self._at(self.now + wanted, process)

    def _at(self, when: float, process: Process) -> None:
        heappush(self._events, (when, self._asked, process))
        self._asked += 1

    def _whole(self, process: Process, ended: Signal) -> Process:
        yield from process
        self.fire(ended)


@final
class Resource:
    """``capacity`` places, first come, first served. ``busy_s`` adds up over all places."""

    def __init__(self, simulation: Simulation, name: str, capacity: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"{name} has {capacity} places: want 1 or more")
        self.name = name
        self.busy_s = 0.0
        self._simulation = simulation
        self._free = capacity
        self._since: deque[float] = deque()
        self._queue: deque[Signal] = deque()

    def acquire(self) -> Signal:
        """Happens when a place is this caller's."""
        granted = Signal(f"a place of {self.name}")
        self._queue.append(granted)
        self._grant()
        return granted

    def release(self) -> None:
        if not self._since:
            raise ValueError(f"{self.name}: no place is taken")
        self.busy_s += self._simulation.now - self._since.popleft()
        self._free += 1
        self._grant()

    def hold(self, seconds: float) -> Process:
        """Wait for a place and keep it for ``seconds``."""
        yield self.acquire()
        yield seconds
        self.release()

    def _grant(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            self._since.append(self._simulation.now)
            self._simulation.fire(self._queue.popleft())

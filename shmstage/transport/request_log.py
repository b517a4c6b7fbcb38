"""Which request runs, waits, is answered from memory or is refused: a state machine without socket or thread.

One log serves one session (one peer in one epoch).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import final

REPLIES_KEPT = 64
"""Finished calls whose replies are remembered; a client has one call open at a time."""


class State(Enum):
    """Where a request is in its life; it only moves forward."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class Admission(Enum):
    """What to do with a request that arrived."""

    EXECUTE = "execute"
    """New: queue it. Older ones not begun are cancelled now."""
    JOIN = "join"
    """A retry of a queued or running call: its reply will answer both."""
    ANSWER = "answer"
    """A retry of a finished call: send the remembered reply again."""
    CANCELLED = "cancelled"
    """A higher sequence arrived before this one was begun; it will never run."""


@dataclass(slots=True, eq=False)
class _Entry:
    state: State
    reply: bytes = b""


@final
class RequestLog:
    """The requests of one session by sequence."""

    def __init__(self, replies_kept: int = REPLIES_KEPT) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._replies_kept = replies_kept
        self._highest = 0
        self._queued: list[_Entry] = []
        self._lock = threading.Lock()

    @property
    def highest(self) -> int:
        """The highest sequence admitted so far, 0 if none."""
        return self._highest

    def admit(self, sequence: int) -> tuple[Admission, bytes]:
        """What to do with it, and the remembered reply when it is to be answered."""
        with self._lock:
            entry = self._entries.get(sequence)
            if entry is not None:
                if entry.state is State.DONE:
                    return Admission.ANSWER, entry.reply
                if entry.state is State.CANCELLED:
                    return Admission.CANCELLED, b""
                return Admission.JOIN, b""
            if sequence <= self._highest:
                # Never seen, or forgotten long after its answer: either way the client has moved on.
                return Admission.CANCELLED, b""
            self._cancel_queued()
            self._highest = sequence
            entry = self._entries[sequence] = _Entry(State.QUEUED)
            self._queued.append(entry)
            self._forget_oldest()
            return Admission.EXECUTE, b""

    def begin(self, sequence: int) -> bool:
        """From queued to running; False if it was cancelled meanwhile."""
        with self._lock:
            entry = self._entries.get(sequence)
            if entry is None or entry.state is not State.QUEUED:
                return False
            entry.state = State.RUNNING
            self._queued.remove(entry)
            return True

    def finish(self, sequence: int, reply: bytes) -> None:
        """Remembers the reply for retries."""
        with self._lock:
            entry = self._entries.get(sequence)
            if entry is not None:
                entry.state, entry.reply = State.DONE, reply

    def cancel_queued(self) -> None:
        """The session is over: nothing that has not begun will begin."""
        with self._lock:
            self._cancel_queued()

    def _cancel_queued(self) -> None:
        for entry in self._queued:
            entry.state = State.CANCELLED
        self._queued.clear()

    def _forget_oldest(self) -> None:
        while len(self._entries) > self._replies_kept:
            oldest = next(iter(self._entries))
            if self._entries[oldest].state in (State.QUEUED, State.RUNNING):
                return  # a call still running behind that many others; its reply must find its place
            del self._entries[oldest]

"""Snapshots: a command takes references and returns a ticket; threads turn them into bytes and make them durable.

The copying thread works in order and dispatches no device program. Tickets that others wait for (scores, evaluations)
have a thread of their own, which no checkpoint and no disk holds up. The writing thread holds at most one snapshot
waiting besides the one it writes, so host copies do not pile up behind a slow disk: the copier waits, and with it the
update that would donate the arrays.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from shmstage.errors import CancelledError, WaitTimeoutError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.trainer.reporting import describe, python_numbers, report
from shmstage.wire.messages import TicketEvent

log = logging.getLogger(__name__)

POLL_S = 0.05
REMEDY = "look at the disk, or raise call_timeout_s"

Copy = Callable[[], Mapping[str, object] | None]
Write = Callable[[], Mapping[str, object]]


@dataclass(slots=True)
class _Ticket:
    number: int
    kind: str
    step: int
    copy: Copy | None
    write: Write | None
    begin_ns: int
    of: Handle | None
    about: str
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


@final
class Snapshots:
    """Tickets in flight. Submit and wait from the command thread only."""

    def __init__(
        self,
        emit: Callable[[TicketEvent], None],
        *,
        on_done: Callable[[str, int, str], None] = lambda kind, step, error: None,
        cancelled: Callable[[], bool] = lambda: False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        events: Events = NO_EVENTS,
    ) -> None:
        """``on_done(kind, step, error)`` runs before the ticket's event is emitted, on a snapshot thread.

        ``cancelled`` is polled by ``wait_copies``.
        """
        self._emit = emit
        self._on_done = on_done
        self._cancelled = cancelled
        self._clock_ns = clock_ns
        self._events = events
        self._number = 0
        self._holding: list[_Ticket] = []
        self._open: list[_Ticket] = []
        self._to_copy: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._apart: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._to_write: queue.Queue[_Ticket | None] = queue.Queue(maxsize=1)
        self._threads = [
            threading.Thread(target=self._copy_loop, name="shmstage-snapshot-copy", daemon=True),
            threading.Thread(target=self._copy_all, args=(self._apart,), name="shmstage-snapshot-apart", daemon=True),
            threading.Thread(target=self._write_loop, name="shmstage-snapshot-write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, kind: str, step: int, copy: Copy, write: Write | None = None, *, holds: bool = False, apart: bool = False,
        of: Handle | None = None, about: str = "",
    ) -> int:  # fmt: skip
        """Queue ``copy`` and, after it, ``write``; returns the ticket's number.

        The ticket resolves with what the last of them returns. ``holds``: ``copy`` reads arrays that the next update
        donates, so that update waits for it. ``apart``: it reads nothing of the kind, writes nothing, and somebody
        waits for it, so it overtakes those that are not. ``of``, ``about``: what was computed from which micro-batch.
        """
        assert not (apart and (holds or write)), "what is copied apart holds nothing up and is not written"
        self._number += 1
        ticket = _Ticket(self._number, kind, step, copy, write, self._clock_ns(), of, about)
        self._open = [t for t in self._open if not t.done.is_set()]
        self._open.append(ticket)
        if holds:
            self._holding.append(ticket)
        (self._apart if apart else self._to_copy).put(ticket)
        return ticket.number

    def wait_copies(self, timeout_s: float) -> float:
        """Wait until no copy needs the arrays the next update donates; returns the seconds waited.

        Raises ``WaitTimeoutError`` at the deadline, ``CancelledError`` if a new handshake or a stop is waiting; the
        copies go on then.
        """
        begin = time.monotonic()
        for ticket in self._holding:
            what = f"the update waits for the copy of {ticket.kind} {ticket.step}"
            while not ticket.copied.wait(max(0.0, min(POLL_S, begin + timeout_s - time.monotonic()))):
                if time.monotonic() - begin >= timeout_s:
                    raise WaitTimeoutError(f"{what}, not over after {timeout_s:g} s; {REMEDY}")
                if self._cancelled():
                    raise CancelledError(f"{what}; given up: a new handshake or a stop is waiting")
        waited = time.monotonic() - begin if self._holding else 0.0
        self._holding.clear()
        return waited

    def join(self, timeout_s: float) -> None:
        """Wait until every ticket has resolved: nothing written later can surprise a restore."""
        deadline = time.monotonic() + timeout_s
        for ticket in self._open:
            if not ticket.done.wait(max(0.0, deadline - time.monotonic())):
                what = f"snapshot {ticket.kind} {ticket.step}"
                raise WaitTimeoutError(f"{what} was not over after {timeout_s:g} s; {REMEDY}")
        self._open.clear()
        self._holding.clear()

    def close(self, timeout_s: float = 60.0) -> None:
        """Finish what was submitted, then end the threads."""
        self._to_copy.put(None)
        self._apart.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _copy_loop(self) -> None:
        self._copy_all(self._to_copy)
        self._to_write.put(None)

    def _copy_all(self, tickets: queue.SimpleQueue[_Ticket | None]) -> None:
        while (ticket := tickets.get()) is not None:
            self._run_copy(ticket)
            del ticket

    def _run_copy(self, ticket: _Ticket) -> None:
        assert ticket.copy is not None
        try:
            value = ticket.copy()
        except BaseException as error:  # SystemExit, too: it would end the thread without a word
            self._resolve(ticket, {}, error)
            return
        finally:
            ticket.copy = None  # drops the references to the device arrays
            ticket.copied.set()
        if ticket.write is None:
            self._resolve(ticket, {} if value is None else value, None)
        else:
            self._to_write.put(ticket)

    def _write_loop(self) -> None:
        while (ticket := self._to_write.get()) is not None:
            assert ticket.write is not None
            try:
                value, error = ticket.write(), None
            except BaseException as raised:
                value, error = {}, raised
            ticket.write = None
            self._resolve(ticket, value, error)
            del ticket

    def _resolve(self, ticket: _Ticket, value: Mapping[str, Any], error: BaseException | None) -> None:
        told: dict[str, Any] = {}
        try:
            told = python_numbers(dict(value))
        except Exception as unusable:  # a snapshot's write may return anything
            error = error or unusable
        text = "" if error is None else f"{ticket.kind} of step {ticket.step}: {describe(error)}"
        stamps = {"begin_ns": ticket.begin_ns, "done_ns": self._clock_ns()}
        try:
            self._on_done(ticket.kind, ticket.step, text)
        except Exception:
            log.exception("ticket %d (%s %d) was not noted as over", ticket.number, ticket.kind, ticket.step)
        report(self._emit, TicketEvent(0, ticket.number, ticket.kind, ticket.step, error is None, told, text, stamps))
        self._note(ticket, stamps["done_ns"], told, text)
        ticket.done.set()

    def _note(self, ticket: _Ticket, done_ns: int, value: Mapping[str, Any], error: str) -> None:
        """The stamps are those of the ticket's event: who reads one or the other finds the same idle."""
        step = ticket.step
        failed: dict[str, Any] = {"error": error} if error else {}
        if ticket.of is not None:
            index, request_id = ticket.of.index, ticket.of.request_id
            self._events.note(
                "scored", ticket.begin_ns, done_ns, step=step, index=index, request_id=request_id, kind=ticket.about,
                **failed,
            )  # fmt: skip
            return
        self._events.note("ticketed", ticket.begin_ns, done_ns, step=step, kind=ticket.kind, **failed)
        if ticket.kind == "checkpoint" and not error:
            self._events.note("checkpoint_durable", done_ns, step=step)
        if ticket.kind == "weights" and not error and not value.get("skipped"):
            self._events.note("weights_published", done_ns, step=step, version=step)

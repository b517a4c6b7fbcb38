"""Events of several hosts as those of one trainer: told when all hosts have told theirs. Pure.

A host's n-th event of a kind about a micro-batch belongs to the other hosts' n-th. Stamps are host 0's: clocks of
different hosts are not compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import xxhash

from shmstage.errors import TrainerError, shown
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.wire.messages import TicketEvent, TokenEvent

Event = TokenEvent | TicketEvent


@dataclass(slots=True)
class _Ticket:
    """One promise of every host. ``of``: the micro-batch it is about, if any."""

    of: str
    events: dict[int, TicketEvent] = field(default_factory=dict)


@final
class FleetEvents:
    """Fed one event after the other; ``take`` gives what is complete."""

    def __init__(self, names: Sequence[str], book: HandleBook) -> None:
        self._names = tuple(names)
        self._book = book
        self._last_number = [0] * len(names)
        self._tokens: dict[tuple[str, int, int], list[deque[TokenEvent]]] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._early: dict[tuple[int, int], TicketEvent] = {}
        self._promised = 0
        self._told = 0
        self._ready: list[Event] = []
        self._disagreement: TrainerError | None = None

    def promised(self, tickets: Sequence[int], *, of: str = "") -> int:
        """Every host's reply named a ticket; returns the number all of them go by from here on."""
        self._promised += 1
        self._tickets[self._promised] = _Ticket(of)
        for host, ticket in enumerate(tickets):
            self._numbers[host, ticket] = self._promised
            early = self._early.pop((host, ticket), None)
            if early is not None:
                self._take_ticket(host, early)
        return self._promised

    def heard(self, host: int, event: Event) -> None:
        """A host told an event; one that it has told before is passed over."""
        if event.number <= self._last_number[host]:
            return
        self._last_number[host] = event.number
        if isinstance(event, TokenEvent):
            self._take_token(host, event)
        else:
            self._take_ticket(host, event)

    def take(self) -> list[Event]:
        """What all hosts have told by now, in the order in which it became complete.

        Raises ``TrainerError`` where the hosts tell different things, and nothing that became complete after it.
        """
        if self._disagreement is not None and not self._ready:
            raise self._disagreement
        ready, self._ready = self._ready, []
        return ready

    def missing(self) -> list[str]:
        """What some hosts have told and others not, in words: who is waited for."""
        told = [
            (f"{kind} {step}.{index}", [name for name, queue in zip(self._names, queues, strict=True) if not queue])
            for (kind, step, index), queues in self._tokens.items()
        ]
        for ticket in self._tickets.values():
            if ticket.events:
                event = next(iter(ticket.events.values()))
                absent = [name for host, name in enumerate(self._names) if host not in ticket.events]
                told.append((f"{event.kind} of step {event.step}", absent))
        return [f"{what} from {', '.join(names)}" for what, names in told]

    def clear(self) -> None:
        """A restore: what was under way before it is over, and told by nobody."""
        self._tokens.clear()
        self._tickets.clear()
        self._numbers.clear()
        self._early.clear()
        self._ready.clear()
        self._disagreement = None

    # --- one host's share -------------------------------------------------------------------------------------

    def _take_token(self, host: int, event: TokenEvent) -> None:
        key = (event.kind, event.step, event.index)
        queues = self._tokens.setdefault(key, [deque() for _ in self._names])
        queues[host].append(event)
        if all(queues):
            self._complete(self._one_token, [queue.popleft() for queue in queues])
            if not any(queues):
                del self._tokens[key]

    def _take_ticket(self, host: int, event: TicketEvent) -> None:
        number = self._numbers.pop((host, event.ticket), None)
        if number is None:  # before the reply that names it, or of a call that failed on another host
            self._early[host, event.ticket] = event
            return
        ticket = self._tickets[number]
        ticket.events[host] = event
        if len(ticket.events) == len(self._names):
            del self._tickets[number]
            events = [replace(ticket.events[each], ticket=number) for each in range(len(self._names))]
            self._complete(self._one_ticket, events)
            if ticket.of:
                self._book.over(ticket.of)

    # --- all of them as one -----------------------------------------------------------------------------------

    def _complete(self, as_one: Callable[[list[Any]], Event], events: list[Any]) -> None:
        if self._disagreement is not None:
            return
        try:
            event = as_one(events)
        except TrainerError as error:
            self._disagreement = error
            return
        self._told += 1
        errors = [f"{name}: {e.error or 'failed'}" for name, e in zip(self._names, events, strict=True) if not e.ok]
        self._ready.append(replace(event, number=self._told, ok=not errors, error="; ".join(errors)))

    def _one_token(self, events: list[TokenEvent]) -> TokenEvent:
        first = events[0]
        wholes = [self._book.whole_of(host, event.request_id) for host, event in enumerate(events)]
        for name, event, whole in zip(self._names, events, wholes, strict=True):
            if whole != wholes[0] and self._book.knows(whole) and self._book.knows(wholes[0]):
                raise TrainerError(
                    f"{event.kind} of {event.step}.{event.index}: {self._names[0]} tells of {wholes[0]}, {name} of "
                    f"{whole}; the hosts do not train the same micro-batch"
                )
        self._book.told(wholes[0], first.kind)
        if first.kind == "update" and all(event.ok for event in events):
            self._book.landed(first.step)
        return replace(first, request_id=wholes[0])

    def _one_ticket(self, events: list[TicketEvent]) -> TicketEvent:
        first = events[0]
        if not all(event.ok for event in events):
            return first
        value = dict(first.value)
        for name, event in zip(self._names, events, strict=True):
            mine, theirs = value.get("denominator"), event.value.get("denominator")
            if mine != theirs:
                raise TrainerError(
                    f"{first.kind} of step {first.step}: the denominator is {shown(mine)} on {self._names[0]} and "
                    f"{shown(theirs)} on {name}; the hosts did not sum the same micro-batches"
                )
        if first.kind == "logps":
            value["request_id"] = self._book.whole_of(0, str(value.get("request_id", "")))
            value["written"] = all(event.value.get("written") for event in events)
            value["digest"] = _digest_of([str(event.value.get("digest", "")) for event in events])
        return replace(first, value=value)


def _digest_of(parts: list[str]) -> str:
    """Of late fields whose parts lie on several hosts; of one host its own."""
    return parts[0] if len(parts) == 1 else xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, parts)))

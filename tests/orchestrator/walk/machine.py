"""The schedule under test, driven through its public methods only, with every answer remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest import mock

from shmstage.orchestrator import schedule, schedule_events, schedule_next
from shmstage.orchestrator.schedule import BoundarySchedule, Command, Config, Key, State

Make = Callable[[Config, State | None], BoundarySchedule]
View = tuple[Command | None, int, Key, bool]

_PLACES = {field.name: place for place, field in enumerate(dataclasses.fields(State))}
_ALL_OF = attrgetter(*_PLACES)


class Machine:
    """Schedule states by number: a number stands for (configuration of this life, state).

    The schedule is pure, so what a state does with an event is computed once, however often the walk comes by, in all
    cases that share the machine.
    """

    def __init__(self, make: Make = BoundarySchedule) -> None:
        self._make = make
        self._numbers: dict[Config, dict[State, int]] = {}
        self._known: list[tuple[Config, State]] = []
        self._answers: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._views: list[View | None] = []

    def start(self, config: Config) -> int:
        return self._number(config, self._make(config, None).state)

    def state(self, number: int) -> State:
        return self._known[number][1]

    def view(self, number: int) -> View:
        """(next command, the number with it in flight, pack limit, waits for a stage)."""
        found = self._views[number]
        if found is None:
            config, state = self._known[number]
            made = self._make(config, state)
            limit, waits = made.pack_limit, made.waits_for_stage
            command = made.next()
            found = (command, self._number(config, made.state), limit, waits)
            self._views[number] = found
        return found

    def tell(self, number: int, event: str, *told: Any, **named: Any) -> tuple[int, Any]:
        """Call the method ``event`` in that state; (the number it leads to, what the method returned)."""
        # a command that is told of is the one in flight, which the number says already
        key = (number, event) if told and isinstance(told[0], Command) else (number, event, told, *named.values())
        found = self._answers.get(key)
        if found is None:
            config, state = self._known[number]
            made = self._make(config, state)
            answer = getattr(made, event)(*told, **named)
            found = (self._number(config, made.state), answer)
            self._answers[key] = found
        return found

    def _number(self, config: Config, state: State) -> int:
        numbers = self._numbers.get(config)
        if numbers is None:
            numbers = self._numbers[config] = {}
        number = numbers.setdefault(state, len(self._known))
        if number == len(self._known):
            self._known.append((config, state))
            self._views.append(None)
        return number


def quick_replace(record: Any, **changes: Any) -> Any:
    """What ``dataclasses.replace`` does, in a third of the time for the schedule's state; a test compares them."""
    if type(record) is not State:
        return dataclasses.replace(record, **changes)
    values = list(_ALL_OF(record))
    for name, value in changes.items():
        values[_PLACES[name]] = value
    return State(*values)


@contextmanager
def quickly() -> Iterator[None]:
    """The schedule's modules copy their state with ``quick_replace`` meanwhile."""
    with mock.patch.multiple(schedule, replace=quick_replace), mock.patch.multiple(
        schedule_events, replace=quick_replace
    ), mock.patch.multiple(schedule_next, replace=quick_replace):
        yield

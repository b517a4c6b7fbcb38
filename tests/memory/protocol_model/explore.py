"""Every state that can be reached, once; and from each, whether all can come to rest again."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from protocol_model.violation import ViolationError

State = tuple[Any, ...]
DEATH = "dies: "
"""What the label of a death begins with: no way out of a state may count on one."""


class Model(Protocol):
    """What can be explored."""

    def begin(self) -> State: ...
    def successors(self, state: State) -> list[tuple[str, State]]: ...
    def check(self, state: State) -> None: ...
    def at_rest(self, state: State) -> bool: ...


@dataclass(frozen=True)
class Explored:
    """``steps`` are the transitions; ``resting`` the states in which everything is free and idle."""

    states: int
    steps: int
    resting: int


def explore(model: Model, *, most_states: int = 1_000_000) -> Explored:
    """Breadth first, so that a trace is a shortest one. Raises ``ViolationError``, also if a state has no way to rest.

    ``most_states`` is no limit that cuts: to reach it is a failure.
    """
    numbers: dict[State, int] = {}
    states: list[State] = []
    came_from = array("l")
    sources, targets = array("l"), array("l")
    resting = array("l")
    steps = 0

    def numbered(state: State, source: int) -> int:
        if len(states) >= most_states:
            raise AssertionError(f"cut at {most_states} states; raise the limit or make the case smaller")
        number = numbers[state] = len(states)
        states.append(state)
        came_from.append(source)
        return number

    numbered(model.begin(), -1)
    at = 0
    try:
        while at < len(states):
            state = states[at]
            model.check(state)
            if model.at_rest(state):
                resting.append(at)
            for label, following in model.successors(state):
                steps += 1
                target = numbers.get(following)
                if target is None:
                    target = numbered(following, at)
                if not label.startswith(DEATH):
                    sources.append(at)
                    targets.append(target)
            at += 1
    except ViolationError as error:
        error.trace = trace_to(model, states, came_from, at)
        raise
    lost = _without_a_way(len(states), sources, targets, resting)
    if lost is not None:
        error = ViolationError("lost for ever", "nothing that can still happen frees every slot")
        error.trace = trace_to(model, states, came_from, lost)
        raise error
    return Explored(len(states), steps, len(resting))


def _without_a_way(count: int, sources: array[int], targets: array[int], resting: array[int]) -> int | None:
    """The first state from which no state at rest is reached."""
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    found = bytearray(count)
    open_states = list(resting)
    for number in open_states:
        found[number] = 1
    while open_states:
        for source in before[open_states.pop()]:
            if not found[source]:
                found[source] = 1
                open_states.append(source)
    lost = found.find(0)
    return None if lost < 0 else lost


def trace_to(model: Model, states: list[State], came_from: array[int], number: int) -> list[str]:
    """The labels of the steps from the beginning, for people to read."""
    path = [number]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    path.reverse()
    trace = []
    for source, target in pairwise(path):
        label = next(label for label, to in model.successors(states[source]) if to == states[target])
        trace.append(f"{label}: {states[target]}")
    return trace

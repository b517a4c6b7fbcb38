"""Expands every state once and counts the orders: maximal event sequences, by dynamic programming over the graph."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from walk.cases import Case
from walk.facts import State, Step, described
from walk.invariants import ViolationError
from walk.machine import Machine
from walk.world import World


@dataclass(frozen=True)
class Walked:
    """``orders`` are the paths from the beginning to an end of the run."""

    states: int
    orders: int


@dataclass(slots=True)
class _Visit:
    """A state on the path that is being followed."""

    steps: list[Step]
    next_step: int = 0
    orders: int = 0


def walk(case: Case, machine: Machine | None = None, *, most_states: int = 2_000_000) -> Walked:
    """Depth first to the end of every path. Raises ``ViolationError`` with the events that lead to it.

    ``most_states`` is no limit that cuts: to reach it is a failure.
    """
    world = World(case, machine or Machine())
    begin = world.begin()
    orders: dict[State, int] = {}  # -1 for the states on the path
    path: list[tuple[State, _Visit]] = []

    def enter(state: State) -> None:
        orders[state] = -1
        try:
            steps = world.successors(state)
        except ViolationError as error:
            error.trace = [*_labels(path), described(state)]
            raise
        path.append((state, _Visit(steps, orders=0 if steps else 1)))

    enter(begin)
    while path:
        state, visit = path[-1]
        if visit.next_step == len(visit.steps):
            orders[state] = visit.orders
            path.pop()
            if path:
                path[-1][1].orders += visit.orders
            continue
        label, following = visit.steps[visit.next_step]
        visit.next_step += 1
        known = orders.get(following)
        if known is None:
            if len(orders) >= most_states:
                raise AssertionError(f"{case}: cut at {most_states} states; raise the limit or split the case")
            enter(following)
        elif known >= 0:
            visit.orders += known
        else:
            error = ViolationError("ends", f"{label} leads back to a state on the way")
            error.trace = _labels(path)
            raise error
    return Walked(len(orders), orders[begin])


def _labels(path: list[tuple[State, _Visit]]) -> list[str]:
    return [visit.steps[visit.next_step - 1][0] for _, visit in path]


def shortest_trace(case: Case, machine: Machine | None = None) -> ViolationError | None:
    """Breadth first to the nearest violation, for people to read."""
    world = World(case, machine or Machine())
    begin = world.begin()
    came_from: dict[State, tuple[State, str] | None] = {begin: None}
    waiting = deque([begin])
    while waiting:
        state = waiting.popleft()
        try:
            steps = world.successors(state)
        except ViolationError as error:
            trace = [described(state)]
            back = came_from[state]
            while back is not None:
                trace.append(back[1])
                back = came_from[back[0]]
            error.trace = trace[::-1]
            return error
        for label, following in steps:
            if following not in came_from:
                came_from[following] = (state, label)
                waiting.append(following)
    return None

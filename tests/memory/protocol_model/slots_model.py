"""The slot model: writers, tasks, handles on their way, deaths, and what the living make of them.

The steps are sequentially consistent: that the code's loads and stores are strong enough is for the thread sanitizer
and the comments in ``native/slots.cpp``; that they come in this order is compared access by access with the code
itself (``test_model_and_code.py``).
"""

from __future__ import annotations

from protocol_model.explore import DEATH
from protocol_model.slots_case import Case
from protocol_model.slots_state import (
    ALIVE,
    ANNOUNCING,
    DEAD,
    LOST,
    PC,
    STALE,
    THREAD_WORDS,
    WAITING,
    Facts,
    Map,
    Pc,
    State,
)
from protocol_model.task import Tasks
from protocol_model.violation import require
from protocol_model.writer import Writers

Steps = list[tuple[str, State]]


class SlotsModel:
    """``successors`` are all that can happen next; ``check`` what must hold in every state."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.at = Map(case)
        self.writers = Writers(case, self.at)
        self.tasks = [Tasks(case, self.at, consumer) for consumer in range(case.consumers)]
        self._writer_names = [f"writer {number}" for number in range(case.writers)]
        self._task_names = [[f"consumer {c}.{number}" for number in range(case.tasks)] for c in range(case.consumers)]
        self._pcs = [base + PC for base in (*self.at.writers, *(base for tasks in self.at.tasks for base in tasks))]

    def begin(self) -> State:
        at = self.at
        m: Facts = [0] * at.size
        m[at.owner] = m[at.epoch] = 1
        m[at.deaths] = self.case.deaths
        for consumer in range(self.case.consumers):
            m[at.alive + consumer] = ALIVE
            m[at.incarnations + consumer] = self.case.incarnations - 1
            m[at.unsent + consumer] = m[at.sent + consumer] = ()
        return tuple(m)

    def successors(self, state: State) -> Steps:
        at = self.at
        steps: Steps = []
        if state[at.owner] == ALIVE:
            for number, name in enumerate(self._writer_names):
                steps += [(name, tuple(m)) for m in self.writers.choices(state, number)]
            steps += self._sends(state)
        for consumer, tasks in enumerate(self.tasks):
            if state[at.alive + consumer] == ALIVE:
                for number, name in enumerate(self._task_names[consumer]):
                    steps += [(name, tuple(m)) for m in tasks.choices(state, number)]
            elif state[at.alive + consumer] == LOST and state[at.incarnations + consumer] and not state[at.lock]:
                m = list(state)
                m[at.alive + consumer] = ALIVE
                m[at.incarnations + consumer] -= 1
                steps.append((f"another consumer {consumer}", tuple(m)))
        if state[at.owner] == DEAD:
            m = list(state)
            m[at.owner] = LOST
            steps.append(("sweep", tuple(m)))
        if state[at.owner] == LOST and self.case.takeover and state[at.epoch] == 1:
            steps += self._taken_over(state)
        if state[at.deaths]:
            steps += self._deaths(state)
        return steps

    def _sends(self, state: State) -> Steps:
        at = self.at
        steps = []
        for consumer in range(self.case.consumers):
            if state[at.unsent + consumer] and state[at.alive + consumer] == ALIVE and not state[at.lock]:
                m = list(state)
                first, *rest = state[at.unsent + consumer]
                m[at.unsent + consumer] = tuple(rest)
                m[at.sent + consumer] += (first,)
                steps.append((f"send to {consumer}", tuple(m)))
        return steps

    def _deaths(self, state: State) -> Steps:
        at = self.at
        steps = []
        if state[at.owner] == ALIVE:
            m = list(state)
            m[at.deaths] -= 1
            m[at.owner] = DEAD
            m[at.lock] = 0
            for base in at.writers:
                m[base : base + THREAD_WORDS] = (0,) * THREAD_WORDS
            for consumer in range(self.case.consumers):
                m[at.unsent + consumer] = ()
            steps.append((f"{DEATH}owner", tuple(m)))
        for consumer in range(self.case.consumers):
            if state[at.alive + consumer] == ALIVE:
                m = list(state)
                m[at.deaths] -= 1
                m[at.alive + consumer] = DEAD
                m[at.sent + consumer] = ()
                for base in at.tasks[consumer]:
                    if m[base + PC] in ANNOUNCING:
                        self._wakes_nobody(m)
                    m[base : base + THREAD_WORDS] = (0,) * THREAD_WORDS
                steps.append((f"{DEATH}consumer {consumer}", tuple(m)))
        return steps

    def _wakes_nobody(self, m: Facts) -> None:
        # who waits finds out when its slice of time is over, or when the dead one is given up
        for writer in self.at.writers:
            if m[writer + WAITING] and m[writer + PC] != Pc.WAIT_SEQUENCE:
                m[writer + STALE] |= 2

    def _taken_over(self, state: State) -> Steps:
        """The next owner has agreed with every living consumer that it holds nothing of the old pool any more."""
        at, case = self.at, self.case
        m = list(self.begin())
        for consumer in range(case.consumers):
            for base in at.tasks[consumer]:
                if state[at.alive + consumer] == ALIVE and state[base + PC] != Pc.IDLE:
                    return []
                if "an old lease is ended in the new pool" in case.faults:
                    m[base : base + THREAD_WORDS] = state[base : base + THREAD_WORDS]
            m[at.alive + consumer] = ALIVE if state[at.alive + consumer] == ALIVE else LOST
            m[at.incarnations + consumer] = state[at.incarnations + consumer]
            m[at.sent + consumer] = state[at.sent + consumer]
        m[at.epoch], m[at.deaths] = 2, state[at.deaths]
        return [("another owner", tuple(m))]

    # --- what must hold -------------------------------------------------------------------------------------

    def is_free(self, state: State, slot: int) -> bool:
        at = self.at
        generation, mask = state[at.generation + slot], state[at.mask + slot]
        ended = at.ended + slot * self.case.consumers
        return generation % 2 == 0 and all(
            state[ended + consumer] >= generation for consumer in range(self.case.consumers) if mask >> consumer & 1
        )

    def check(self, state: State) -> None:
        """No lost wake-up: who sleeps beside a free slot is about to be woken."""
        at = self.at
        asleep = [base for base in at.writers if state[base + PC] == Pc.ASLEEP and not state[base + STALE] & 2]
        if not asleep:
            return
        if any(state[pc] in ANNOUNCING for pc in self._pcs):
            return
        require(not any(state[base + STALE] for base in asleep), "asleep", "a waiter sleeps and its wake-up is over")
        free = [slot for slot in range(self.case.slots) if self.is_free(state, slot)]
        require(not free, "asleep", f"a waiter sleeps although slot {free} is free, and nobody will wake it")

    def at_rest(self, state: State) -> bool:
        """All slots are free, all threads idle, nothing is on its way; or the pool is swept."""
        at, case = self.at, self.case
        if state[at.owner] != ALIVE:
            return bool(state[at.owner] == LOST)
        for pc in self._pcs:
            if state[pc]:
                return False
        return (
            not state[at.lock]
            and all(self.is_free(state, slot) for slot in range(case.slots))
            and all(
                state[at.alive + consumer] != DEAD
                and not state[at.sent + consumer] and not state[at.unsent + consumer]
                for consumer in range(case.consumers)
            )
        )  # fmt: skip

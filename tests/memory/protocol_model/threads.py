"""What writers and tasks both do: end a lease, say that a slot may be free. ``native/slots.cpp``, access by access."""

from __future__ import annotations

from collections.abc import Callable

from protocol_model.slots_case import Case
from protocol_model.slots_state import GEN, MASK, PC, SLOT, STALE, WAITING, Facts, Map, Pc
from protocol_model.violation import require


class Threads:
    """Base of the two kinds of threads. A step function changes the facts and leaves the thread at its next access."""

    def __init__(self, case: Case, where: Map) -> None:
        self.case = case
        self.at = where
        self.consumers = case.consumers
        self.faults = case.faults

    def end_steps(
        self, consumer_of: Callable[[Facts, int], int], ended: Callable[[Facts, int], None],
        announced: Callable[[Facts, int], None], freed: Callable[[Facts, int], None] = lambda m, b: None,
    ) -> dict[Pc, Callable[[Facts, int], None]]:  # fmt: skip
        """``end_lease`` of the generation in GEN.

        ``freed``: the cell says so now; ``ended``: nothing was left to do; ``announced``: all is done.
        """
        at, consumers, faults = self.at, self.consumers, self.faults
        ends_blindly = "an ended cell can go back" in faults
        silent = "ending a lease wakes nobody" in faults

        def generation(m: Facts, b: int) -> None:
            known = m[b + GEN] <= m[at.generation + m[b + SLOT]]
            require(known, "refused", "the end of a lease that was given is refused")
            m[b + PC] = Pc.END_ENDED

        def load(m: Facts, b: int) -> None:
            m[b + MASK] = m[at.ended + m[b + SLOT] * consumers + consumer_of(m, b)]
            if m[b + MASK] < m[b + GEN] or ends_blindly:
                m[b + PC] = Pc.END_SWAP
            else:
                m[b + MASK] = 0
                ended(m, b)

        def swap(m: Facts, b: int) -> None:
            word = at.ended + m[b + SLOT] * consumers + consumer_of(m, b)
            if m[word] == m[b + MASK] or ends_blindly:
                m[word] = m[b + GEN]
                freed(m, b)
                m[b + PC] = Pc.ANNOUNCE_ADD
                m[b + MASK] = 0
                if silent:
                    announced(m, b)
            else:
                m[b + MASK] = 0
                m[b + PC] = Pc.END_ENDED

        return {Pc.END_GENERATION: generation, Pc.END_ENDED: load, Pc.END_SWAP: swap, **self.announcing(announced)}

    def announcing(self, announced: Callable[[Facts, int], None]) -> dict[Pc, Callable[[Facts, int], None]]:
        at = self.at
        unmoved = "a wake-up does not move the sequence" in self.faults

        def add(m: Facts, b: int) -> None:
            if not unmoved:
                self.move_sequence(m)
            m[b + PC] = Pc.ANNOUNCE_LOOK

        def look(m: Facts, b: int) -> None:
            if m[at.waiters]:
                m[b + PC] = Pc.ANNOUNCE_WAKE
            else:
                announced(m, b)

        def wake(m: Facts, b: int) -> None:
            for writer in at.writers:
                if m[writer + PC] == Pc.ASLEEP:
                    m[writer + PC] = Pc.WAIT_SEQUENCE
            announced(m, b)

        return {Pc.ANNOUNCE_ADD: add, Pc.ANNOUNCE_LOOK: look, Pc.ANNOUNCE_WAKE: wake}

    def move_sequence(self, m: Facts) -> None:
        """free_sequence goes up: only who has looked at it and will compare can tell."""
        for writer in self.at.writers:
            if m[writer + WAITING] and m[writer + PC] != Pc.WAIT_SEQUENCE:
                m[writer + STALE] |= 1

"""A thread of a consumer: leases what a handle names, reads it, looks again, ends the lease, perhaps once more."""

from __future__ import annotations

from collections.abc import Callable

from protocol_model.slots_case import Case
from protocol_model.slots_state import (
    GEN,
    LAST,
    MASK,
    PC,
    READING,
    SAME,
    SLOT,
    Facts,
    Map,
    Pc,
    State,
    epoch_of,
    generation_of,
    handle,
    slot_of,
)
from protocol_model.threads import Threads
from protocol_model.violation import require

Step = Callable[[Facts, int], None]


class Tasks(Threads):
    """The tasks of one consumer."""

    def __init__(self, case: Case, where: Map, consumer: int) -> None:
        super().__init__(case, where)
        self.consumer = consumer
        #: nothing that was sent once and not taken back may be refused
        self.certain = not (case.recalls or case.resends or case.takeover)
        self.steps: dict[Pc, Step] = {
            Pc.LEASE_GENERATION: self._lease_generation, Pc.LEASE_MASK: self._lease_mask,
            Pc.LEASE_AGAIN: self._lease_again, Pc.LEASE_ENDED: self._lease_ended,
            Pc.READ_0: self._read_0, Pc.READ_1: self._read_1,
            **self.end_steps(lambda m, b: consumer, self._ended, self._ended, self._freed),
        }  # fmt: skip

    def choices(self, state: State, number: int) -> list[Facts]:
        b = self.at.tasks[self.consumer][number]
        if state[b + PC] != Pc.IDLE:
            m = list(state)
            self.steps[state[b + PC]](m, b)
            return [m]
        found = []
        if state[self.at.sent + self.consumer]:
            found.append(self._received(list(state), b))
            if self.case.resends and not state[self.at.resent + self.consumer]:
                again = list(state)
                again[self.at.resent + self.consumer] = 1
                again[self.at.sent + self.consumer] += state[self.at.sent + self.consumer][:1]
                found.append(self._received(again, b))
        if state[b + LAST]:
            m = list(state)
            m[b + SLOT], m[b + GEN], m[b + LAST] = slot_of(m[b + LAST]), generation_of(m[b + LAST]), 0
            self.steps[Pc.END_GENERATION](m, b)
            found.append(m)
        return found

    def _received(self, m: Facts, b: int) -> Facts:
        name, *rest = m[self.at.sent + self.consumer]
        m[self.at.sent + self.consumer] = tuple(rest)
        if epoch_of(name) != m[self.at.epoch] and "a handle of another epoch is taken" not in self.faults:
            return m  # refused by the transport: every message carries its epoch
        m[b + SLOT], m[b + GEN] = slot_of(name), generation_of(name)
        m[b + LAST] = name  # while it is read: what a right reader must find
        self.steps[Pc.LEASE_GENERATION](m, b)
        return m

    # --- lease_state, before and after reading --------------------------------------------------------------

    def _lease_generation(self, m: Facts, b: int) -> None:
        if m[b + GEN] > m[self.at.generation + m[b + SLOT]]:
            self._refused(m, b)
        else:
            m[b + PC] = Pc.LEASE_MASK

    def _lease_mask(self, m: Facts, b: int) -> None:
        m[b + MASK] = m[self.at.mask + m[b + SLOT]] >> self.consumer & 1
        m[b + PC] = Pc.LEASE_AGAIN

    def _lease_again(self, m: Facts, b: int) -> None:
        targeted, m[b + MASK] = m[b + MASK], 0
        if m[self.at.generation + m[b + SLOT]] != m[b + GEN] or not targeted:
            self._refused(m, b)
        else:
            m[b + PC] = Pc.LEASE_ENDED

    def _lease_ended(self, m: Facts, b: int) -> None:
        if m[self.at.ended + m[b + SLOT] * self.consumers + self.consumer] >= m[b + GEN]:
            self._refused(m, b)
        elif not m[b + READING]:
            m[b + READING], m[b + PC] = 1, Pc.READ_0
        else:
            self._trusted(m, b)

    def _trusted(self, m: Facts, b: int) -> None:
        require(m[b + SAME] == 3, "half-written", f"consumer {self.consumer} trusts what is not what the handle names")
        m[b + SAME] = 0
        m[b + PC] = Pc.END_GENERATION

    def _refused(self, m: Facts, b: int) -> None:
        require(not self.certain, "refused", "a handle that was sent once and not taken back is refused")
        m[b + SAME] = 0
        if m[b + READING]:
            m[b + PC] = Pc.END_GENERATION
        else:
            m[b + PC] = Pc.IDLE
            m[b + SLOT] = m[b + GEN] = m[b + LAST] = 0

    # --- the reader's own -----------------------------------------------------------------------------------

    def _read_0(self, m: Facts, b: int) -> None:
        m[b + SAME] = self._matches(m, b, self.at.half_0)
        m[b + PC] = Pc.READ_1
        if "a lease ends while it is still read" in self.faults:
            m[self.at.ended + m[b + SLOT] * self.consumers + self.consumer] = m[b + GEN]

    def _read_1(self, m: Facts, b: int) -> None:
        m[b + SAME] |= self._matches(m, b, self.at.half_1) << 1
        if "nobody looks again after reading" in self.faults:
            self._trusted(m, b)
        else:
            m[b + PC] = Pc.LEASE_GENERATION

    def _matches(self, m: Facts, b: int, half: int) -> int:
        return int(m[half + m[b + SLOT]] == handle(epoch_of(m[b + LAST]), 0, m[b + GEN]))

    @staticmethod
    def _freed(m: Facts, b: int) -> None:
        m[b + READING] *= 2  # over, but it was the first end of this lease

    def _ended(self, m: Facts, b: int) -> None:
        last = m[b + LAST] if m[b + READING] else 0  # it may be ended once more
        m[b + SLOT] = m[b + GEN] = m[b + MASK] = m[b + READING] = 0
        m[b + PC] = Pc.IDLE
        m[b + LAST] = last

"""A thread of the pool's owner: claims, fills, publishes, takes back, gives up the dead."""

from __future__ import annotations

from collections.abc import Callable

from protocol_model.slots_case import Case
from protocol_model.slots_state import (
    ALIVE,
    GEN,
    GIVES_UP,
    LOST,
    MASK,
    PC,
    READING,
    SLOT,
    STALE,
    THREAD_WORDS,
    WAITING,
    Facts,
    Map,
    Pc,
    State,
    handle,
)
from protocol_model.threads import Threads
from protocol_model.violation import require

Step = Callable[[Facts, int], None]


class Writers(Threads):
    """``steps[pc](facts, base)`` is the one access at that place; ``choices`` are what is open at a choice."""

    def __init__(self, case: Case, where: Map) -> None:
        super().__init__(case, where)
        self.steps: dict[Pc, Step] = {
            Pc.CLAIM_GENERATION: self._claim_generation, Pc.CLAIM_MASK: self._claim_mask,
            Pc.CLAIM_ENDED: self._claim_ended, Pc.CLAIM_SWAP: self._claim_swap, Pc.WAIT_COUNT: self._wait_count,
            Pc.WAIT_SEQUENCE: self._wait_sequence, Pc.WAIT_FUTEX: self._futex,
            Pc.WAIT_UNCOUNT: self._wait_uncount,
            Pc.FILL_0: self._fill_0, Pc.FILL_1: self._fill_1,
            Pc.PUBLISH_CHECK: self._publish_check, Pc.PUBLISH_MASK: self._publish_mask,
            Pc.PUBLISH_GENERATION: self._publish_generation,
            Pc.ABANDON_CHECK: self._abandon_check, Pc.ABANDON_MASK: self._abandon_mask,
            Pc.ABANDON_SWAP: self._abandon_swap, Pc.WITHDRAW_CHECK: self._withdraw_check,
            Pc.WITHDRAW_SWAP: self._withdraw_swap, Pc.WITHDRAW_MASK: self._withdraw_mask,
            Pc.WITHDRAW_GENERATION: self._withdraw_generation, Pc.GIVE_UP_GENERATION: self._give_up_generation,
            Pc.GIVE_UP_MASK: self._give_up_mask,
            **self.end_steps(lambda m, b: m[b + GIVES_UP] - 1, self._next_given_up, self._announced),
        }  # fmt: skip

    def choices(self, state: State, number: int) -> list[Facts]:
        """What the thread may do next, each with its first access done."""
        b = self.at.writers[number]
        pc = state[b + PC]
        if pc == Pc.IDLE:
            return self._when_idle(state, number, b)
        if pc == Pc.WAIT_FUTEX:
            return [self._begun(list(state), b, Pc.WAIT_FUTEX), self._begun(list(state), b, Pc.WAIT_UNCOUNT)]
        if pc == Pc.ASLEEP:
            m = list(state)
            m[b + PC] = Pc.WAIT_SEQUENCE  # its slice of time is over
            return [m]
        if pc == Pc.FILLED:
            return self._when_filled(state, number, b)
        m = list(state)
        self.steps[pc](m, b)
        return [m, *([self._begun(list(state), b, Pc.ABANDON_CHECK)] if self._may_raise(pc) else [])]

    def _may_raise(self, pc: Pc) -> bool:
        return pc == Pc.FILL_1 and self.case.abandons

    def _begun(self, m: Facts, b: int, pc: Pc) -> Facts:
        m[b + PC] = pc
        self.steps[pc](m, b)
        return m

    # --- what it may begin ----------------------------------------------------------------------------------

    def _when_idle(self, state: State, number: int, b: int) -> list[Facts]:
        at, case = self.at, self.case
        found: list[Facts] = []
        generations = state[at.generation : at.generation + case.slots]
        if sum(generations) < 2 * case.generations:
            found.append(self._begun(list(state), b, Pc.CLAIM_GENERATION))
        if case.withdraws or case.recalls:
            for slot, generation in enumerate(generations):
                taken = self._withdrawn(state, slot, generation)
                if taken is not None:
                    taken[b + SLOT], taken[b + GEN] = slot, generation
                    found.append(self._begun(taken, b, Pc.WITHDRAW_CHECK))
        patient = "a dead consumer's leases are left to time" in self.faults
        if (not state[at.lock] or "a dead consumer is given up beside publishing" in self.faults) and not patient:
            for consumer in range(case.consumers):
                if state[at.alive + consumer] == 0:
                    m = list(state)
                    m[at.lock] = number + 1
                    m[at.alive + consumer] = LOST
                    m[at.unsent + consumer] = ()
                    m[b + GIVES_UP] = consumer + 1
                    found.append(self._begun(m, b, Pc.GIVE_UP_GENERATION))
        return found

    def _withdrawn(self, state: State, slot: int, generation: int) -> Facts | None:
        """The facts with the handle out of the owner's hands, if it may be taken back."""
        at, case = self.at, self.case
        mask = state[at.mask + slot]
        if generation % 2 or not mask or state[at.lock]:
            return None
        name = handle(state[at.epoch], slot, generation)
        m = list(state)
        for consumer in range(case.consumers):
            if mask >> consumer & 1:
                if name not in m[at.unsent + consumer] and not case.recalls:
                    return None
                m[at.unsent + consumer] = tuple(each for each in m[at.unsent + consumer] if each != name)
        return m

    def _when_filled(self, state: State, number: int, b: int) -> list[Facts]:
        at, case = self.at, self.case
        found: list[Facts] = []
        lost = any(state[at.alive + consumer] == LOST for consumer in range(case.consumers))
        if case.abandons or lost:
            found.append(self._begun(list(state), b, Pc.ABANDON_CHECK))
        beside = "a dead consumer is given up beside publishing" in self.faults
        if (not state[at.lock] and not lost) or beside:
            for mask in case.all_masks:
                m = list(state)
                m[at.lock] = number + 1
                m[b + MASK] = mask
                found.append(self._begun(m, b, Pc.PUBLISH_CHECK))
        return found

    # --- claim ----------------------------------------------------------------------------------------------

    def _claim_generation(self, m: Facts, b: int) -> None:
        generation = m[self.at.generation + m[b + SLOT]]
        if generation % 2:
            self._claim_next(m, b)
        else:
            m[b + GEN], m[b + PC] = generation, Pc.CLAIM_MASK

    def _claim_mask(self, m: Facts, b: int) -> None:
        m[b + MASK] = m[self.at.mask + m[b + SLOT]]
        if "only the first consumer is asked" in self.faults:
            m[b + MASK] &= 1
        m[b + PC] = Pc.CLAIM_ENDED if m[b + MASK] else Pc.CLAIM_SWAP

    def _claim_ended(self, m: Facts, b: int) -> None:
        consumer = (m[b + MASK] & -m[b + MASK]).bit_length() - 1
        ended = m[self.at.ended + m[b + SLOT] * self.consumers + consumer]
        if ended < m[b + GEN] - 2 * ("one generation is taken for another" in self.faults):
            self._claim_next(m, b)
            return
        m[b + MASK] &= m[b + MASK] - 1
        if not m[b + MASK]:
            m[b + PC] = Pc.CLAIM_SWAP

    def _claim_swap(self, m: Facts, b: int) -> None:
        word = self.at.generation + m[b + SLOT]
        if m[word] != m[b + GEN] and "a slot is taken without comparing" not in self.faults:
            self._claim_next(m, b)
            return
        m[word] = m[b + GEN] = m[b + GEN] + 1
        for writer in self.at.writers:
            twice = writer != b and m[writer + GEN] % 2 and m[writer + SLOT] == m[b + SLOT]
            require(not twice, "one writer", f"two threads write slot {m[b + SLOT]} at once")
        m[b + PC] = Pc.WAIT_UNCOUNT if m[b + WAITING] else Pc.FILL_0

    def _claim_next(self, m: Facts, b: int) -> None:
        m[b + SLOT] += 1
        m[b + GEN] = m[b + MASK] = 0
        if m[b + SLOT] < self.case.slots:
            m[b + PC] = Pc.CLAIM_GENERATION
        else:
            m[b + SLOT] = 0
            m[b + PC] = Pc.WAIT_FUTEX if m[b + WAITING] else Pc.WAIT_COUNT

    def _wait_count(self, m: Facts, b: int) -> None:
        m[self.at.waiters] += 1
        m[b + WAITING], m[b + PC] = 1, Pc.WAIT_SEQUENCE

    def _wait_sequence(self, m: Facts, b: int) -> None:
        m[b + STALE], m[b + PC] = 0, Pc.CLAIM_GENERATION
        if "who waits does not look again before it sleeps" in self.faults:
            m[b + PC] = Pc.WAIT_FUTEX

    def _futex(self, m: Facts, b: int) -> None:
        # the kernel compares and goes to sleep in one step
        asleep = not m[b + STALE] & 1 or "the kernel is not told what was seen" in self.faults
        m[b + PC] = Pc.ASLEEP if asleep else Pc.WAIT_SEQUENCE
        if not asleep:
            m[b + STALE] = 0

    def _wait_uncount(self, m: Facts, b: int) -> None:
        m[self.at.waiters] -= 1
        m[b + WAITING] = m[b + STALE] = 0
        m[b + PC] = Pc.FILL_0 if m[b + GEN] % 2 else Pc.IDLE

    # --- fill, publish, discard -----------------------------------------------------------------------------

    def _fill_0(self, m: Facts, b: int) -> None:
        self._write(m, b, self.at.half_0)
        m[b + PC] = Pc.FILL_1

    def _fill_1(self, m: Facts, b: int) -> None:
        self._write(m, b, self.at.half_1)
        m[b + PC] = Pc.FILLED

    def _write(self, m: Facts, b: int, half: int) -> None:
        slot = m[b + SLOT]
        m[half + slot] = handle(m[self.at.epoch], 0, m[b + GEN] + 1)
        if self.case.recalls or self.case.resends:
            return  # then a lease may end under its reader, which sees it afterwards
        for consumer, tasks in enumerate(self.at.tasks):
            for task in tasks:
                read = m[self.at.alive + consumer] == ALIVE and m[task + READING] == 1 and m[task + SLOT] == slot
                require(not read, "rewritten", f"slot {slot} is written while consumer {consumer} reads it")

    def _publish_check(self, m: Facts, b: int) -> None:
        require(m[self.at.generation + m[b + SLOT]] == m[b + GEN], "refused", "a writer's own slot is not published")
        m[b + PC] = Pc.PUBLISH_MASK
        if "the generation is stored before the mask" in self.faults:
            m[b + PC] = Pc.PUBLISH_GENERATION

    def _publish_mask(self, m: Facts, b: int) -> None:
        m[self.at.mask + m[b + SLOT]] = m[b + MASK]
        m[b + PC] = Pc.PUBLISH_GENERATION
        if "the generation is stored before the mask" in self.faults:
            self._published(m, b)

    def _publish_generation(self, m: Facts, b: int) -> None:
        m[self.at.generation + m[b + SLOT]] = m[b + GEN] + 1
        if "the generation is stored before the mask" in self.faults:
            m[b + PC] = Pc.PUBLISH_MASK
        elif m[b + MASK] or "what is published for nobody frees its slot in silence" in self.faults:
            self._published(m, b)
        else:
            m[self.at.lock] = m[b + GEN] = 0
            m[b + PC] = Pc.ANNOUNCE_ADD

    def _published(self, m: Facts, b: int) -> None:
        at = self.at
        name = handle(m[at.epoch], m[b + SLOT], m[b + GEN] + 1)
        for consumer in range(self.consumers):
            if m[b + MASK] >> consumer & 1:
                m[at.unsent + consumer] += (name,)
        m[at.lock] = 0
        self._rest(m, b)

    def _abandon_check(self, m: Facts, b: int) -> None:
        require(m[self.at.generation + m[b + SLOT]] == m[b + GEN], "refused", "a writer's own slot is not taken back")
        m[b + PC] = Pc.ABANDON_MASK
        if "an abandoned slot keeps its mask" in self.faults:
            m[b + PC] = Pc.ABANDON_SWAP

    def _abandon_mask(self, m: Facts, b: int) -> None:
        m[self.at.mask + m[b + SLOT]] = 0
        m[b + PC] = Pc.ABANDON_SWAP

    def _abandon_swap(self, m: Facts, b: int) -> None:
        m[self.at.generation + m[b + SLOT]] = m[b + GEN] + 1
        m[b + GEN] = m[b + MASK] = 0
        m[b + PC] = Pc.ANNOUNCE_ADD

    def _withdraw_check(self, m: Facts, b: int) -> None:
        m[b + PC] = Pc.WITHDRAW_SWAP
        if m[self.at.generation + m[b + SLOT]] != m[b + GEN]:
            self._rest(m, b)

    def _withdraw_swap(self, m: Facts, b: int) -> None:
        word = self.at.generation + m[b + SLOT]
        if m[word] != m[b + GEN]:
            self._rest(m, b)  # its consumers ended it first, and it was claimed
            return
        if "a slot is withdrawn without the odd generation" in self.faults:
            m[b + PC] = Pc.WITHDRAW_MASK
            return
        m[word] = m[b + GEN] + 1
        m[b + PC] = Pc.WITHDRAW_MASK

    def _withdraw_mask(self, m: Facts, b: int) -> None:
        m[self.at.mask + m[b + SLOT]] = 0
        m[b + PC] = Pc.WITHDRAW_GENERATION

    def _withdraw_generation(self, m: Facts, b: int) -> None:
        m[self.at.generation + m[b + SLOT]] = m[b + GEN] + 2
        m[b + GEN] = 0
        m[b + PC] = Pc.ANNOUNCE_ADD

    # --- the dead -------------------------------------------------------------------------------------------

    def _give_up_generation(self, m: Facts, b: int) -> None:
        generation = m[self.at.generation + m[b + SLOT]]
        if generation % 2:
            self._next_given_up(m, b)
        else:
            m[b + GEN], m[b + PC] = generation, Pc.GIVE_UP_MASK

    def _give_up_mask(self, m: Facts, b: int) -> None:
        if m[self.at.mask + m[b + SLOT]] >> (m[b + GIVES_UP] - 1) & 1:
            m[b + PC] = Pc.END_GENERATION
        else:
            self._next_given_up(m, b)

    def _next_given_up(self, m: Facts, b: int) -> None:
        m[b + GEN] = m[b + MASK] = 0
        m[b + SLOT] += 1
        m[b + PC] = Pc.GIVE_UP_GENERATION
        if m[b + SLOT] == self.case.slots:
            m[self.at.lock] = 0
            self._rest(m, b)

    def _announced(self, m: Facts, b: int) -> None:
        if m[b + GIVES_UP]:
            self._next_given_up(m, b)
        else:
            self._rest(m, b)

    @staticmethod
    def _rest(m: Facts, b: int) -> None:
        m[b : b + THREAD_WORDS] = (0,) * THREAD_WORDS

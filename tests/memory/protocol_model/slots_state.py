"""Where everything lies in a state of the slot model: one flat tuple of numbers (and of tuples of handles)."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Any

from protocol_model.slots_case import Case

State = tuple[Any, ...]
Facts = list[Any]
"""A state while it is changed."""


class Pc(IntEnum):
    """What a thread does next. One per access to shared memory, in the order of ``native/slots.cpp``."""

    IDLE = 0
    # claim
    CLAIM_GENERATION = auto()
    CLAIM_MASK = auto()
    CLAIM_ENDED = auto()
    CLAIM_SWAP = auto()
    WAIT_COUNT = auto()
    WAIT_SEQUENCE = auto()
    WAIT_FUTEX = auto()
    ASLEEP = auto()
    WAIT_UNCOUNT = auto()
    # the writer's own
    FILL_0 = auto()
    FILL_1 = auto()
    FILLED = auto()
    # publish
    PUBLISH_CHECK = auto()
    PUBLISH_MASK = auto()
    PUBLISH_GENERATION = auto()
    # discard of a slot that is being written
    ABANDON_CHECK = auto()
    ABANDON_MASK = auto()
    ABANDON_SWAP = auto()
    # discard of a published slot
    WITHDRAW_CHECK = auto()
    WITHDRAW_SWAP = auto()
    WITHDRAW_MASK = auto()
    WITHDRAW_GENERATION = auto()
    # Pool.end_leases_of, one slot after another
    GIVE_UP_GENERATION = auto()
    GIVE_UP_MASK = auto()
    # lease_state
    LEASE_GENERATION = auto()
    LEASE_MASK = auto()
    LEASE_AGAIN = auto()
    LEASE_ENDED = auto()
    # the reader's own
    READ_0 = auto()
    READ_1 = auto()
    # end_lease
    END_GENERATION = auto()
    END_ENDED = auto()
    END_SWAP = auto()
    # announce_free
    ANNOUNCE_ADD = auto()
    ANNOUNCE_LOOK = auto()
    ANNOUNCE_WAKE = auto()


ANNOUNCING = (Pc.ANNOUNCE_ADD, Pc.ANNOUNCE_LOOK, Pc.ANNOUNCE_WAKE)

# of a thread, counted from its base. A writer's and a task's common words come first: both end leases and announce.
PC, SLOT, GEN, MASK = range(4)
# a writer's: the consumer (+ 1) it gives up; in the waiting part of claim; since it read
# free_sequence that has changed (1), somebody died who would have changed it or woken it (2)
GIVES_UP, WAITING, STALE = range(4, 7)
# a task's: which halves were what the handle names (bits); 1 from its first check to the end of the lease, then
# 2; the handle it ended last
SAME, READING, LAST = range(4, 7)
THREAD_WORDS = 7

DEAD, ALIVE, LOST = range(3)
"""Of a consumer: killed; living; proven dead, and its leases are being or were ended. An owner is DEAD, ALIVE, or its
pool is swept (LOST)."""


class Map:
    """Offsets into a state of one case."""

    def __init__(self, case: Case) -> None:
        at = 0

        def take(count: int) -> int:
            nonlocal at
            at += count
            return at - count

        self.generation = take(case.slots)
        self.mask = take(case.slots)
        self.ended = take(case.slots * case.consumers)
        self.half_0 = take(case.slots)
        self.half_1 = take(case.slots)
        self.waiters = take(1)
        self.owner = take(1)
        self.epoch = take(1)
        self.lock = take(1)  # 0, or 1 + the writer that holds the owner's own lock
        self.deaths = take(1)
        self.alive = take(case.consumers)
        self.incarnations = take(case.consumers)  # left
        self.unsent = take(case.consumers)  # handles the owner has not sent yet
        self.sent = take(case.consumers)  # handles in transit
        self.resent = take(case.consumers)
        self.writers = [take(THREAD_WORDS) for _ in range(case.writers)]
        self.tasks = [[take(THREAD_WORDS) for _ in range(case.tasks)] for _ in range(case.consumers)]
        self.size = at


def handle(epoch: int, slot: int, generation: int) -> int:
    return epoch << 16 | generation << 4 | slot


def epoch_of(handle: int) -> int:
    return handle >> 16


def generation_of(handle: int) -> int:
    return handle >> 4 & 0xFFF


def slot_of(handle: int) -> int:
    return handle & 0xF

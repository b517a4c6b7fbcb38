"""The readers' cells of ``native/cells.cpp``: one owner that publishes in three places, readers that come, go and die.

The owner does what ``trainer/weights.py`` does: it asks which publication is the newest, then looks at every cell (and
clears those of dead readers), writes where nobody reads, and makes that the newest. ``test_model_and_code.py`` compares
the accesses with the code's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

from protocol_model.explore import DEATH
from protocol_model.violation import require

State = tuple[Any, ...]
Facts = list[Any]
Step = Callable[[Facts, int], None]


@dataclass(frozen=True)
class CellsCase:
    """``publications`` in all; ``incarnations`` of each reader; ``takes_back``: the newest may be taken back."""

    places: int = 3
    cells: int = 2
    readers: int = 2
    publications: int = 3
    takes: int = 2
    deaths: int = 1
    incarnations: int = 2
    takes_back: bool = False
    faults: frozenset[str] = frozenset()


class Pc(IntEnum):
    """What comes next; one per access to shared memory."""

    IDLE = 0
    # the owner
    NEWEST = auto()
    CELL_OWNER = auto()
    CELL_WORD = auto()
    FILL_0 = auto()
    FILL_1 = auto()
    SET_LATEST = auto()
    TAKE_BACK = auto()
    # readers
    CLAIM = auto()
    HAS_CELL = auto()
    TAKE_LOAD = auto()
    TAKE_STORE = auto()
    TAKE_AGAIN = auto()
    READ_0 = auto()
    READ_1 = auto()
    HOLDS = auto()
    PUT_BACK = auto()
    # both
    RELEASE_CHECK = auto()
    RELEASE_WORD = auto()
    RELEASE_OWNER = auto()


PC, CELL, WORD, TAKEN, SEEN, KNOWN = range(6)
"""Of the owner: the cell it looks at, the identity found there, places found taken (bits), the newest word."""
THREAD_WORDS = 6
ENDED = 99  # a reader's PC when it has given its place up


class CellsModel:
    """``successors``, ``check`` and ``at_rest`` as ``explore`` wants them."""

    def __init__(self, case: CellsCase) -> None:
        self.case = case
        self.latest, self.announced, self.deaths = 0, 1, 2
        self.cell_owner = 3
        self.cell_word = self.cell_owner + case.cells
        self.half_0 = self.cell_word + case.cells
        self.half_1 = self.half_0 + case.places
        self.identity = self.half_1 + case.places  # of each reader; 0 = dead
        self.left = self.identity + case.readers  # incarnations
        self.owner = self.left + case.readers
        self.readers = [self.owner + THREAD_WORDS * (1 + reader) for reader in range(case.readers)]
        self.takes = self.owner + THREAD_WORDS * (1 + case.readers)  # left, of each reader
        self.size = self.takes + case.readers
        self.owner_steps: dict[Pc, Step] = {
            Pc.NEWEST: self._newest, Pc.CELL_OWNER: self._cell_owner, Pc.CELL_WORD: self._cell_word,
            Pc.FILL_0: self._fill_0, Pc.FILL_1: self._fill_1, Pc.SET_LATEST: self._set_latest,
            Pc.TAKE_BACK: self._take_back,            **self._releasing(self._owner_released),
        }  # fmt: skip
        self.reader_steps: dict[Pc, Step] = {
            Pc.CLAIM: self._claim, Pc.TAKE_LOAD: self._take_load, Pc.TAKE_STORE: self._take_store,
            Pc.TAKE_AGAIN: self._take_again, Pc.READ_0: self._read_0, Pc.READ_1: self._read_1,
            Pc.PUT_BACK: self._put_back, **self._releasing(self._reader_released),
        }  # fmt: skip

    def begin(self) -> State:
        m: Facts = [0] * self.size
        m[self.deaths] = self.case.deaths
        for reader in range(self.case.readers):
            m[self.identity + reader] = reader + 1
            m[self.left + reader] = self.case.incarnations - 1
            m[self.takes + reader] = self.case.takes
        return tuple(m)

    # --- what can happen ------------------------------------------------------------------------------------

    def successors(self, state: State) -> list[tuple[str, State]]:
        steps = [("owner", tuple(m)) for m in self._owner_choices(state)]
        for reader, b in enumerate(self.readers):
            if state[self.identity + reader]:
                steps += [(f"reader {reader}", tuple(m)) for m in self._reader_choices(state, reader, b)]
                if state[self.deaths]:
                    m = list(state)
                    m[self.deaths] -= 1
                    m[self.identity + reader] = 0
                    m[b : b + THREAD_WORDS] = (0,) * THREAD_WORDS
                    steps.append((f"{DEATH}reader {reader}", tuple(m)))
            elif state[self.left + reader]:
                m = list(state)
                m[self.left + reader] -= 1
                m[self.identity + reader] = 10 * (self.case.incarnations - m[self.left + reader]) + reader + 1
                m[self.takes + reader] = self.case.takes
                steps.append((f"another reader {reader}", tuple(m)))
        return steps

    def _owner_choices(self, state: State) -> list[Facts]:
        b = self.owner
        m = list(state)
        if state[b + PC] != Pc.IDLE:
            self.owner_steps[state[b + PC]](m, b)
            return [m]
        found = []
        # the cells of the dead are looked at once more by a later publication
        if state[self.announced] < self.case.publications or self._somebody_died(state):
            found.append(self._begun(m, b, Pc.NEWEST, self.owner_steps))
        if self.case.takes_back and state[self.latest]:
            found.append(self._begun(list(state), b, Pc.TAKE_BACK, self.owner_steps))
        return found

    def _somebody_died(self, state: State) -> bool:
        cells = state[self.cell_owner : self.cell_owner + self.case.cells]
        return any(owner and not self._lives(state, owner) for owner in cells)

    def _reader_choices(self, state: State, reader: int, b: int) -> list[Facts]:
        pc = state[b + PC]
        m = list(state)
        if pc == Pc.IDLE:
            return [self._begun(m, b, Pc.CLAIM, self.reader_steps)]
        if pc == Pc.HAS_CELL:
            found = [self._begun(list(state), b, Pc.RELEASE_CHECK, self.reader_steps)]
            if state[self.takes + reader]:
                m[self.takes + reader] -= 1
                found.append(self._begun(m, b, Pc.TAKE_LOAD, self.reader_steps))
            return found
        if pc == ENDED:
            return []
        self.reader_steps[pc](m, b)
        return [m]

    @staticmethod
    def _begun(m: Facts, b: int, pc: Pc, steps: dict[Pc, Step]) -> Facts:
        m[b + PC] = pc
        steps[pc](m, b)
        return m

    def _lives(self, state: State | Facts, identity: int) -> bool:
        return identity in state[self.identity : self.identity + self.case.readers]

    def _reader_of(self, b: int) -> int:
        return self.readers.index(b)

    # --- the owner ------------------------------------------------------------------------------------------

    def _newest(self, m: Facts, b: int) -> None:
        m[b + KNOWN] = m[self.latest]
        m[b + CELL], m[b + PC] = 0, Pc.CELL_OWNER

    def _cell_owner(self, m: Facts, b: int) -> None:
        m[b + WORD] = m[self.cell_owner + m[b + CELL]]
        m[b + PC] = Pc.CELL_WORD

    def _cell_word(self, m: Facts, b: int) -> None:
        identity, word = m[b + WORD], m[self.cell_word + m[b + CELL]]
        if identity and not self._lives(m, identity):
            m[b + PC] = Pc.RELEASE_CHECK
            return
        if identity and word:
            m[b + TAKEN] |= 1 << self._place_of(word)
        self._next_cell(m, b)

    def _owner_released(self, m: Facts, b: int) -> None:
        self._next_cell(m, b)

    def _next_cell(self, m: Facts, b: int) -> None:
        m[b + WORD] = 0
        m[b + CELL] += 1
        m[b + PC] = Pc.CELL_OWNER
        if m[b + CELL] < self.case.cells:
            return
        newest = m[b + KNOWN]
        taken = m[b + TAKEN] | (1 << self._place_of(newest) if newest else 0)
        if "the newest is written over" in self.case.faults:
            taken = m[b + TAKEN]
        free = [place for place in range(self.case.places) if not taken >> place & 1]
        m[b : b + THREAD_WORDS] = (0,) * THREAD_WORDS  # none: the round is skipped
        if free and m[self.announced] < self.case.publications:
            m[b + CELL], m[b + PC] = free[0], Pc.FILL_0

    def _fill_0(self, m: Facts, b: int) -> None:
        self._write(m, b, self.half_0)
        m[b + PC] = Pc.FILL_1

    def _fill_1(self, m: Facts, b: int) -> None:
        self._write(m, b, self.half_1)
        m[b + PC] = Pc.SET_LATEST

    def _write(self, m: Facts, b: int, half: int) -> None:
        place = m[b + CELL]
        m[half + place] = self._word(m[self.announced] + 1, place)
        for reader, base in enumerate(self.readers):
            reads = m[base + PC] in (Pc.READ_0, Pc.READ_1, Pc.HOLDS) and self._place_of(m[base + WORD]) == place
            require(not reads, "rewritten", f"place {place} is written while reader {reader} reads it")

    def _set_latest(self, m: Facts, b: int) -> None:
        m[self.announced] += 1
        m[self.latest] = self._word(m[self.announced], m[b + CELL])
        m[b : b + THREAD_WORDS] = (0,) * THREAD_WORDS

    def _take_back(self, m: Facts, b: int) -> None:
        m[self.latest] = 0
        m[b + PC] = Pc.IDLE

    @staticmethod
    def _word(number: int, place: int) -> int:
        return number << 16 | place + 1

    @staticmethod
    def _place_of(word: int) -> int:
        return (word & 0xFFFF) - 1

    # --- readers --------------------------------------------------------------------------------------------

    def _claim(self, m: Facts, b: int) -> None:
        word = self.cell_owner + m[b + CELL]
        if not m[word]:
            m[word] = m[self.identity + self._reader_of(b)]
            m[b + PC] = Pc.HAS_CELL
            return
        m[b + CELL] += 1
        m[b + PC] = Pc.CLAIM
        if m[b + CELL] == self.case.cells:  # all are taken: it asks again later
            m[b + CELL], m[b + PC] = 0, Pc.IDLE

    def _take_load(self, m: Facts, b: int) -> None:
        m[b + WORD] = m[self.latest]
        m[b + PC] = Pc.TAKE_STORE

    def _take_store(self, m: Facts, b: int) -> None:
        m[self.cell_word + m[b + CELL]] = m[b + WORD]
        m[b + PC] = Pc.TAKE_AGAIN
        if "a reader does not look again at what is newest" in self.case.faults:
            self._taken(m, b)

    def _take_again(self, m: Facts, b: int) -> None:
        if m[self.latest] == m[b + WORD]:
            self._taken(m, b)
        else:
            m[b + PC], m[b + WORD] = Pc.TAKE_LOAD, 0

    def _taken(self, m: Facts, b: int) -> None:
        m[b + PC] = Pc.READ_0 if m[b + WORD] else Pc.HAS_CELL

    def _read_0(self, m: Facts, b: int) -> None:
        m[b + SEEN] = m[self.half_0 + self._place_of(m[b + WORD])]
        m[b + PC] = Pc.READ_1

    def _read_1(self, m: Facts, b: int) -> None:
        both = (m[b + SEEN], m[self.half_1 + self._place_of(m[b + WORD])])
        require(both == (m[b + WORD],) * 2, "half-written", f"a reader took {m[b + WORD]:#x} and read {both}")
        m[b + SEEN] = 0
        m[b + PC] = Pc.PUT_BACK

    def _put_back(self, m: Facts, b: int) -> None:
        m[self.cell_word + m[b + CELL]] = 0
        m[b + WORD], m[b + PC] = 0, Pc.HAS_CELL

    def _reader_released(self, m: Facts, b: int) -> None:
        m[b : b + THREAD_WORDS] = (0,) * THREAD_WORDS
        m[b + PC] = ENDED

    # --- release_cell, by the reader itself or by the owner once it is dead ---------------------------------

    def _releasing(self, released: Step) -> dict[Pc, Step]:
        word_last = "a cell is emptied after it was given away" in self.case.faults

        def identity_of(m: Facts, b: int) -> int:
            return int(m[b + WORD] if b == self.owner else m[self.identity + self._reader_of(b)])

        def check(m: Facts, b: int) -> None:
            if m[self.cell_owner + m[b + CELL]] != identity_of(m, b):
                released(m, b)
            else:
                m[b + PC] = Pc.RELEASE_OWNER if word_last else Pc.RELEASE_WORD

        def word(m: Facts, b: int) -> None:
            if "a cell is given away with what its reader took" not in self.case.faults:
                m[self.cell_word + m[b + CELL]] = 0
            m[b + PC] = Pc.RELEASE_OWNER
            if word_last:
                released(m, b)

        def owner(m: Facts, b: int) -> None:
            cell = self.cell_owner + m[b + CELL]
            if m[cell] == identity_of(m, b):
                m[cell] = 0
            if word_last:
                m[b + PC] = Pc.RELEASE_WORD
            else:
                released(m, b)

        return {Pc.RELEASE_CHECK: check, Pc.RELEASE_WORD: word, Pc.RELEASE_OWNER: owner}

    # --- what must hold -------------------------------------------------------------------------------------

    def check(self, state: State) -> None:
        """A cell has one reader, and a free one names nothing that would keep a place from being written."""
        cells = state[self.cell_owner : self.cell_owner + self.case.cells]
        owned = [each for each in cells if each]
        require(len(owned) == len(set(owned)), "one cell", f"a reader has two cells: {cells}")
        for reader, b in enumerate(self.readers):
            if state[self.identity + reader] and state[b + PC] == Pc.HAS_CELL:
                word = state[self.cell_word + state[b + CELL]]
                require(not word, "kept", f"reader {reader} reads nothing and its cell names {word:#x}")

    def at_rest(self, state: State) -> bool:
        """No cell names anything or belongs to the dead; the owner is idle, every reader idle or gone."""
        cells = range(self.case.cells)
        return (
            state[self.owner + PC] == Pc.IDLE
            and not any(state[self.cell_word + cell] for cell in cells)
            and not self._somebody_died(state)
            and all(state[b + PC] in (Pc.IDLE, Pc.HAS_CELL, ENDED) for b in self.readers)
        )

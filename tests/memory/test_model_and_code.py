"""The models of ``protocol_model`` against the code they are models of: the same accesses, in the same order.

Random walks through a model; each of its steps that touches shared memory is done by the compiled ``native/slots.cpp``
and ``native/cells.cpp``, too, and after each every word is compared.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from protocol_model import cells_model, slots_model, slots_state
from protocol_model.cells_model import CellsCase, CellsModel
from protocol_model.plan import CELLS, SLOTS
from protocol_model.slots_case import Case
from protocol_model.slots_model import SlotsModel
from protocol_model.slots_state import GEN, GIVES_UP, LOST, MASK, SLOT, Pc
from skipping import skip_unless_ci
from stepped_code import (
    COMPILER,
    FREE_SEQUENCE,
    LATEST,
    WAITER_COUNT,
    Access,
    Op,
    SteppedCode,
    build,
    cell_owner_word,
    cell_word,
    ended_word,
    generation_word,
    mask_word,
)

pytestmark = pytest.mark.slow
TIMED_OUT = 110
PATHS, STEPS = 60, 400
CellPc = cells_model.Pc


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> SteppedCode:
    if COMPILER is None:
        skip_unless_ci("there is no C++ compiler to build native/ with")
    return SteppedCode(build(tmp_path_factory.mktemp("stepped")))


@pytest.fixture
def dice() -> random.Random:
    seed = int(os.environ.get("SHMSTAGE_WALK_SEED") or 4)
    print(f"SHMSTAGE_WALK_SEED={seed}; another one walks other ways")
    return random.Random(seed)


def recording(step: Callable[..., None], pc: int) -> Callable[..., None]:
    """Notes behind the facts which access was made, with the thread's words as they were before."""

    def recorded(m: list[object], b: int) -> None:
        m.append((pc, b, tuple(m[b : b + slots_state.THREAD_WORDS])))
        step(m, b)

    return recorded


# --- slots --------------------------------------------------------------------------------------------------


class SlotsReplay:
    """One walk through the slot model, done by the code as well."""

    OPS: ClassVar[dict[int, Op]] = {
        Pc.CLAIM_GENERATION: Op.CLAIM, Pc.PUBLISH_CHECK: Op.PUBLISH, Pc.ABANDON_CHECK: Op.DISCARD,
        Pc.WITHDRAW_CHECK: Op.DISCARD, Pc.LEASE_GENERATION: Op.LEASE_STATE, Pc.END_GENERATION: Op.END_LEASE,
    }  # fmt: skip
    LOADS_OF_THE_GENERATION = (
        Pc.CLAIM_GENERATION, Pc.PUBLISH_CHECK, Pc.ABANDON_CHECK, Pc.WITHDRAW_CHECK, Pc.LEASE_GENERATION, Pc.LEASE_AGAIN,
        Pc.END_GENERATION,
    )  # fmt: skip
    #: of the payload, or made by Python: no accesses of these sources
    ELSEWHERE = (Pc.FILL_0, Pc.FILL_1, Pc.READ_0, Pc.READ_1, Pc.GIVE_UP_GENERATION, Pc.GIVE_UP_MASK)

    def __init__(self, case: Case, code: SteppedCode) -> None:
        self.case, self.code = case, code
        self.model = SlotsModel(case)
        self.at = self.model.at
        for threads in (self.model.writers, *self.model.tasks):
            threads.steps = {pc: recording(step, pc) for pc, step in threads.steps.items()}  # type: ignore[attr-defined]
        bases = [*self.at.writers, *(base for tasks in self.at.tasks for base in tasks)]
        self.actor_of = {base: number for number, base in enumerate(bases)}
        self.consumer_of = {base: c for c, tasks in enumerate(self.at.tasks) for base in tasks}
        self.added = 0
        code.reset(slots=case.slots, consumers=case.consumers)

    def walk(self, dice: random.Random, seen: Counter[str]) -> None:
        state = self.model.begin()
        for _ in range(STEPS):
            steps = self.model.successors(state)
            if not steps:
                return
            label, following = dice.choice(steps)
            record, after = following[self.at.size :], following[: self.at.size]
            self._mirror(label, state, record, after)
            seen.update(Pc(pc).name for pc, _, _ in record)
            self._compare(after)
            state = after

    def _mirror(self, label: str, before: tuple, record: tuple, after: tuple) -> None:  # type: ignore[type-arg]
        if label.startswith(slots_model.DEATH):
            gone = self.at.writers if "owner" in label else self.at.tasks[int(label.split()[-1])]
            for base in gone:
                self.code.drop(self.actor_of[base])
        elif label == "another owner":
            self.code.reset(slots=self.case.slots, consumers=self.case.consumers)
            self.added = 0
        elif not record and label.startswith("writer"):
            # asleep until its slice of time is over
            base = self.at.writers[int(label.split()[1])]
            assert self.code.pending(self.actor_of[base]) == (FREE_SEQUENCE, Access.ASLEEP)
            self.code.step(self.actor_of[base], TIMED_OUT)
        for pc, base, words in record:
            if pc not in self.ELSEWHERE:
                self._access(pc, base, words, after)

    def _access(self, pc: int, base: int, words: tuple, after: tuple) -> None:  # type: ignore[type-arg]
        actor = self.actor_of[base]
        pending = self.code.pending(actor)
        if pending is not None and pending[1] is Access.ASLEEP:
            assert self.code.woken(actor) and pc == Pc.WAIT_SEQUENCE
            self.code.step(actor)
            pending = self.code.pending(actor)
        if pending is None:
            consumer = self.consumer_of.get(base, words[GIVES_UP] - 1)
            assert pc in self.OPS, f"{Pc(pc).name}: the code's call is over before"
            op = self.OPS[Pc(pc)]
            arguments = {
                Op.CLAIM: (0, self.case.slots), Op.PUBLISH: (words[SLOT], words[GEN], words[MASK]),
            }.get(op, (words[SLOT], words[GEN], consumer))  # fmt: skip
            self.code.start(actor, op, arguments)
            pending = self.code.pending(actor)
        if pc == Pc.WAIT_UNCOUNT and pending == (FREE_SEQUENCE, Access.FUTEX_WAIT):
            self.code.interrupt(actor)
            pending = self.code.pending(actor)
        assert pending == self._expected(pc, base, words), f"{Pc(pc).name}: the code does something else"
        self.code.step(actor)
        self.added += pc == Pc.ANNOUNCE_ADD
        if self.code.pending(actor) is None:
            self._check_result(pc, actor, base, words, after)

    def _expected(self, pc: int, base: int, words: tuple) -> tuple[int, Access]:  # type: ignore[type-arg]
        slot = words[SLOT]
        consumer = self.consumer_of.get(base, words[GIVES_UP] - 1)
        if pc in self.LOADS_OF_THE_GENERATION:
            return generation_word(slot), Access.LOAD
        if pc == Pc.CLAIM_ENDED:
            lowest = (words[MASK] & -words[MASK]).bit_length() - 1
            return ended_word(slot, lowest), Access.LOAD
        return {
            Pc.CLAIM_MASK: (mask_word(slot), Access.LOAD), Pc.CLAIM_SWAP: (generation_word(slot), Access.SWAP),
            Pc.WAIT_COUNT: (WAITER_COUNT, Access.ADD), Pc.WAIT_UNCOUNT: (WAITER_COUNT, Access.ADD),
            Pc.WAIT_SEQUENCE: (FREE_SEQUENCE, Access.LOAD), Pc.WAIT_FUTEX: (FREE_SEQUENCE, Access.FUTEX_WAIT),
            Pc.PUBLISH_MASK: (mask_word(slot), Access.STORE), Pc.ABANDON_MASK: (mask_word(slot), Access.STORE),
            Pc.PUBLISH_GENERATION: (generation_word(slot), Access.STORE),
            Pc.ABANDON_SWAP: (generation_word(slot), Access.SWAP),
            Pc.WITHDRAW_SWAP: (generation_word(slot), Access.SWAP),
            Pc.WITHDRAW_MASK: (mask_word(slot), Access.STORE),
            Pc.WITHDRAW_GENERATION: (generation_word(slot), Access.STORE),
            Pc.LEASE_MASK: (mask_word(slot), Access.LOAD), Pc.LEASE_ENDED: (ended_word(slot, consumer), Access.LOAD),
            Pc.END_ENDED: (ended_word(slot, consumer), Access.LOAD),
            Pc.END_SWAP: (ended_word(slot, consumer), Access.SWAP),
            Pc.ANNOUNCE_ADD: (FREE_SEQUENCE, Access.ADD), Pc.ANNOUNCE_LOOK: (WAITER_COUNT, Access.LOAD),
            Pc.ANNOUNCE_WAKE: (FREE_SEQUENCE, Access.FUTEX_WAKE),
        }[Pc(pc)]  # fmt: skip

    def _check_result(self, pc: int, actor: int, base: int, words: tuple, after: tuple) -> None:  # type: ignore[type-arg]
        result = self.code.result(actor)
        if pc in (Pc.CLAIM_SWAP, Pc.WAIT_UNCOUNT):
            claimed = after[base + SLOT] if after[base + GEN] % 2 else (1 << 64) - 1
            assert result == claimed
        elif pc in (Pc.LEASE_GENERATION, Pc.LEASE_AGAIN, Pc.LEASE_ENDED):
            ended = self.at.ended + words[SLOT] * self.case.consumers + self.consumer_of[base]
            assert (result == 0) == (pc == Pc.LEASE_ENDED and after[ended] < words[GEN])
        elif pc in (Pc.WITHDRAW_CHECK, Pc.WITHDRAW_SWAP):
            assert result == 0
        elif pc == Pc.PUBLISH_GENERATION:
            assert result == words[GEN] + 1

    def _compare(self, state: tuple) -> None:  # type: ignore[type-arg]
        code, at = self.code, self.at
        if state[at.owner] == LOST:
            return  # swept: the words are nobody's
        for slot in range(self.case.slots):
            assert code.u64(generation_word(slot)) == state[at.generation + slot]
            assert code.u64(mask_word(slot)) == state[at.mask + slot]
            for consumer in range(self.case.consumers):
                ended = state[at.ended + slot * self.case.consumers + consumer]
                assert code.u64(ended_word(slot, consumer)) == ended
        assert code.u32(WAITER_COUNT) == state[at.waiters]
        assert code.u32(FREE_SEQUENCE) == self.added


#: what a random walk of ordinary length surely comes by
ALL_OF_SLOTS = {pc.name for pc in Pc} - {"IDLE", "ASLEEP", "FILLED"}


def test_the_slot_model_and_the_code_do_the_same_access_by_access(code: SteppedCode, dice: random.Random) -> None:
    """S47, S48, S60: what was walked exhaustively is what runs."""
    seen: Counter[str] = Counter()
    for case in SLOTS:
        for _ in range(PATHS):
            SlotsReplay(case, code).walk(dice, seen)
    print(f"{sum(seen.values())} accesses compared, the rarest {min(seen.items(), key=lambda each: each[1])}")
    assert set(seen) == ALL_OF_SLOTS


# --- cells --------------------------------------------------------------------------------------------------


class CellsReplay:
    """One walk through the model of the readers' cells, done by the code as well."""

    OPS: ClassVar[dict[int, Op]] = {
        CellPc.NEWEST: Op.LATEST, CellPc.CELL_OWNER: Op.CELL, CellPc.SET_LATEST: Op.SET_LATEST,
        CellPc.TAKE_BACK: Op.SET_LATEST, CellPc.CLAIM: Op.CLAIM_CELL, CellPc.TAKE_LOAD: Op.TAKE_LATEST,
        CellPc.PUT_BACK: Op.PUT_BACK, CellPc.RELEASE_CHECK: Op.RELEASE_CELL,
    }  # fmt: skip
    ELSEWHERE = (CellPc.FILL_0, CellPc.FILL_1, CellPc.READ_0, CellPc.READ_1)

    def __init__(self, case: CellsCase, code: SteppedCode) -> None:
        self.case, self.code = case, code
        self.model = CellsModel(case)
        for name in ("owner_steps", "reader_steps"):
            steps = getattr(self.model, name)
            setattr(self.model, name, {pc: recording(step, pc) for pc, step in steps.items()})
        self.actor_of = {base: number for number, base in enumerate([self.model.owner, *self.model.readers])}
        code.reset(cells=case.cells)

    def walk(self, dice: random.Random, seen: Counter[str]) -> None:
        model = self.model
        state = model.begin()
        for _ in range(STEPS):
            steps = model.successors(state)
            if not steps:
                return
            label, following = dice.choice(steps)
            record, after = following[model.size :], following[: model.size]
            if label.startswith(slots_model.DEATH):
                self.code.drop(1 + int(label.split()[-1]))
            for pc, base, words in record:
                if pc not in self.ELSEWHERE:
                    self._access(pc, base, words, state, after)
                seen[CellPc(pc).name] += 1
            self._compare(after)
            state = after

    def _access(self, pc: int, base: int, words: tuple, before: tuple, after: tuple) -> None:  # type: ignore[type-arg]
        model, actor, cell = self.model, self.actor_of[base], words[cells_model.CELL]
        owner = base == model.owner
        identity = words[cells_model.WORD] if owner else before[model.identity + model.readers.index(base)]
        if self.code.pending(actor) is None:
            assert pc in self.OPS, f"{CellPc(pc).name}: the code's call is over before"
            op = self.OPS[CellPc(pc)]
            arguments = {
                Op.CLAIM_CELL: (identity,), Op.RELEASE_CELL: (cell, identity), Op.SET_LATEST: (after[model.latest],),
            }.get(op, (cell,))  # fmt: skip
            self.code.start(actor, op, arguments)
        expected = {
            CellPc.NEWEST: (LATEST, Access.LOAD), CellPc.SET_LATEST: (LATEST, Access.STORE),
            CellPc.TAKE_BACK: (LATEST, Access.STORE), CellPc.CELL_OWNER: (cell_owner_word(cell), Access.LOAD),
            CellPc.CELL_WORD: (cell_word(cell), Access.LOAD), CellPc.CLAIM: (cell_owner_word(cell), Access.SWAP),
            CellPc.TAKE_LOAD: (LATEST, Access.LOAD), CellPc.TAKE_STORE: (cell_word(cell), Access.STORE),
            CellPc.TAKE_AGAIN: (LATEST, Access.LOAD), CellPc.PUT_BACK: (cell_word(cell), Access.STORE),
            CellPc.RELEASE_CHECK: (cell_owner_word(cell), Access.LOAD),
            CellPc.RELEASE_WORD: (cell_word(cell), Access.STORE),
            CellPc.RELEASE_OWNER: (cell_owner_word(cell), Access.SWAP),
        }[CellPc(pc)]  # fmt: skip
        assert self.code.pending(actor) == expected, f"{CellPc(pc).name}: the code does something else"
        self.code.step(actor)
        if self.code.pending(actor) is None and pc == CellPc.TAKE_AGAIN:
            assert self.code.result(actor) == after[base + cells_model.WORD]
        if self.code.pending(actor) is None and pc == CellPc.CLAIM and after[base + cells_model.PC] == CellPc.HAS_CELL:
            assert self.code.result(actor) == after[base + cells_model.CELL]

    def _compare(self, state: tuple) -> None:  # type: ignore[type-arg]
        assert self.code.u64(LATEST) == state[self.model.latest]
        for cell in range(self.case.cells):
            assert self.code.u64(cell_owner_word(cell)) == state[self.model.cell_owner + cell]
            assert self.code.u64(cell_word(cell)) == state[self.model.cell_word + cell]


def test_the_model_of_the_cells_and_the_code_do_the_same_access_by_access(
    code: SteppedCode, dice: random.Random
) -> None:
    """S12: what was walked exhaustively is what runs."""
    seen: Counter[str] = Counter()
    for case in CELLS:
        for _ in range(PATHS):
            CellsReplay(case, code).walk(dice, seen)
    print(f"{sum(seen.values())} accesses compared, the rarest {min(seen.items(), key=lambda each: each[1])}")
    assert set(seen) == {pc.name for pc in CellPc} - {"IDLE", "HAS_CELL", "HOLDS"}

"""Every order in which the steps of owner and consumers can fall, with a death after any of them.

``python -m pytest tests/memory -k exhaustive -s`` prints each configuration and the sum. What is walked:
``protocol_model/plan.py``; what must hold: the ``require`` and ``check`` of the models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from collector import without_collector
from protocol_model.cells_model import CellsCase, CellsModel
from protocol_model.explore import Model, explore
from protocol_model.plan import CELLS, FAULTS, SLOTS, Fault
from protocol_model.slots_case import Case
from protocol_model.slots_model import SlotsModel
from protocol_model.violation import ViolationError


@dataclass
class Tally:
    states: int = 0
    steps: int = 0
    cases: int = 0
    violations: list[str] = field(default_factory=list)
    faults: dict[str, bool] = field(default_factory=dict)


TALLY = Tally()


def model_of(case: Case | CellsCase) -> Model:
    return SlotsModel(case) if isinstance(case, Case) else CellsModel(case)


def walk(case: Case | CellsCase) -> None:
    TALLY.cases += 1
    try:
        with without_collector():
            found = explore(model_of(case))
    except ViolationError as error:
        TALLY.violations.append(str(error))
        pytest.fail(f"{case}: {error}\n  " + "\n  ".join(error.trace))
    TALLY.states += found.states
    TALLY.steps += found.steps
    print(f"{found.states:>8} states {found.steps:>9} steps  {case}", flush=True)
    assert found.resting > 1


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_exhaustive_walk_of_the_slot_protocol(case: Case) -> None:
    """S47, S48, S50, S60: no slot rewritten under a reader, none lost for ever, none seen half-written, nobody
    sleeps beside a free slot; leases ended twice, handles in transit, taken back, of another epoch, and a death after
    any step.
    """
    walk(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CELLS, ids=str)
def test_exhaustive_walk_of_the_readers_cells(case: CellsCase) -> None:
    """S12: no place is written while a reader holds it, and a dead reader's cell is free again."""
    walk(case)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_exhaustive_walk_finds_the_seeded_fault(fault: Fault) -> None:
    TALLY.faults[fault.name] = False
    explore(model_of(fault.case))
    with pytest.raises(ViolationError) as found:
        explore(model_of(replace(fault.case, faults=frozenset({fault.name}))))
    print(f"found: {fault.name}: {found.value}, after {len(found.value.trace)} steps")
    assert found.value.invariant in fault.breaks
    TALLY.faults[fault.name] = True


def test_exhaustive_walk_in_all() -> None:
    """Last on purpose: its line counts all that the tests above walked in this process."""
    if not TALLY.cases:
        pytest.skip("nothing was walked in this process")
    found = "seeded faults found" if all(TALLY.faults.values()) else "SEEDED FAULTS MISSED"
    print(
        f"\nwalked {TALLY.states} states, {len(TALLY.violations)} violations, {found} "
        f"({sum(TALLY.faults.values())} of {len(TALLY.faults)}; {TALLY.steps} steps, {TALLY.cases} configurations)"
    )
    assert not TALLY.violations
    assert all(TALLY.faults.values())

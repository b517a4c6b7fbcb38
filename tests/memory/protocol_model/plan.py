"""What is walked: every configuration, and the deliberate faults with a configuration in which each shows."""

from __future__ import annotations

from dataclasses import dataclass

from protocol_model.cells_model import CellsCase
from protocol_model.slots_case import Case

SLOTS = (
    # leases ended twice, by two threads of a consumer; either process killed after any step
    Case(generations=3, tasks=2, deaths=1),
    Case(generations=3, tasks=2, deaths=2, incarnations=2, withdraws=True),
    # two threads of the owner that claim, publish, give up and wait for each other
    Case(writers=2, generations=3, withdraws=True),
    Case(writers=2, generations=2, deaths=2, incarnations=2),
    Case(writers=2, generations=2, masks=(1, 0), deaths=1),
    # two consumers, published for both, for one, for nobody
    Case(consumers=2, generations=3, masks=(3, 1, 0), deaths=1),
    Case(consumers=2, generations=2, deaths=2, incarnations=2),
    Case(consumers=2, writers=2, generations=2, abandons=False),
    # two slots, two leases at a time
    Case(slots=2, generations=3, tasks=2, deaths=1),
    Case(slots=2, writers=2, generations=2, deaths=1),
    Case(slots=2, consumers=2, generations=2, deaths=1),
    # handles taken back or delivered twice: the reader must notice
    Case(generations=3, tasks=2, deaths=1, recalls=True),
    Case(generations=3, tasks=2, resends=True),
    Case(writers=2, generations=2, recalls=True, deaths=1),
    # another owner, with a pool of another epoch, while handles of the old one are on their way
    Case(generations=2, tasks=2, deaths=2, takeover=True),
    Case(slots=2, generations=2, deaths=1, takeover=True),
)

CELLS = (
    CellsCase(readers=1, cells=1),
    CellsCase(deaths=0, incarnations=1, publications=4, takes=1),
    CellsCase(takes=1, incarnations=1),
    CellsCase(takes=1, cells=1, takes_back=True),
    CellsCase(takes=1, incarnations=1, publications=2, takes_back=True),
)


@dataclass(frozen=True)
class Fault:
    """A deliberate fault, a case in which it shows, and what it breaks (either of these)."""

    name: str
    breaks: tuple[str, ...]
    case: Case | CellsCase


FAULTS = (
    Fault("a lease ends while it is still read", ("rewritten",), Case()),
    Fault("one generation is taken for another", ("rewritten", "refused"), Case()),
    Fault("only the first consumer is asked", ("rewritten", "refused"), Case(consumers=2)),
    Fault("the generation is stored before the mask", ("one writer", "rewritten", "refused"), Case(writers=2)),
    Fault("a slot is taken without comparing", ("one writer",), Case(writers=2)),
    Fault("a slot is withdrawn without the odd generation", ("one writer", "refused"), Case(writers=2, withdraws=True)),
    Fault("nobody looks again after reading", ("half-written",), Case(recalls=True, generations=3)),
    Fault("a handle of another epoch is taken", ("half-written",), Case(takeover=True, deaths=1)),
    Fault("an old lease is ended in the new pool", ("rewritten", "refused"), Case(takeover=True, deaths=1, tasks=2)),
    Fault("an ended cell can go back", ("lost for ever",), Case(tasks=2)),
    Fault("an abandoned slot keeps its mask", ("lost for ever",), Case()),
    Fault("a dead consumer's leases are left to time", ("lost for ever",), Case(deaths=1)),
    Fault("a dead consumer is given up beside publishing", ("lost for ever",), Case(writers=2, deaths=1)),
    Fault("ending a lease wakes nobody", ("asleep",), Case()),
    Fault("a wake-up does not move the sequence", ("asleep",), Case()),
    Fault("who waits does not look again before it sleeps", ("asleep",), Case()),
    Fault("the kernel is not told what was seen", ("asleep",), Case()),
    Fault("what is published for nobody frees its slot in silence", ("asleep",), Case(writers=2, masks=(1, 0))),
    Fault("the newest is written over", ("rewritten",), CellsCase(takes=1, cells=1)),
    Fault("a reader does not look again at what is newest", ("rewritten", "half-written"), CellsCase(takes=1, cells=1)),
    Fault("a cell is emptied after it was given away", ("kept", "rewritten"), CellsCase(takes=1, cells=1)),
    Fault("a cell is given away with what its reader took", ("kept",), CellsCase(takes=1, cells=1)),
)

"""Where micro-batches lie and who trains them: on this host, or on many. Who decides what is trained does not know.

``local_site`` has the pool in this process and one trainer beside it; ``fleet_site`` has an agent, a store and a
trainer on each host, and here only references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

from shmstage.orchestrator.arrivals import Groups, InputGroups
from shmstage.orchestrator.connection import Connection
from shmstage.orchestrator.late_fields import LateFieldWriter
from shmstage.orchestrator.layouts import Layouts
from shmstage.orchestrator.packer import Packer
from shmstage.packing.held_form import HeldForm
from shmstage.packing.reference import Described


@final
@dataclass(frozen=True)
class Evaluation:
    """What is evaluated on, and who packs it into aux slots."""

    source: Groups
    packer: Packer
    form: HeldForm | None = None


@final
@dataclass(frozen=True)
class Workplace:
    """What one session with a trainer works with.

    ``form``: what trajectories are brought into as they are read; none for references. ``microbatch_nbytes``: of one
    micro-batch in its slots, on all hosts together.
    """

    source: InputGroups
    packer: Packer
    microbatch_nbytes: int
    form: HeldForm | None = None
    evaluation: Evaluation | None = None
    late: LateFieldWriter | None = None
    heartbeat: Callable[[int], None] = lambda now_ns: None


class Site(Protocol):
    """One epoch's. What it opened is closed by the stack that it was given."""

    @property
    def first(self) -> Described:
        """The input's first trajectory, which stands for all of them."""

    @property
    def layouts(self) -> Layouts:
        """Of whole micro-batches; known once it is open."""

    def open(self) -> None:
        """Ask for memory. Raises ``BudgetError`` where it does not fit, and whatever keeps it from being had."""

    def connect(self, *, again: bool) -> Connection:
        """To the trainer that there is, or will be; ``again``: it may have to be started first."""

    def slot_layout_id(self, layout_id: int) -> int:
        """By which id handles, and the trainer, name what a slot holds of micro-batches of that layout."""

    def workplace(self, trainer: Connection) -> Workplace:
        """For a session with that trainer."""

    def failed(self, error: Exception) -> None:
        """Note it where people look for it."""

    def trainer_died(self) -> None:
        """What it held is free again."""

    def warnings(self) -> list[str]:
        """What a person should know of the input."""

    def summary(self, trained: int) -> dict[str, Any]:
        """What ``summary.json`` says of it; ``trained``: trajectories in this process's time."""

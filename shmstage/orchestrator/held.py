"""How many bytes of trajectories are held, and whether one more group fits. Pure."""

from __future__ import annotations

from typing import final

from shmstage.errors import BudgetError
from shmstage.memory.limits import format_nbytes

_REMEDY = "raise max_held_bytes, or make batches or steps smaller"


@final
class HeldBytes:
    """Counts trajectories from the moment their group is admitted until their step has landed.

    What a source cannot give again (``until_durable``) counts on until a durable checkpoint covers it. ``limit`` 0: no
    limit, and nothing to wait for.
    """

    def __init__(self, limit: int = 0, *, until_durable: bool = False) -> None:
        self.limit = limit
        self._until_durable = until_durable
        self._waiting = 0
        self._packed: dict[int, int] = {}
        self._landed: dict[int, int] = {}
        self._complete = 0
        self._largest_step = 0

    @property
    def total(self) -> int:
        return self._in_memory + sum(self._landed.values())

    @property
    def _in_memory(self) -> int:
        return self._waiting + sum(self._packed.values())

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the trained steps that no durable checkpoint covers leave no room for one more."""
        if not self.limit or not self._until_durable:
            return False
        trained = sum(nbytes for step, nbytes in self._packed.items() if step <= self._complete)
        return trained + sum(self._landed.values()) > self.limit - self._largest_step

    def has_room(self, nbytes: int, *, starving: bool) -> bool:
        """Whether a group of ``nbytes`` may be admitted now.

        ``starving``: nothing is left to plan, so only what is under way can still free bytes. Raises ``BudgetError``
        when waiting would never end.
        """
        if not self.limit or self.total + nbytes <= self.limit:
            return True
        sizes = f"max_held_bytes = {format_nbytes(self.limit)}"
        if nbytes > self.limit:
            raise BudgetError(f"one group has {format_nbytes(nbytes)}, more than {sizes}; {_REMEDY}")
        # a step that is wholly packed lands without another group
        if not starving or any(step <= self._complete for step in self._packed):
            return False
        # what has landed lies in the journal only; the checkpoint that lets it go may need this group to come about
        if self._in_memory + nbytes <= self.limit:
            return True
        raise BudgetError(
            f"one step does not fit: {format_nbytes(self._in_memory)} are held, none of them of a step that could be "
            f"trained without the next group of {format_nbytes(nbytes)}, and {sizes}; {_REMEDY}"
        )

    def admit(self, nbytes: int) -> None:
        self._waiting += nbytes

    def let_go(self, nbytes: int) -> None:
        """Of what was admitted so much will not be trained: dropped, or done before a resume."""
        self._waiting -= nbytes

    def pack(self, step: int, nbytes: int, *, is_final: bool) -> None:
        """A micro-batch of ``step`` holds ``nbytes`` of what was admitted."""
        self._waiting -= nbytes
        self._packed[step] = self._packed.get(step, 0) + nbytes
        self._largest_step = max(self._largest_step, self._packed[step])
        if is_final:
            self._complete = step

    def land(self, step: int) -> None:
        """Update ``step``, and every one before it, landed."""
        self._complete = max(self._complete, step)  # also of a step that the end of the input left short
        for number in [number for number in self._packed if number <= step]:
            nbytes = self._packed.pop(number)
            if self._until_durable:
                self._landed[number] = nbytes

    def make_durable(self, step: int) -> None:
        """A durable checkpoint covers ``step`` and every one before it."""
        self.land(step)
        for number in [number for number in self._landed if number <= step]:
            del self._landed[number]

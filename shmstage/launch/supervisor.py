"""Whether a dead child is started again, and when. Pure: the time and the step reached are passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from shmstage.errors import InputError, PeerLostError, PeerRestartedError, RunFailedError, ShmstageError

#: steps that a run must get further for the restarts before them to be forgotten
PROGRESS_STEPS = 10
#: the back-off doubles this often and then stays
DOUBLINGS = 5
#: exit codes that are an answer even without a word about it
SAYS_ENOUGH = (InputError.exit_code, RunFailedError.exit_code, 130)


class Ending(StrEnum):
    """What it means that a child is gone."""

    FINISHED = "finished"
    #: by a signal, without a word, or because its peer was lost: another one may succeed
    DIED = "died"
    #: it says itself why: the next one would say the same
    FAILED = "failed"


def ending_of(exit_code: int, told: ShmstageError | None) -> Ending:
    """``told`` is what the child itself left as the reason; it counts for more than how the process went."""
    if told is not None:
        return Ending.DIED if isinstance(told, PeerLostError | PeerRestartedError) else Ending.FAILED
    if exit_code == 0:
        return Ending.FINISHED
    return Ending.FAILED if exit_code in SAYS_ENOUGH else Ending.DIED


@dataclass(frozen=True, slots=True)
class Restart:
    """The ``number``-th start in a row without progress, due at ``at_s``."""

    number: int
    at_s: float


@final
class Restarts:
    """One role's. ``total`` counts those of the whole run, ``in_vain`` those since the run last got further."""

    def __init__(self, limit: int, backoff_s: float) -> None:
        self.limit = limit
        self.total = 0
        self.in_vain = 0
        self._backoff_s = backoff_s
        self._reached = 0

    def died(self, now_s: float, step: int) -> Restart | None:
        """``step`` is the highest one completed so far; ``None``: it has died often enough.

        Only steps never completed before are progress: else a run that always dies in the same place, some steps
        after its checkpoint, would go on for ever.
        """
        if step >= self._reached + PROGRESS_STEPS:
            self.in_vain, self._reached = 0, step
        if self.in_vain >= self.limit:
            return None
        self.in_vain += 1
        self.total += 1
        return Restart(self.in_vain, now_s + self._backoff_s * 2.0 ** min(self.in_vain - 1, DOUBLINGS))

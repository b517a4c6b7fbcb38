"""What it means that somebody of a gang is gone: another attempt, an answer, or the end. Pure: time is passed in.

A gang is all agents, trainers and the orchestrator of one attempt, and the stores they train from. A death in it ends
the attempt: the collectives of the others cannot be taken up again. What others say while they fall is its echo.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from shmstage.errors import InputError, PeerLostError, RunFailedError, ShmstageError
from shmstage.launch.keeper import NOTICE_S, ORDERLY_S
from shmstage.launch.supervisor import Ending, Restart, Restarts

#: who is named, of those that died together: a host takes all with it, a trainer its neighbours' collectives
ROLES = ("host", "store", "agent", "trainer", "orchestrator")


@final
@dataclass(frozen=True, slots=True)
class Ended:
    """Somebody of the gang is gone. ``how`` completes "the trainer (pid 7) ..."; ``where`` names its host."""

    role: str
    where: str
    how: str
    ending: Ending
    at_s: float
    pid: int = 0
    told: ShmstageError | None = None
    exit_code: int | None = None

    @property
    def is_plain(self) -> bool:
        """A death that is nobody's echo. JAX aborts who waits for a dead peer, so an abort alone is no such thing."""
        aborted = self.role == "trainer" and self.exit_code == -signal.SIGABRT
        return self.ending is Ending.DIED and self.told is None and not aborted

    def describe(self) -> str:
        """In words, with host, role and pid."""
        if self.role == "host":
            return f"{self.where} {self.how}"
        who = f"the {self.role}" + (f" (pid {self.pid})" if self.pid else "")
        return f"{self.where + ': ' if self.where else ''}{who} {self.how}"


@final
@dataclass(frozen=True, slots=True)
class Again:
    """The gang is started anew when ``restart.at_s`` has come."""

    restart: Restart
    cause: Ended


@final
@dataclass(frozen=True, slots=True)
class Over:
    """The run has ended; ``failure`` says why, if not because all was done."""

    failure: ShmstageError | None = None


Verdict = Again | Over | None
"""``None``: the attempt goes on, or it is too early to say."""


@final
class Gang:
    """Counts restarts over all attempts. ``begin`` an attempt, ``note`` who ends, ask ``judge``."""

    def __init__(self, *, max_restarts: int, backoff_s: float) -> None:
        self._restarts = Restarts(max_restarts, backoff_s)
        self._ended: list[Ended] = []
        self.restarts = dict.fromkeys(reversed(ROLES), 0)
        self.anyone_died = False

    @property
    def limit(self) -> int:
        return self._restarts.limit

    def begin(self) -> None:
        self._ended = []

    def note(self, ended: Ended) -> None:
        self.anyone_died |= ended.ending is Ending.DIED
        self._ended.append(ended)

    def judge(self, now_s: float, step: int, *, is_complete: bool) -> Verdict:
        """``step``: the highest one completed so far; ``is_complete``: the summary is written."""
        if not self._ended:
            return None
        orchestrator = next((each for each in self._ended if each.role == "orchestrator"), None)
        if orchestrator is not None and (
            orchestrator.ending is Ending.FINISHED or (orchestrator.ending is Ending.DIED and is_complete)
        ):
            return Over()
        answers = [each for each in self._ended if each.ending is Ending.FAILED]
        for each in answers:
            if isinstance(each.told, InputError):
                return Over(each.told)
        plain = [each for each in self._ended if each.is_plain]
        if plain:
            return self._again(plain, now_s, step)
        if now_s < min(each.at_s for each in self._ended) + self._patience_s(orchestrator):
            return None  # whoever knows better may say so yet
        if answers:
            return Over(_answer(answers))
        return self._again(self._ended, now_s, step)

    def _patience_s(self, orchestrator: Ended | None) -> float:
        if all(each.ending is Ending.FINISHED for each in self._ended):
            return ORDERLY_S if orchestrator is None else 0.0  # trainers were told to end: the orchestrator follows
        return NOTICE_S

    def _again(self, dead: Sequence[Ended], now_s: float, step: int) -> Verdict:
        cause = min(dead, key=lambda each: (ROLES.index(each.role), not each.is_plain, each.at_s))
        self.anyone_died = True
        in_vain = self._restarts.in_vain
        restart = self._restarts.died(now_s, step)
        if restart is None:
            text = f"{cause.describe()}: {cause.told}" if cause.told is not None else cause.describe()
            if in_vain:
                times = f"{in_vain} time{'s' * (in_vain > 1)}"
                text += f"; restarted {times} in vain; raise max_restarts if another try could help"
            return Over(PeerLostError(text))
        self.restarts[cause.role] += 1
        return Again(restart, cause)


def _answer(answers: Sequence[Ended]) -> ShmstageError:
    """What a trainer says itself counts for more than what the orchestrator heard of it."""
    first = min(answers, key=lambda each: (ROLES.index(each.role), each.told is None, each.at_s))
    return first.told or RunFailedError(first.describe())

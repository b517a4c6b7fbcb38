"""One command for several hosts, decided apart from doing: what is asked of whom, and what the answers mean.

    prepare ──all accept, same state──▶ commit ──all did it──▶ over
       └──anything else──▶ over          └──a stage that a host failed at──▶ drop ──▶ over

A stage without an answer is not dropped: where it arrived its slot is given back, and only the stage holds F now. It is
used up by the call that sends F whole, which uploads on the other hosts.

Pure: no socket, thread or clock. Whoever has the sockets asks what ``phase`` says and puts answers into ``gathering``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, final

from shmstage.errors import ShmstageError, TrainerError, WaitTimeoutError
from shmstage.orchestrator.fleet_answers import commit_error, differing, listed, named, refusal, states_of

Result = Mapping[str, Any]
Outcome = Result | ShmstageError


class Phase(StrEnum):
    PREPARE = "prepare"
    COMMIT = "commit"
    DROP = "drop"
    OVER = "over"


@final
class Gathering:
    """One question to every host: who has answered, and what."""

    def __init__(self, hosts: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * hosts

    @property
    def waiting(self) -> list[int]:
        """Hosts whose answer is missing."""
        return [host for host, outcome in enumerate(self._outcomes) if outcome is None]

    @property
    def failed(self) -> bool:
        """One of them has failed already."""
        return any(isinstance(outcome, ShmstageError) for outcome in self._outcomes)

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all hosts, when none is waited for any more."""
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        assert len(outcomes) == len(self._outcomes), "asked before all have answered"
        return outcomes

    def heard(self, host: int, outcome: Outcome) -> None:
        """The first answer of a host counts."""
        if self._outcomes[host] is None:
            self._outcomes[host] = outcome

    def give_up(self, why: Mapping[int, str]) -> None:
        """Nobody is waited for any more; ``why`` by host."""
        for host in self.waiting:
            self._outcomes[host] = WaitTimeoutError(why[host])


@final
class TwoPhases:
    """``what`` names the command in errors. ``drops``: it is a stage, which is dropped everywhere if it fails on one.

    ``compares``: the hosts' states must be equal before it runs; not for what ends every difference. ``overlooks``: a
    micro-batch (``2.0``) that may be staged on some hosts and not on others.
    """

    def __init__(
        self, what: str, names: Sequence[str], *, drops: bool = False, compares: bool = True, overlooks: str = ""
    ) -> None:
        self.phase = Phase.PREPARE
        self.gathering = Gathering(len(names))
        #: what the command returned, by host
        self.results: list[Result] = []
        self.error: ShmstageError | None = None
        #: a stage that failed may be left on a host
        self.left_behind = False
        self._what = what
        self._names = tuple(names)
        self._drops = drops
        self._compares = compares
        self._overlooks = overlooks

    def answered(self) -> None:
        """``gathering`` holds the answers to this phase: on to the next one, if nobody is waited for any more."""
        if self.gathering.waiting or self.phase is Phase.OVER:
            return
        outcomes = self.gathering.outcomes
        if self.phase is Phase.PREPARE:
            self.error = self._why_not(outcomes)
            self._enter(Phase.OVER if self.error is not None else Phase.COMMIT)
        elif self.phase is Phase.COMMIT:
            self.error = commit_error(self._what, self._names, outcomes, keeps_class=self._drops)
            self.results = [outcome for outcome in outcomes if not isinstance(outcome, ShmstageError)]
            failed = self._drops and self.error is not None and self.error.from_peer
            self._enter(Phase.DROP if failed else Phase.OVER)
        else:
            self._dropped(outcomes)
            self._enter(Phase.OVER)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is not Phase.OVER:
            self.gathering = Gathering(len(self._names))

    def _why_not(self, outcomes: Sequence[Outcome]) -> ShmstageError | None:
        error = refusal(self._what, self._names, outcomes)
        if error is not None or not self._compares:
            return error
        states = [self._overlooking(state) for state in states_of(self._names, outcomes)]
        difference = differing(states, self._names)
        if not difference:
            return None
        error = TrainerError(
            f"{self._what}: {difference}; nothing was begun on any host; the hosts can go on together only from a "
            "checkpoint"
        )
        error.from_peer = True  # they have answered, and nothing is under way: what is trained can be saved
        return error

    def _overlooking(self, state: Result) -> Result:
        staged = str(state.get("staged")).partition(",")[0]
        return {**state, "staged": None} if self._overlooks and staged == self._overlooks else state

    def _dropped(self, outcomes: Sequence[Outcome]) -> None:
        failed = [name for name, o in zip(self._names, outcomes, strict=True) if isinstance(o, ShmstageError)]
        self.left_behind = bool(failed)
        assert self.error is not None
        done = f"it may still be staged on {listed(failed)}" if failed else "it is staged on none"
        self.error = named(self.error, f"{self.error}; {done}")

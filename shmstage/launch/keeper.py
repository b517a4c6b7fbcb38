"""Keeps a run's two children going: starts them, starts again what died, and knows when it is over.

Clock, children and what they left behind are passed in; ``look`` is one turn of the launcher's loop and never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, final

from shmstage.errors import InputError, PeerLostError, ShmstageError
from shmstage.launch.supervisor import Ending, Restarts, ending_of

ROLES = ("trainer", "orchestrator")
#: how long one child may take to notice that the other has failed, and to say what it knows of it
NOTICE_S = 2.0
#: how long the orchestrator may take to end after it has told the trainer to
ORDERLY_S = 5.0


class ChildProcess(Protocol):
    """What the keeper asks of a child."""

    @property
    def pid(self) -> int:
        """Its process."""

    def exit_code(self) -> int | None:
        """``None`` while it runs."""

    def describe_end(self) -> str:
        """How it ended, with its log."""

    def how_it_ended(self) -> str:
        """The same, short."""

    def end(self, grace_s: float) -> None:
        """Stop it, reap it, give up its pipe; harmless for one that is gone."""


class World(Protocol):
    """Where the keeper acts."""

    def start(self, role: str, epoch: int) -> ChildProcess:
        """Start a child; what its predecessor left as the reason of its end is gone."""

    def told(self, role: str) -> ShmstageError | None:
        """The reason the child left, if it left one."""

    def is_complete(self) -> bool:
        """True once the orchestrator has written the summary."""

    def reached(self) -> int:
        """The highest step completed so far."""

    def changed(self, keeper: Keeper) -> None:
        """Pids, epoch or restarts are others now."""

    def say(self, text: str) -> None:
        """For people."""


@dataclass
class _Role:
    restarts: Restarts
    child: ChildProcess | None = None
    ending: Ending | None = None
    ended_at_s: float = 0.0
    again_at_s: float | None = None


@final
class Keeper:
    """``begin``, then ``look`` until it says that it is over; ``failure`` tells how."""

    def __init__(
        self, world: World, *, max_restarts: int, backoff_s: float, grace_s: float, clock: Callable[[], float]
    ) -> None:
        self.epoch = 1
        self.failure: ShmstageError | None = None
        self._world = world
        self._grace_s = grace_s
        self._clock = clock
        self._roles = {role: _Role(Restarts(max_restarts, backoff_s)) for role in ROLES}

    # --- what others may know -------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int | None]:
        """``None``: it is dead and its successor not started yet."""
        return {
            name: role.child.pid if role.child is not None and role.ending is None else None
            for name, role in self._roles.items()
        }

    @property
    def restarts(self) -> dict[str, int]:
        """How often each was started again after it had died."""
        return {name: role.restarts.total for name, role in self._roles.items()}

    @property
    def children(self) -> Mapping[str, ChildProcess]:
        """The latest of each role, dead or alive."""
        return {name: role.child for name, role in self._roles.items() if role.child is not None}

    @property
    def anyone_died(self) -> bool:
        return any(role.restarts.total or role.ending is Ending.DIED for role in self._roles.values())

    # --- the loop -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for name in ROLES:
            self._start(name)
        self._world.changed(self)

    def look(self) -> bool:
        """One turn: note who has ended, start again whose time has come. True when it is over."""
        for name in reversed(ROLES):  # when the orchestrator is done, the trainer may end as it likes
            self._note_end(name)
        if self._is_over():
            return True
        now = self._clock()
        for name, role in self._roles.items():
            if role.again_at_s is not None and now >= role.again_at_s:
                if name == "orchestrator":
                    self.epoch += 1
                self._start(name)
                self._world.changed(self)
        return False

    def end(self) -> None:
        """End whoever still runs; the orchestrator first: it applies a deferred update and tells the trainer to end."""
        for name in reversed(ROLES):
            child = self._roles[name].child
            if child is not None:
                child.end(self._grace_s)

    # --- decisions ------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        role = self._roles[name]
        if role.child is not None:
            role.child.end(0.0)
        role.child = self._world.start(name, self.epoch)
        role.ending, role.again_at_s = None, None

    def _note_end(self, name: str) -> None:
        role = self._roles[name]
        child = role.child
        code = child.exit_code() if child is not None else None
        if child is None or code is None or role.ending is not None:
            return
        role.ended_at_s = self._clock()
        role.ending = ending_of(code, self._world.told(name))
        if name == "orchestrator" and role.ending is Ending.DIED and self._world.is_complete():
            role.ending = Ending.FINISHED  # it had nothing left to do
        if role.ending is Ending.DIED and not self.is_done:
            self._plan_restart(name, role, child)
        self._world.changed(self)

    def _plan_restart(self, name: str, role: _Role, child: ChildProcess) -> None:
        restart = role.restarts.died(role.ended_at_s, self._world.reached())
        if restart is None:
            text = f"the {name} (pid {child.pid}) {child.describe_end()}"
            if role.restarts.in_vain:
                text += f"; {_times(role.restarts.in_vain)} in vain; raise max_restarts if another try could help"
            self.failure = PeerLostError(text)
            return
        role.again_at_s = restart.at_s
        self._world.say(
            f"{name} (pid {child.pid}) {child.how_it_ended()}; restarting, {restart.number} of {role.restarts.limit}"
        )

    @property
    def is_done(self) -> bool:
        """True once the orchestrator has done all there was to do; how the trainer ends changes nothing then."""
        return self._roles["orchestrator"].ending is Ending.FINISHED

    def _is_over(self) -> bool:
        trainer, orchestrator = (self._roles[name] for name in ROLES)
        if self.failure is not None or self.is_done:
            return True
        if Ending.FAILED in (trainer.ending, orchestrator.ending):
            return self._has_been_explained(trainer, orchestrator)
        if trainer.ending is Ending.FINISHED and trainer.child is not None:
            # told to by an orchestrator that is dead now, or that did not hear its answer; or by somebody else
            patience_s = min(ORDERLY_S, self._grace_s) if orchestrator.ending is None else 0.0
            if self._clock() >= trainer.ended_at_s + patience_s:
                trainer.ending = Ending.DIED
                self._plan_restart("trainer", trainer, trainer.child)
        return self.failure is not None

    def _has_been_explained(self, trainer: _Role, orchestrator: _Role) -> bool:
        """What one says may be the echo of what the other could say better, a moment later."""
        failed = [role for role in (trainer, orchestrator) if role.ending is Ending.FAILED]
        told = [error for name in ROLES if (error := self._world.told(name)) is not None]
        if trainer in failed or any(isinstance(error, InputError) for error in told):
            return True
        return trainer.ending is not None or self._clock() > orchestrator.ended_at_s + NOTICE_S


def _times(number: int) -> str:
    return f"restarted {number} time{'s' * (number > 1)}"

"""A trainer that spans hosts, called as if it were one: every command in two phases, every event once.

``TwoPhases`` and ``FleetEvents`` decide; here are the sockets, the clock and the waiting.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, final

from shmstage.errors import InputError, PeerLostError, ShmstageError, StoppedError
from shmstage.orchestrator.fleet_answers import combined, gravest, named
from shmstage.orchestrator.fleet_events import Event, FleetEvents
from shmstage.orchestrator.handle_book import HandleBook
from shmstage.orchestrator.two_phases import Gathering, Outcome, Phase, TwoPhases
from shmstage.transport.client import Client, PendingCall
from shmstage.transport.zmq_socket import Waker
from shmstage.wire.handles import handle_from_wire, handle_to_wire, named_by
from shmstage.wire.messages import Hello, TokenEvent, Welcome

#: longest it sits without a look: a socket's descriptor may have told of its news too early
POLL_S = 0.05
#: how long the others may take to answer once one has failed: they may wait for it in a collective for ever
GRACE_S = 5.0
#: how long a host may answer no ping before it counts as lost: no process of another host can be watched from here
SILENCE_S = 30.0
#: what changes nothing, or ends everything: told to all, not agreed on
UNPREPARED = frozenset({"get_step_timing", "release_weight_sync", "ranges"})
HELLO_THREADS = 32


@final
@dataclass(frozen=True)
class Member:
    """One host's trainer. ``name`` is how errors call it: ``host 1 (node-b)``."""

    name: str
    client: Client


@final
class TrainerFleet:
    """Used by one thread at a time, except for ``wake``. Member 0 is host 0, whose stamps and files count."""

    def __init__(
        self,
        members: Sequence[Member],
        book: HandleBook,
        *,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = GRACE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Takes the clients over; ``hello`` or whoever made them opens their sessions."""
        if not members:
            raise InputError("a fleet of no hosts; give it one member per trainer host")
        self.members = tuple(members)
        self._names = [member.name for member in members]
        self._clients = [member.client for member in members]
        self._book = book
        self._clock = clock
        self._grace_s = grace_s
        self._silence_s = silence_s
        self._events = FleetEvents(self._names, book)
        self._number = 0
        #: a stage that failed on one host: not to be left on any
        self._left_behind = ""
        #: a stage whose answer never came: some hosts have it, some may not
        self._unanswered = ""
        self._waker = Waker()
        self._woken = False

    @property
    def sequence(self) -> int:
        """Of host 0's last call, by which its own events name it."""
        return self._clients[0].sequence

    def hello(self, hellos: Sequence[Hello], timeout_s: float) -> list[Welcome]:
        """Opens all sessions at once, one hello per member. Raises the gravest error, naming its host."""

        def say(host: int) -> Welcome | ShmstageError:
            try:
                return self._clients[host].hello(hellos[host], timeout_s)
            except ShmstageError as error:
                return error

        with ThreadPoolExecutor(min(HELLO_THREADS, len(self._clients))) as pool:
            answers = list(pool.map(say, range(len(self._clients))))
        welcomes = [answer for answer in answers if isinstance(answer, Welcome)]
        error = gravest(self._names, [each.info if isinstance(each, Welcome) else each for each in answers])
        if error is not None:
            raise error
        combined("hello", self._names, [welcome.info for welcome in welcomes])
        self._events.clear()
        return welcomes

    def call(self, command: str, arguments: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Prepares a command on all hosts and, if all accept it in the same state, runs it on all.

        ``timeout_s`` is for each of the two. Raises what a host refused with, under its own class and naming it: then
        nothing was begun anywhere. ``PeerLostError`` for a dead host, ``WaitTimeoutError`` for a silent one,
        ``TrainerError`` where one fails at what all had accepted, or the states differ. A stage that fails on one host
        is dropped on all.
        """
        if command in UNPREPARED or arguments.get("discard") is True:
            return combined(command, self._names, self.each(command, arguments, timeout_s))
        if command == "restore_checkpoint":
            self._left_behind = self._unanswered = ""  # it drops every stage
        self._drop_left_behind(timeout_s)
        own = [self._own(host, arguments) for host in range(len(self._clients))]
        request_id = named_by(arguments)[2]
        self._number += 1
        stages = command == "stage_fwd_bwd"
        phases = TwoPhases(
            f"{command} {request_id}".rstrip(), self._names, drops=stages, compares=command != "restore_checkpoint",
            overlooks=self._unanswered.partition("@")[0],
        )  # fmt: skip
        prepare = [{"command": command, "arguments": each, "sequence": self._number} for each in own]
        asked: dict[Phase, list[tuple[str, dict[str, Any]]]] = {
            Phase.PREPARE: [("prepare", each) for each in prepare],
            Phase.COMMIT: [(command, each) for each in own],
            Phase.DROP: self._drops(request_id) if stages else [],
        }
        while phases.phase is not Phase.OVER:
            if stages and phases.phase is Phase.COMMIT:
                self._unanswered = request_id  # unless what follows says otherwise
            self._ask(phases, asked[phases.phase], timeout_s)
        if phases.error is None or phases.error.from_peer:
            used_up = command == "fwd_bwd" and phases.error is None and request_id == self._unanswered
            self._unanswered = "" if stages or used_up else self._unanswered
        self._left_behind = request_id if phases.left_behind else ""
        if phases.error is not None:
            raise phases.error from phases.error.__cause__
        return self._as_one(command, request_id, phases.results)

    def each(
        self, command: str, arguments: Mapping[str, Any] | Sequence[Mapping[str, Any]], timeout_s: float
    ) -> list[dict[str, Any]]:
        """Tells all hosts at once, without agreement, and returns every host's answer.

        ``arguments``: the same for all, or one mapping per member. The gravest error is raised when all were told.
        """
        given = [arguments] * len(self._clients) if isinstance(arguments, Mapping) else arguments
        gathering = Gathering(len(self._clients))
        pending = self._begin(gathering, [(command, dict(each)) for each in given])
        self._wait(gathering, pending, timeout_s, grace_s=timeout_s)
        error = gravest(self._names, gathering.outcomes)
        if error is not None:
            raise error
        return [dict(outcome) for outcome in gathering.outcomes if not isinstance(outcome, ShmstageError)]

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """What all hosts have told; waits up to ``timeout_s`` for the first, or until ``wake``.

        Raises ``PeerLostError`` for a dead host, ``TrainerError`` for hosts that tell different things.
        """
        deadline = self._clock() + timeout_s
        while True:
            self._waker.clear()  # first: one that is set from here on ends the rest below
            lost = self._hear()
            ready = self._events.take()
            left_s = deadline - self._clock()
            if ready or self._woken or left_s <= 0:
                self._woken = False
                if lost is not None and not ready:
                    raise lost
                return self._noted(ready)
            if lost is not None:
                raise lost
            self._rest(min(left_s, POLL_S), range(len(self._clients)), self._waker.fd)

    def wake(self) -> None:
        """From any thread: the running or the next ``events`` returns at once, with what it has."""
        self._woken = True
        self._waker.set()

    def missing(self) -> list[str]:
        """Events that some hosts have told and others not, in words."""
        return self._events.missing()

    def close(self) -> None:
        """Gives all channels back."""
        for client in self._clients:
            client.close()
        self._waker.close()

    # --- one question to all ----------------------------------------------------------------------------------

    def _ask(self, phases: TwoPhases, calls: Sequence[tuple[str, dict[str, Any]]], timeout_s: float) -> None:
        gathering = phases.gathering
        pending = self._begin(gathering, calls)
        self._wait(gathering, pending, timeout_s, self._grace_s)
        phases.answered()

    def _begin(
        self, gathering: Gathering, calls: Sequence[tuple[str, dict[str, Any]]]
    ) -> list[PendingCall | None]:
        pending: list[PendingCall | None] = []
        for host, (command, arguments) in enumerate(calls):
            try:
                pending.append(self._clients[host].begin(command, arguments))
            except ShmstageError as error:
                pending.append(None)
                gathering.heard(host, error)
        return pending

    def _wait(
        self, gathering: Gathering, pending: Sequence[PendingCall | None], timeout_s: float, grace_s: float
    ) -> None:
        """Returns when all have answered, or no more time is left for those that have not."""
        deadline = self._clock() + timeout_s
        hurried = False
        while True:
            quiet = True
            for host in gathering.waiting:
                outcome = self._answer(host, pending[host])
                if outcome is not None:
                    gathering.heard(host, outcome)
                    quiet = False
            waiting = gathering.waiting
            if not waiting:
                return
            now = self._clock()
            if gathering.failed and not hurried:
                hurried, deadline = True, min(deadline, now + grace_s)
            if now >= deadline:
                gathering.give_up({host: self._overdue(host, pending[host], timeout_s, hurried) for host in waiting})
                return
            if quiet:
                self._rest(min(POLL_S, deadline - now), waiting)

    def _answer(self, host: int, pending: PendingCall | None) -> Outcome | None:
        assert pending is not None, "a call that was not begun has its outcome"
        try:
            result = self._clients[host].answer(pending)
            return self._silent(host, pending.describe()) if result is None else result
        except StoppedError:
            raise
        except ShmstageError as error:
            return error

    def _silent(self, host: int, what: str) -> PeerLostError | None:
        silent_s = self._clients[host].silent_s()
        if silent_s < self._silence_s:
            return None
        return PeerLostError(
            f"it has answered no ping for {silent_s:.0f} s, while {what} was waited for: dead, stopped or cut off"
        )

    def _overdue(self, host: int, pending: PendingCall | None, timeout_s: float, hurried: bool) -> str:
        assert pending is not None
        text = self._clients[host].overdue(pending, self._grace_s if hurried else timeout_s)
        return f"{text}; another host has failed, and it may wait for that one" if hurried else text

    def _rest(self, wait_s: float, hosts: Sequence[int], *more: int) -> None:
        poll = select.poll()
        for descriptor in (*(self._clients[host].descriptor() for host in hosts), *more):
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(1.0, wait_s * 1000))

    # --- whole and parts --------------------------------------------------------------------------------------

    def _own(self, host: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with this host's own handle or request id in them."""
        own = dict(arguments)
        if "handle" in own:
            whole = handle_from_wire(own["handle"])
            part = self._book.parts(whole.request_id)[host]
            own["handle"] = handle_to_wire(replace(part, loss_tokens=whole.loss_tokens))
        if "request_id" in own:
            own["request_id"] = self._book.parts(str(own["request_id"]))[host].request_id
        return own

    def _as_one(self, command: str, request_id: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        reply = combined(command, self._names, results)
        if command == "restore_checkpoint":
            self._events.clear()
            self._book.clear()
        if "request_id" in reply:
            reply["request_id"] = request_id
        if "ticket" in reply:
            tickets = [int(result["ticket"]) for result in results]
            reply["ticket"] = self._events.promised(tickets, of=request_id if command == "eval_step" else "")
        return reply

    # --- events -----------------------------------------------------------------------------------------------

    def _hear(self) -> ShmstageError | None:
        """Takes what has come; returns the error of a host that can tell nothing more."""
        lost: ShmstageError | None = None
        for host, client in enumerate(self._clients):
            try:
                heard = client.events(0.0)
                if (silent := self._silent(host, "its events")) is not None:
                    raise silent
            except StoppedError:
                raise
            except ShmstageError as error:
                lost = lost or named(error, f"{self._names[host]}: {error}")
                continue
            for event in heard:
                self._events.heard(host, event)
        return lost

    def _noted(self, ready: list[Event]) -> list[Event]:
        for event in ready:
            if isinstance(event, TokenEvent) and event.kind == "staged" and not event.ok:
                self._left_behind = event.request_id
        return ready

    def _drops(self, request_id: str) -> list[tuple[str, dict[str, Any]]]:
        return [("drop_staged", {"request_id": part.request_id}) for part in self._book.parts(request_id)]

    def _drop_left_behind(self, timeout_s: float) -> None:
        """Before anything else is agreed on. Raises where a host cannot be told: then nothing can be."""
        request_id = self._left_behind
        if request_id and self._book.knows(request_id):
            gathering = Gathering(len(self._clients))
            pending = self._begin(gathering, self._drops(request_id))
            self._wait(gathering, pending, timeout_s, self._grace_s)
            for name, outcome in zip(self._names, gathering.outcomes, strict=True):
                if isinstance(outcome, ShmstageError):
                    raise named(outcome, f"{name}: dropping the stage of {request_id}: {outcome}")
        self._left_behind = ""

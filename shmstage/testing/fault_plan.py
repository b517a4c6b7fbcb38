"""Which frames of a channel go wrong, and how: named ones, or random ones from a seed. Pure, no channel, no clock.

A frame's name says what travels, the same at both ends:

    hello · welcome · refusal · ping · pong · ack · bytes (nothing of ours)
    request CALL · reply CALL        CALL = command and what it is of: ``fwd_bwd 1.2``, ``get_metrics 3``, ``update``;
                                     of a fleet also ``prepare fwd_bwd 1.2``
    token KIND STEP.INDEX · ticket KIND STEP
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, final

from shmstage.errors import ProtocolError
from shmstage.wire.codec import decode
from shmstage.wire.handles import handle_from_wire
from shmstage.wire.messages import EventAck, Message, Reply, Request, TicketEvent, TokenEvent


class Effect(StrEnum):
    """What happens to a frame."""

    PASS = "pass"
    LOSE = "lose"
    DOUBLE = "double"
    DELAY = "delay"
    """Held back until another frame has passed; behind the very next one, the two have changed places."""


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """``effect`` on frames whose name matches the pattern ``frame``: on ``times`` of them (None: all), from the
    ``nth`` on. A delay ends behind the first frame, of either direction, whose name matches ``until``; ""
    means the next one of its own direction.
    """

    frame: str
    effect: Effect
    nth: int = 1
    times: int | None = 1
    until: str = ""


@final
@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Named faults and, with ``rate`` > 0, random ones: each frame meets one with that probability.

    What happens to a frame depends on ``seed``, its name and how often that name has come, never on timing; no name
    meets more than ``most_in_a_row`` random faults one after the other, so that retries get through.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    rate: float = 0.0
    effects: tuple[Effect, ...] = (Effect.LOSE, Effect.DOUBLE, Effect.DELAY)
    most_in_a_row: int = 2

    def drawn(self, name: str, occurrence: int) -> Effect:
        """The random effect on the ``occurrence``-th frame (from 1) of this name."""
        if self.rate <= 0 or occurrence % (self.most_in_a_row + 1) == 0:
            return Effect.PASS
        dice = random.Random(f"{self.seed}/{name}/{occurrence}")
        return dice.choice(self.effects) if dice.random() < self.rate else Effect.PASS


@final
class FaultScript:
    """A plan being carried out: counts the frames it is shown. ``done`` lists what was done, as ``effect name``."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.done: list[str] = []
        self._matches: Counter[int] = Counter()
        self._names: Counter[str] = Counter()
        self._lock = threading.Lock()

    def decide(self, name: str) -> tuple[Effect, str]:
        """What happens to the frame of this name that is here now, and until when it is held back."""
        with self._lock:
            self._names[name] += 1
            due = []
            for number, fault in enumerate(self.plan.faults):
                if fnmatchcase(name, fault.frame):
                    self._matches[number] += 1
                    behind = self._matches[number] - fault.nth
                    if behind >= 0 and (fault.times is None or behind < fault.times):
                        due.append((fault.effect, fault.until))
            effect, until = due[0] if due else (self.plan.drawn(name, self._names[name]), "")
            if effect is not Effect.PASS:
                self.done.append(f"{effect} {name}")
            return effect, until

    def unmet(self) -> list[Fault]:
        """Faults that no frame has met: a test that leaves some has tested nothing."""
        with self._lock:
            return [f for number, f in enumerate(self.plan.faults) if self._matches[number] < f.nth]


@final
class FrameNames:
    """Names frames; remembers which request a reply's sequence belongs to."""

    def __init__(self) -> None:
        self._calls: dict[int, str] = {}

    def of(self, frame: bytes) -> str:
        try:
            return self._name(decode(frame))
        except ProtocolError:
            return "bytes"

    def _name(self, message: Message) -> str:
        if isinstance(message, Request):
            self._calls[message.sequence] = call_name(message.command, message.arguments)
            return f"request {self._calls[message.sequence]}"
        if isinstance(message, Reply):
            return f"reply {self._calls.get(message.sequence, '?')}" if message.sequence else "refusal"
        if isinstance(message, TokenEvent):
            return f"token {message.kind} {message.step}.{message.index}"
        if isinstance(message, TicketEvent):
            return f"ticket {message.kind} {message.step}"
        return "ack" if isinstance(message, EventAck) else type(message).__name__.lower()


def call_name(command: str, arguments: Mapping[str, Any]) -> str:
    """A call in words: ``fwd_bwd 1.2``, ``save_checkpoint 3``, ``apply_deferred_update``. Never raises ours.

    What a fleet asks first is ``prepare fwd_bwd 1.2``.
    """
    if command == "prepare" and isinstance(arguments.get("arguments"), dict):
        return f"prepare {call_name(str(arguments.get('command')), arguments['arguments'])}"
    if "handle" in arguments:
        try:
            handle = handle_from_wire(arguments["handle"])
        except ProtocolError:
            return f"{command} ?"
        return f"{command} {handle.step}.{handle.index}"
    if "request_id" in arguments:
        return f"{command} {str(arguments['request_id']).partition('@')[0]}"
    of = arguments.get("step", arguments.get("version"))
    return command if of is None else f"{command} {of}"

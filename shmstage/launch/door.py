"""One endpoint of a host's agent or store: a server and the thread that runs its commands."""

from __future__ import annotations

import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, final

from shmstage.errors import ProtocolError, shown
from shmstage.memory.identity import read_start_ticks
from shmstage.transport.channel import ServerChannel
from shmstage.transport.server import Pending, Server
from shmstage.wire.messages import PROTOCOL_VERSION, Hello, Welcome

T = TypeVar("T")

log = logging.getLogger(__name__)

#: longest the thread sits without looking whether it has to stop, in seconds
POLL_S = 0.1
#: how long a command may take to notice that its door is closed
CLOSE_S = 5.0


@final
@dataclass(frozen=True, slots=True)
class Speaker:
    """Who answers a hello."""

    pid: int
    start_ticks: int = 0
    lock_path: str = ""

    @classmethod
    def of(cls, pid: int) -> Speaker:
        return cls(pid, read_start_ticks(pid))


class Arguments:
    """A command's arguments, taken by name and type. Raises ``ProtocolError`` for what no caller of ours sends."""

    def __init__(self, command: str, values: Mapping[str, Any]) -> None:
        self._command = command
        self._values = values

    def take(self, name: str, kind: type[T]) -> T:
        value = self._values.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ProtocolError(f"{self._command}: {name} wants {kind.__name__}, got {shown(value)}")
        return value

    def get(self, name: str, kind: type[T], otherwise: T) -> T:
        return self.take(name, kind) if name in self._values else otherwise

    def any(self, name: str) -> Any:
        """For what has a strict reader of its own."""
        if name not in self._values:
            raise ProtocolError(f"{self._command}: {name} is missing")
        return self._values[name]


Command = Callable[["Arguments", Callable[[], bool]], dict[str, Any]]
"""Runs with its arguments and ``given_up()``: true once nobody waits for its answer any more."""


@final
class Door:
    """Made open. ``welcome`` gives what a hello's answer tells; it and the commands run on one thread of this door."""

    def __init__(
        self,
        name: str,
        channel: ServerChannel,
        speaker: Speaker,
        welcome: Callable[[Hello], dict[str, Any]],
        commands: Mapping[str, Command],
    ) -> None:
        self._name = name
        self._speaker = speaker
        self._welcome = welcome
        self._commands = commands
        self._closing = False
        self._server = Server(channel, incarnation=secrets.randbelow(2**48) + 1)
        self._server.start()
        self._thread = threading.Thread(target=self._run, name=f"door {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The command that runs is told to give up; harmless twice."""
        if not self._closing:
            self._closing = True
            self._thread.join(CLOSE_S)
            self._server.close()

    def _given_up(self) -> bool:
        return self._closing or self._server.hello_waiting

    def _run(self) -> None:
        try:
            while not self._closing:
                pending = self._server.next_request(POLL_S)
                if pending is not None:
                    self._answer(pending)
        except Exception:
            if not self._closing:
                log.exception("door %s is closed", self._name)

    def _answer(self, pending: Pending) -> None:
        try:
            if pending.hello is not None:
                info = self._welcome(pending.hello)
                me = self._speaker
                pending.welcome(
                    Welcome(PROTOCOL_VERSION, self._server.incarnation, me.pid, me.start_ticks, me.lock_path, info)
                )
                return
            command = self._commands.get(pending.command)
            if command is None:
                known = ", ".join(self._commands)
                raise ProtocolError(f"{self._name} knows no command {shown(pending.command)}; it knows {known}")
            pending.reply(command(Arguments(pending.command, pending.arguments), self._given_up))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they may hold views of a slot
            log.warning("%s: %s refused or failed: %s: %s", self._name, pending.command, type(error).__name__, error)
            pending.fail(error)

"""The same door on every host, called on all of them at once; what one says is told under its host's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

from shmstage.errors import PeerLostError, ProtocolError, ShmstageError, StoppedError, shown
from shmstage.transport.channel import Channel
from shmstage.transport.client import Client
from shmstage.wire.messages import Hello

T = TypeVar("T")

#: before a request is sent again: frames are lost only where a connection breaks, and a wait for a slot may be long
RETRY_S = 10.0


@final
class Doors:
    """``names`` of the hosts, as they stand in errors, in the order of the channels. Used by one thread at a time.

    Takes the channels over. ``stop``, settable, is asked every 0.1 s of a wait and ends it with ``StoppedError``.
    """

    def __init__(self, what: str, names: Sequence[str], channels: Sequence[Channel]) -> None:
        self.names = tuple(names)
        self.stop: Callable[[], bool] = lambda: False
        self._what = what
        self._channels = tuple(channels)
        self._clients = [Client(channel, stop=lambda: self.stop()) for channel in self._channels]

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def nbytes(self) -> int:
        """Sent and received so far."""
        return sum(channel.sent_nbytes + channel.received_nbytes for channel in self._channels)

    def who(self, host: int) -> str:
        return f"the {self._what} of {self.names[host]}"

    def hello(self, hello: Hello, timeout_s: float) -> list[Answer]:
        """Open a session with each; returns what they tell of themselves."""
        welcomes = [self._named(host, lambda client: client.hello(hello, timeout_s)) for host in range(len(self))]
        return [Answer(welcome.info, f"{self.who(host)}, hello") for host, welcome in enumerate(welcomes)]

    def call(self, host: int, command: str, arguments: dict[str, Any], *, timeout_s: float) -> Answer:
        """Ask one host."""
        result = self._named(host, lambda client: client.call(command, arguments, timeout_s=timeout_s, retry_s=RETRY_S))
        return Answer(result, f"{self.who(host)}, {command}")

    def each(self, command: str, arguments: Sequence[dict[str, Any]], *, timeout_s: float) -> list[Answer]:
        """Ask all hosts at once, each with arguments of its own; the first error is raised, of whichever host.

        ``timeout_s`` counts for each answer from the moment it is waited for.
        """
        begun = [
            self._named(host, lambda client, mine=mine: client.begin(command, mine))  # type: ignore[misc]
            for host, mine in enumerate(arguments)
        ]
        results = [
            self._named(host, lambda client, call=call: client.finish(call, timeout_s=timeout_s, retry_s=RETRY_S))  # type: ignore
            for host, call in enumerate(begun)
        ]
        return [Answer(result, f"{self.who(host)}, {command}") for host, result in enumerate(results)]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _named(self, host: int, ask: Callable[[Client], T]) -> T:
        try:
            return ask(self._clients[host])
        except StoppedError as error:
            if error.from_peer:  # nobody has stopped this process
                raise PeerLostError(f"{self.who(host)} was stopped: {error}") from None
            raise
        except ShmstageError as error:
            named = type(error)(f"{self.who(host)}: {error}")
            named.from_peer = error.from_peer
            raise named from None


@final
class Answer:
    """What a host answered, taken by name and type. Raises ``ProtocolError`` for what no host of ours says."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = values

    def take(self, name: str, kind: type[T]) -> T:
        value = self._values.get(name)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ProtocolError(f"{self.where}: {name} wants {kind.__name__}, got {shown(value)}")
        return value

    def count(self, name: str) -> int:
        """An integer from 0."""
        value = self.take(name, int)
        if value < 0:
            raise ProtocolError(f"{self.where}: {name} = {value}; want an integer from 0")
        return value

    def any(self, name: str) -> Any:
        """For what has a strict reader of its own; ``None`` if it is missing."""
        return self._values.get(name)

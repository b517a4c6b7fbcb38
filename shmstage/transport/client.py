"""The asking side of the command channel. One thread: the caller polls its own socket, nothing is handed over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from shmstage.errors import (
    PeerLostError,
    ProtocolError,
    ShmstageError,
    StoppedError,
    WaitTimeoutError,
    by_name,
)
from shmstage.memory.identity import PeerWatch
from shmstage.transport.channel import Channel, OneAtATime
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import (
    EventAck,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    Request,
    TicketEvent,
    TokenEvent,
    Welcome,
)

Event = TokenEvent | TicketEvent

RETRY_S = 2.0
"""Seconds without an answer before the same request is sent again."""

_PING_S = 1.0
_POLL_S = 0.1  # how long a dead peer or a stop goes unnoticed
_DRAIN_S = 0.25  # how long the last frames of a dead peer may take out of the kernel's buffers
_FULL_S = 0.01  # before another try when the channel did not take a frame
_RESEND_ASK_S = 0.2
_ACK_EVERY = 32  # events, unless there is time to wait: the server keeps what is not acknowledged
_ERRORS = by_name()


@final
@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call whose answer nobody has waited for yet."""

    command: str
    sequence: int
    frame: bytes
    sent_at: float
    sent: bool

    def describe(self) -> str:
        return f"{self.command} (sequence {self.sequence})"


@final
class Client:
    """Calls a server, and collects its events."""

    def __init__(
        self,
        channel: Channel,
        *,
        clock: Callable[[], float] = time.monotonic,
        peer: PeerWatch | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """Takes the channel over.

        ``peer`` (settable later) tells whether the server's process is dead; ``stop()`` is asked every 0.1 s of
        a wait and ends it with ``StoppedError``.
        """
        self.peer = peer
        #: the slots a dead peer held, for the error that tells its death; "" is none
        self.peer_held: Callable[[], str] | None = None
        self._channel = channel
        self._clock = clock
        self._stop = stop
        self._epoch = 0
        self._incarnation = 0
        self._sequence = 0
        self._inbox: list[Event] = []
        self._received = 0  # the last event in order
        self._acknowledged = 0
        self._resend_asked = (-1, 0.0)
        self._ping_number = 0
        self._ping_at = 0.0
        self._pong: tuple[float, str] | None = None
        self._check_at = 0.0
        self._send_at = 0.0  # of the newest call
        self._dead_since: float | None = None
        self._asked_at: float | None = None  # the first ping since anything came
        self._woken = False
        self._listening = False
        self._in_use = OneAtATime()

    @property
    def incarnation(self) -> int:
        """The server's incarnation as of the last ``hello``; 0 before."""
        return self._incarnation

    @property
    def sequence(self) -> int:
        """Of the last call; 0 before the first."""
        return self._sequence

    def hello(self, hello: Hello, timeout_s: float) -> Welcome:
        """Opens a session, repeating itself until the server is up and answers.

        Raises ``WaitTimeoutError``, ``PeerRestartedError`` if a newer epoch has taken over, ``ProtocolError`` if
        the other side speaks another version, or whatever the server failed with.
        """
        with self._in_use:
            while self._channel.recv(0.0) is not None:
                pass  # left over from a session that is over
            before = (self._epoch, self._incarnation)
            self._incarnation = 0  # so that its late events are not taken for new ones
            self._pong = None
            answer = self._exchange(
                encode(hello), "hello", timeout_s, 0.25, lambda m: isinstance(m, Welcome) or _is_refusal(m)
            )
            if isinstance(answer, Reply):
                raise _error_of(answer)
            assert isinstance(answer, Welcome)
            self._epoch, self._incarnation = hello.epoch, answer.incarnation
            if before == (self._epoch, self._incarnation):
                self._received = max(self._received, answer.first_event - 1)
            else:
                self._inbox.clear()
                self._received = answer.first_event - 1
            self._acknowledged = answer.first_event - 1
            return answer

    def call(
        self, command: str, arguments: dict[str, Any], *, timeout_s: float, retry_s: float = RETRY_S
    ) -> dict[str, Any]:
        """Runs a command in the server and returns its result; the command runs at most once.

        The same request is sent again every ``retry_s`` seconds: the server answers a finished one from memory and
        lets a retry of a running one join it.

        Raises the server's error under its own class, ``PeerRestartedError`` if the server is another incarnation
        (nothing was done), ``PeerLostError`` if its process is dead, ``WaitTimeoutError`` past the deadline: then
        the command may still run, until a later call cancels it.
        """
        return self.finish(self.begin(command, arguments), timeout_s=timeout_s, retry_s=retry_s)

    def begin(self, command: str, arguments: dict[str, Any]) -> PendingCall:
        """Sends the request of a call and does not wait: the way to call several servers at once.

        Of one client only the newest call can be finished: a higher sequence cancels lower ones.
        """
        with self._in_use:
            if self._incarnation == 0:
                raise ProtocolError(f"{command} was called before hello()")
            self._sequence += 1
            frame = encode(Request(self._epoch, self._incarnation, self._sequence, command, arguments))
            now = self._clock()
            sent = self._channel.send(frame)
            self._send_at = now + (RETRY_S if sent else _FULL_S)
            return PendingCall(command, self._sequence, frame, now, sent)

    def answer(self, pending: PendingCall) -> dict[str, Any] | None:
        """The answer to what was begun if it has come: ``finish`` without waiting and without a deadline.

        Sends again what is due. Who waits for several servers waits for their ``descriptor`` between two looks.
        """
        with self._in_use:
            self._check_newest(pending)
            now = self._clock()
            if now >= self._send_at:
                self._send_at = now + (RETRY_S if self._channel.send(pending.frame) else _FULL_S)
            self._ping_if_due(now)
            # last: the descriptor tells only of what comes after nothing was left, and sending may take its signal
            while (received := self._channel.recv(0.0)) is not None:
                message = self._take(received)
                if _answers(message, pending):
                    assert isinstance(message, Reply)
                    return _result_of(message)
            if now >= self._check_at:
                over = self._dead_since is not None and now >= self._dead_since + _DRAIN_S
                dead = self._check(pending.describe(), over)
                self._dead_since = None if not dead else now if self._dead_since is None else self._dead_since
            return None

    def descriptor(self) -> int:
        """Becomes readable when ``answer`` or ``events`` may find something, if they have found nothing before."""
        return self._channel.descriptor()

    def silent_s(self) -> float:
        """How long pings have gone out and nothing has come: a server that computes, or waits, still answers them."""
        return 0.0 if self._asked_at is None else self._clock() - self._asked_at

    def overdue(self, pending: PendingCall, timeout_s: float) -> str:
        """Why nobody waits any longer for what was begun, and what the server was last heard to do."""
        return self._overdue(pending.describe(), timeout_s, self._clock())

    def finish(self, pending: PendingCall, *, timeout_s: float, retry_s: float = RETRY_S) -> dict[str, Any]:
        """Waits for the answer to what was begun; raises as ``call``. ``timeout_s`` counts from now."""
        with self._in_use:
            self._check_newest(pending)
            answer = self._exchange(
                pending.frame,
                pending.describe(),
                timeout_s,
                retry_s,
                lambda m: _answers(m, pending),
                sent_at=pending.sent_at if pending.sent else None,
            )
            assert isinstance(answer, Reply)
            return _result_of(answer)

    def events(self, timeout_s: float = 0.0) -> list[Event]:
        """Events in the order of their numbers, none lost, none twice; also those that came during calls.

        Waits up to ``timeout_s`` seconds for the first, or until ``wake``. Raises ``PeerLostError`` once a dead
        server's last events have been returned.
        """
        with self._in_use:
            deadline = self._clock() + timeout_s
            dying = False
            self._listening = timeout_s > 0
            while True:
                now = self._clock()
                self._ping_if_due(now)
                wait_s = _DRAIN_S if dying else max(0.0, min(deadline - now, self._ping_at - now, _POLL_S))
                frame = self._channel.recv(0.0 if self._inbox or self._woken else wait_s)
                if frame is not None:
                    self._take(frame)
                elif self._inbox or self._woken:
                    break
                else:
                    if wait_s > 0 or now >= self._check_at:
                        dying = self._check("events", dying)
                    if not dying and self._clock() >= deadline:
                        break
            self._woken = self._listening = False
            found, self._inbox = self._inbox, []
            if self._received - self._acknowledged >= (1 if timeout_s > 0 else _ACK_EVERY):
                self._acknowledge()
            return found

    def wake(self) -> None:
        """From any thread: the running or the next ``events`` returns at once, with what it has."""
        self._woken = True
        if self._listening:  # set before ``events`` looks at the line above: one of both sees the other
            self._channel.wake()

    def close(self) -> None:
        """Gives the channel back."""
        self._channel.close()

    def _check_newest(self, pending: PendingCall) -> None:
        if pending.sequence != self._sequence:
            raise ProtocolError(f"{pending.describe()} was overtaken by sequence {self._sequence}")

    # --- one wait for all calls ------------------------------------------------------------------------------

    def _exchange(
        self,
        frame: bytes,
        what: str,
        timeout_s: float,
        retry_s: float,
        accept: Callable[[Message], bool],
        sent_at: float | None = None,
    ) -> Message:
        """``sent_at``: when ``frame`` was sent the first time, if it was."""
        now = self._clock()
        send_at = now if sent_at is None else sent_at + retry_s
        deadline = now + timeout_s
        # At least one ping within the deadline, so that its error can say what the server was doing.
        self._ping_at = min(self._ping_at, now + timeout_s / 2)
        dying = False
        while True:
            if now >= send_at:
                send_at = now + (retry_s if self._channel.send(frame) else _FULL_S)
            self._ping_if_due(now)
            until = min(deadline, send_at, self._ping_at, now + _POLL_S)
            received = self._channel.recv(_DRAIN_S if dying else max(0.0, until - now))
            if received is not None:
                message = self._take(received)
                if accept(message):
                    return message
            elif dying or self._clock() >= min(until, self._check_at):
                dying = self._check(what, dying)
            now = self._clock()
            if now >= deadline:
                raise WaitTimeoutError(self._overdue(what, timeout_s, now))

    def _check(self, what: str, dying: bool) -> bool:
        """True if the peer is dead but its last frames may still be under way; the second time it raises."""
        self._check_at = self._clock() + _POLL_S
        if self._stop is not None and self._stop():
            raise StoppedError(f"stopped while waiting for {what}")
        if self.peer is None or not self.peer.dead():
            return False
        if dying:
            held = f"; it held {self.peer_held() or 'no slot'}" if self.peer_held is not None else ""
            raise PeerLostError(f"{self.peer.describe()} is dead; it left no answer to {what}{held}")
        return True

    def _overdue(self, what: str, timeout_s: float, now: float) -> str:
        who = self.peer.describe() if self.peer is not None else "the server"
        if self._pong is None:
            state = "it answered no ping: it is not up, stopped or unreachable"
        else:
            at, running = self._pong
            state = f"it answered a ping {max(0.0, now - at):.1f} s ago, executing {running or 'nothing'}"
        return f"no answer to {what} from {who} within {timeout_s:g} s; {state}; allow more time if that is normal"

    # --- frames ----------------------------------------------------------------------------------------------

    def _take(self, frame: bytes) -> Message:
        message = decode(frame)
        self._asked_at = None
        if isinstance(message, TokenEvent | TicketEvent):
            self._take_event(message)
        elif isinstance(message, Pong):
            self._pong = (self._clock(), message.running)
            if self._incarnation and message.last_event > self._received:
                self._ask_resend()  # the newest event was lost, and no later one shows the gap
        return message

    def _take_event(self, event: Event) -> None:
        if event.incarnation != self._incarnation or event.number <= self._received:
            return  # of a session that is over, or sent again though it had arrived
        if event.number > self._received + 1:
            self._ask_resend()
            return
        self._received = event.number
        self._inbox.append(event)

    def _acknowledge(self) -> None:
        if self._channel.send(encode(EventAck(self._received))):
            self._acknowledged = self._received

    def _ask_resend(self) -> None:
        # One gap shows in every event behind it; one request brings them all.
        position, asked_at = self._resend_asked
        now = self._clock()
        if position == self._received and now < asked_at + _RESEND_ASK_S:
            return
        if self._channel.send(encode(EventAck(self._received, resend=True))):
            self._resend_asked = (self._received, now)
            self._acknowledged = self._received

    def _ping_if_due(self, now: float) -> None:
        if now >= self._ping_at:
            self._ping_number += 1
            self._channel.send(encode(Ping(self._ping_number)))
            self._ping_at = now + _PING_S
            self._asked_at = now if self._asked_at is None else self._asked_at


def _answers(message: Message, pending: PendingCall) -> bool:
    return isinstance(message, Reply) and (message.sequence == pending.sequence or _is_refusal(message))


def _result_of(reply: Reply) -> dict[str, Any]:
    if not reply.ok:
        raise _error_of(reply)
    return reply.result


def _is_refusal(message: Message) -> bool:
    return isinstance(message, Reply) and message.sequence == 0 and not message.ok


def _error_of(reply: Reply) -> ShmstageError:
    error = _ERRORS.get(reply.error_kind, ShmstageError)(reply.error_text)
    error.from_peer = True
    return error

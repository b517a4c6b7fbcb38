"""The answering side of the command channel: who is asked, what runs, what has been said.

A receiving thread admits requests and answers pings and retries. The executing thread takes one request at a time
from ``next_request`` and answers it; while it has none it does the receiving itself (``Receiver.borrow``). Any thread
emits events. They share the session's state under one lock, which is never held while anything waits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, final

from shmstage.errors import PeerRestartedError, ProtocolError, ShmstageError, TransportError
from shmstage.transport.channel import ServerChannel
from shmstage.transport.event_log import EventLog
from shmstage.transport.receiver import Receiver
from shmstage.transport.request_log import Admission, RequestLog
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

log = logging.getLogger(__name__)

ERROR_TEXT_LIMIT = 4000
"""Characters of an error that travel; the whole of it is in the log of the side that raised it."""


@dataclass(slots=True)
class _Session:
    """One peer in one epoch, from its hello on; it is asked and told nothing before it is welcomed."""

    peer: bytes
    hello: Hello
    hello_frame: bytes
    requests: RequestLog
    welcome_frame: bytes = b""
    begun: bool = False
    over: bool = False


@final
class Pending:
    """One command that waits for its answer; answered exactly once by ``reply``, ``welcome`` or ``fail``."""

    def __init__(self, server: Server, session: _Session, request: Request | None) -> None:
        self._server = server
        self._session = session
        self._request = request
        self._answered = False

    @property
    def command(self) -> str:
        """The command's name; ``"hello"`` for a handshake."""
        return "hello" if self._request is None else self._request.command

    @property
    def arguments(self) -> dict[str, Any]:
        """The command's arguments; empty for a handshake."""
        return {} if self._request is None else self._request.arguments

    @property
    def hello(self) -> Hello | None:
        """The handshake, if this is one."""
        return self._session.hello if self._request is None else None

    @property
    def epoch(self) -> int:
        """The epoch that asks."""
        return self._session.hello.epoch

    @property
    def sequence(self) -> int:
        """The request's sequence; 0 for a handshake."""
        return 0 if self._request is None else self._request.sequence

    def reply(self, result: dict[str, Any]) -> None:
        """Answers a command. Raises ``ProtocolError``, and stays unanswered, if the result cannot travel."""
        if self._request is None:
            raise ProtocolError("a hello is answered by welcome() or fail()")
        self._answer(encode(Reply(self.sequence, True, result, "", "")))

    def welcome(self, welcome: Welcome) -> None:
        """Answers a handshake: its session is open from here on, and events flow."""
        if self._request is not None:
            raise ProtocolError(f"{self.command} is answered by reply() or fail()")
        encode(welcome)  # before anything is changed: it may hold what cannot travel
        self._once()
        self._server._open(self._session, welcome)

    def fail(self, error: BaseException) -> None:
        """Answers with an error, which keeps its class if it is one of ``shmstage.errors``."""
        self._answer(encode(_failed(self.sequence, error)), failed_hello=self._request is None)

    def _answer(self, frame: bytes, *, failed_hello: bool = False) -> None:
        self._once()
        self._server._answer(self._session, self.sequence, frame, failed_hello)

    def _once(self) -> None:
        if self._answered:
            raise ProtocolError(f"{self.command} (sequence {self.sequence}) has been answered already")
        self._answered = True

    def _begin(self) -> bool:
        if self._request is None:
            self._session.begun = True
            return not self._session.over
        return self._session.requests.begin(self._request.sequence)


def _failed(sequence: int, error: BaseException) -> Reply:
    if isinstance(error, ShmstageError):
        kind, said = type(error).__name__, str(error)
    else:
        kind, said = ShmstageError.__name__, f"{type(error).__name__}: {error}"
    # A message that quotes raw bytes may hold halves of characters, which cannot be encoded.
    said = said[:ERROR_TEXT_LIMIT].encode("utf-8", "backslashreplace").decode()
    return Reply(sequence, False, {}, kind, said)


@final
class Server:
    """Serves one session at a time: the newest epoch's newest connection.

    A hello takes over when it is welcomed; one that fails leaves the session before it as it was.
    """

    def __init__(self, channel: ServerChannel, *, incarnation: int) -> None:
        """Takes the channel over. ``incarnation`` (> 0) names this start of the process."""
        self.incarnation = incarnation
        self._channel = channel
        self._waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._taken: deque[Pending] = deque()  # of the executing thread alone
        self._receiver = Receiver(
            channel, self._on_frame, name="shmstage-server", on_failure=lambda: self._waiting.put(None)
        )
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._candidate: _Session | None = None
        self._events = EventLog()
        self._running = ""
        self._welcomed_epoch = -1

    def start(self) -> None:
        """Starts the receiving thread."""
        self._receiver.start()

    def step(self, timeout_s: float = 0.0) -> int:
        """One turn of the receiving thread, for a loop called by hand; returns how many frames it took."""
        return self._receiver.step(timeout_s)

    @property
    def hello_waiting(self) -> bool:
        """True while a handshake waits for the executing thread: any wait there should end (any thread)."""
        candidate = self._candidate
        return candidate is not None and not candidate.begun

    def next_request(self, timeout_s: float) -> Pending | None:
        """The next command to execute, or None after ``timeout_s``; cancelled ones are passed over.

        A handshake goes before commands that came earlier: if it takes over they are not executed at all.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            pending = self._take(deadline)
            if pending is None:
                self._receiver.check()
                return None
            if pending._begin():
                self._running = f"{pending.command} #{pending.sequence}"
                return pending

    def emit(self, event: TokenEvent | TicketEvent) -> None:
        """Numbers, keeps and sends an event (any thread). Raises ``ProtocolError`` if it cannot travel."""
        self._receiver.check()
        with self._lock:
            number = self._events.last + 1
            frame = encode(event, number=number, incarnation=self.incarnation)
            self._events.append(number, frame)
            if self._session is not None and self._session.welcome_frame:
                self._send(self._session.peer, frame)

    def close(self) -> None:
        """Ends the thread and closes the channel, which sends what was answered; has a deadline of seconds."""
        self._receiver.close()

    def _take(self, deadline: float) -> Pending | None:
        if not self._receiver.borrow():
            self._collect(0.0 if self._taken else deadline - time.monotonic())
        else:
            try:
                self._collect(0.0)
                while not self._taken and (left_s := deadline - time.monotonic()) > 0:
                    self._receiver.step_borrowed(left_s)
                    self._collect(0.0)
                while self._receiver.step_borrowed(0.0):  # what came behind it may cancel it
                    self._collect(0.0)
            finally:
                self._receiver.give_back(busy=bool(self._taken))
        for pending in self._taken:
            if pending.hello is not None:
                self._taken.remove(pending)
                return pending
        return self._taken.popleft() if self._taken else None

    def _collect(self, timeout_s: float) -> None:
        """What was admitted; waits for the first."""
        try:
            while timeout_s > 0 or not self._waiting.empty():
                arrived = self._waiting.get(timeout_s > 0, timeout_s)
                if arrived is None:  # the receiving has failed
                    return
                self._taken.append(arrived)
                timeout_s = 0.0
        except queue.Empty:
            pass

    # --- answers of the executing thread ----------------------------------------------------------------------

    def _answer(self, session: _Session, sequence: int, frame: bytes, failed_hello: bool) -> None:
        with self._lock:
            self._running = ""
            session.requests.finish(sequence, frame)
            if failed_hello and session is self._candidate:
                self._candidate = None  # a retry is to be tried again, not told the old failure
            if not session.over:
                self._send(session.peer, frame)

    def _open(self, session: _Session, welcome: Welcome) -> None:
        with self._lock:
            self._running = ""
            if session.over:
                return
            if self._session is not None:
                self._session.over = True
                self._session.requests.cancel_queued()
            self._session, self._candidate = session, None
            if session.hello.epoch != self._welcomed_epoch:
                self._events.discard()  # they told of work of an epoch that is over
            self._welcomed_epoch = session.hello.epoch
            full = replace(welcome, incarnation=self.incarnation, first_event=self._events.first_kept)
            session.welcome_frame = encode(full)
            self._send(session.peer, session.welcome_frame)
            for frame in self._events.frames():
                self._send(session.peer, frame)

    # --- frames ---------------------------------------------------------------------------------------------

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        try:
            message = decode(frame)
            with self._lock:
                self._on_message(peer, message, frame)
        except TransportError as error:
            log.warning("refused a frame of %d bytes from %s: %s", len(frame), peer.hex(), error)
            self._send(peer, encode(_failed(0, error)))

    def _on_message(self, peer: bytes, message: Message, frame: bytes) -> None:
        if isinstance(message, Request):
            self._on_request(peer, message)
        elif isinstance(message, Ping):
            self._send(peer, encode(Pong(message.number, self._running, self._events.last)))
        elif isinstance(message, EventAck):
            if self._session is not None and peer == self._session.peer:
                self._events.acknowledge(message.upto)
                for kept in self._events.frames() if message.resend else ():
                    self._send(peer, kept)
        elif isinstance(message, Hello):
            self._on_hello(peer, message, frame)
        else:
            raise ProtocolError(f"a server takes no {type(message).__name__}")

    def _on_hello(self, peer: bytes, hello: Hello, frame: bytes) -> None:
        for known in (self._candidate, self._session):
            if known is None:
                continue
            if known.peer == peer and known.hello_frame == frame:
                if known.welcome_frame:
                    self._send(peer, known.welcome_frame)
                return
            if hello.epoch < known.hello.epoch:
                raise PeerRestartedError(
                    f"epoch {hello.epoch} says hello, but epoch {known.hello.epoch} has taken over; stop this process"
                )
            if hello.epoch == known.hello.epoch and hello.lock_path != known.hello.lock_path:
                raise PeerRestartedError(
                    f"epoch {hello.epoch} belongs to process {known.hello.pid}; another one takes a higher epoch"
                )
        if self._candidate is not None:
            self._candidate.over = True
        self._candidate = _Session(peer, hello, frame, RequestLog())
        self._waiting.put(Pending(self, self._candidate, None))

    def _on_request(self, peer: bytes, request: Request) -> None:
        session = self._session
        refusal = self._why_not(session, peer, request)
        if session is None or refusal:
            self._send(peer, encode(_failed(request.sequence, PeerRestartedError(refusal))))
            return
        admission, reply = session.requests.admit(request.sequence)
        if admission is Admission.EXECUTE:
            self._waiting.put(Pending(self, session, request))
        elif admission is Admission.ANSWER:
            self._send(peer, reply)
        elif admission is Admission.CANCELLED:
            self._send(peer, encode(Reply(request.sequence, False, {}, "CancelledError", (
                f"{request.command} (sequence {request.sequence}) was not begun when sequence "
                f"{session.requests.highest} arrived; it will not run"))))  # fmt: skip

    def _why_not(self, session: _Session | None, peer: bytes, request: Request) -> str:
        asked = f"{request.command} (sequence {request.sequence}) is for"
        if request.incarnation != self.incarnation:
            return f"{asked} incarnation {request.incarnation}; this is {self.incarnation}; say hello again"
        if session is None:
            return f"{asked} epoch {request.epoch}, which has not said hello to this incarnation"
        if request.epoch != session.hello.epoch:
            return f"{asked} epoch {request.epoch}; this process serves epoch {session.hello.epoch}"
        if peer != session.peer:
            return f"{asked} epoch {request.epoch}, which has said hello on another connection since"
        return ""

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._channel.send(peer, frame)
        except TransportError as error:
            # Replies and events are kept: the peer asks again if it lives.
            log.info("not sent: %s", error)

"""Every message, frozen. Keys are short because a request must stay under 300 bytes.

Command channel (orchestrator → trainer): ``Hello`` → ``Welcome``, then ``Request`` → ``Reply``, with
``TokenEvent`` and ``TicketEvent`` flowing back until an ``EventAck`` covers them. Transport API (consumer →
producer): ``Attach`` → ``Attached``, then ``Published`` … ``EndOfStream``; ``Detach`` says good-bye.

Fields with a default are filled by the transport; the sender of the message leaves them alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from shmstage.wire.handles import check_handle
from shmstage.wire.schema import (
    U32,
    U64,
    Wire,
    flag,
    plain_list,
    plain_map,
    slot_generation_pairs,
    stamps,
    text,
)

PROTOCOL_VERSION = 2
"""Raised whenever a message changes shape. Both ends must agree; there is no negotiation."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session: fixes run, epoch and pool, so that no later message repeats them.

    ``withdrawn`` lists the ``[slot, generation]`` pairs the producer took back; the receiver ends those leases.
    ``lock_path``, ``pid`` and ``start_ticks`` let the receiver notice the sender's death. ``global_layouts``: of a
    trainer that spans hosts the layouts of whole micro-batches, one for each of ``layouts``, which then hold this
    host's ranges of them; empty where a slot holds whole micro-batches.
    """

    version: Annotated[int, Wire("v", U32)]
    run_id: Annotated[str, Wire("r", text)]
    epoch: Annotated[int, Wire("e", U64)]
    pool: Annotated[str, Wire("p", text)]
    layouts: Annotated[list[Any], Wire("l", plain_list)]
    withdrawn: Annotated[list[list[int]], Wire("w", slot_generation_pairs)]
    lock_path: Annotated[str, Wire("k", text)]
    pid: Annotated[int, Wire("i", U32)]
    start_ticks: Annotated[int, Wire("s", U64)]
    global_layouts: Annotated[list[Any], Wire("g", plain_list)] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers ``Hello``. Events of this session start at number ``first_event``."""

    version: Annotated[int, Wire("v", U32)]
    incarnation: Annotated[int, Wire("n", U64)]
    pid: Annotated[int, Wire("i", U32)]
    start_ticks: Annotated[int, Wire("s", U64)]
    lock_path: Annotated[str, Wire("k", text)]
    info: Annotated[dict[str, Any], Wire("o", plain_map)]
    first_event: Annotated[int, Wire("f", U64)] = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One command. A retry carries the same sequence; a new command a higher one."""

    epoch: Annotated[int, Wire("e", U64)]
    incarnation: Annotated[int, Wire("n", U64)]
    sequence: Annotated[int, Wire("q", U64)]
    command: Annotated[str, Wire("c", text)]
    arguments: Annotated[dict[str, Any], Wire("a", plain_map)]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers a ``Request``; proves dispatch only. Sequence 0 refuses a hello or a frame nobody could read.

    ``error_kind`` is a class name of ``shmstage.errors``.
    """

    sequence: Annotated[int, Wire("q", U64)]
    ok: Annotated[bool, Wire("k", flag)]
    result: Annotated[dict[str, Any], Wire("r", plain_map)]
    error_kind: Annotated[str, Wire("x", text)]
    error_text: Annotated[str, Wire("y", text)]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Some device work is over, well or badly; ``stamps`` are nanoseconds of the sender's monotonic clock."""

    number: Annotated[int, Wire("m", U64)]
    kind: Annotated[str, Wire("d", text)]
    request_id: Annotated[str, Wire("r", text)]
    step: Annotated[int, Wire("s", U64)]
    index: Annotated[int, Wire("i", U32)]
    ok: Annotated[bool, Wire("k", flag)]
    error: Annotated[str, Wire("x", text)]
    stamps: Annotated[dict[str, int], Wire("h", stamps)]
    incarnation: Annotated[int, Wire("n", U64)] = 0


@dataclass(frozen=True, slots=True)
class TicketEvent:
    """A ticket given out by a reply has resolved; ``value`` is what it promised."""

    number: Annotated[int, Wire("m", U64)]
    ticket: Annotated[int, Wire("j", U64)]
    kind: Annotated[str, Wire("d", text)]
    step: Annotated[int, Wire("s", U64)]
    ok: Annotated[bool, Wire("k", flag)]
    value: Annotated[dict[str, Any], Wire("z", plain_map)]
    error: Annotated[str, Wire("x", text)]
    stamps: Annotated[dict[str, int], Wire("h", stamps)]
    incarnation: Annotated[int, Wire("n", U64)] = 0


@dataclass(frozen=True, slots=True)
class EventAck:
    """Events up to and including ``upto`` have arrived; with ``resend`` the later ones are wanted again."""

    upto: Annotated[int, Wire("m", U64)]
    resend: Annotated[bool, Wire("w", flag)] = False


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Answered by the thread that never computes."""

    number: Annotated[int, Wire("m", U64)]


@dataclass(frozen=True, slots=True)
class Pong:
    """Answers ``Ping``: what is executing now ("" if nothing) and the last event sent."""

    number: Annotated[int, Wire("m", U64)]
    running: Annotated[str, Wire("g", text)]
    last_event: Annotated[int, Wire("f", U64)] = 0


@dataclass(frozen=True, slots=True)
class Attach:
    """A consumer asks a producer for its pool."""

    version: Annotated[int, Wire("v", U32)]
    lock_path: Annotated[str, Wire("k", text)]
    pid: Annotated[int, Wire("i", U32)]
    start_ticks: Annotated[int, Wire("s", U64)]


@dataclass(frozen=True, slots=True)
class Attached:
    """Answers ``Attach`` with the pool and the consumer's cell, or with the reason why not in ``refusal``."""

    version: Annotated[int, Wire("v", U32)]
    run_id: Annotated[str, Wire("r", text)]
    epoch: Annotated[int, Wire("e", U64)]
    pool: Annotated[str, Wire("p", text)]
    layouts: Annotated[list[Any], Wire("l", plain_list)]
    consumer: Annotated[int, Wire("u", U32)]
    lock_path: Annotated[str, Wire("k", text)]
    pid: Annotated[int, Wire("i", U32)]
    start_ticks: Annotated[int, Wire("s", U64)]
    refusal: Annotated[str, Wire("x", text)] = ""


@dataclass(frozen=True, slots=True)
class Published:
    """A slot is ready. ``number`` counts per consumer from 1; ``handle`` is in wire form."""

    number: Annotated[int, Wire("m", U64)]
    handle: Annotated[list[Any], Wire("a", check_handle)]


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The producer publishes nothing more; ``published`` is the number of the last ``Published``, 0 if none."""

    published: Annotated[int, Wire("m", U64)]


@dataclass(frozen=True, slots=True)
class Detach:
    """A consumer leaves; its leases are over. ``received`` is the number of the last ``Published`` it took."""

    consumer: Annotated[int, Wire("u", U32)]
    received: Annotated[int, Wire("m", U64)]


Message = (
    Hello | Welcome | Request | Reply | TokenEvent | TicketEvent | EventAck | Ping | Pong
    | Attach | Attached | Published | EndOfStream | Detach
)  # fmt: skip
"""Anything that travels."""

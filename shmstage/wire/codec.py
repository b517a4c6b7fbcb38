"""Messages to frames and back: one msgpack map per frame, strict both ways.

Never pickle: a frame can make nothing but the messages of ``messages.py`` and plain values inside them.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import msgpack

from shmstage.errors import ProtocolError, shown
from shmstage.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detach,
    EndOfStream,
    EventAck,
    Hello,
    Message,
    Ping,
    Pong,
    Published,
    Reply,
    Request,
    TicketEvent,
    TokenEvent,
    Welcome,
)
from shmstage.wire.schema import WireField, schema_of

FRAME_LIMIT_NBYTES = 1 << 20
"""The largest frame. Payload lives in slots; what is larger than this does not belong on the control channel."""

_SMALL_NBYTES = 4096
_STR = frozenset({str})

_TAG_KEY = "t"
_VERSION_KEY = "v"

_TAGS: dict[type, str] = {
    Hello: "H",
    Welcome: "W",
    Request: "Q",
    Reply: "R",
    TokenEvent: "T",
    TicketEvent: "K",
    EventAck: "A",
    Ping: "P",
    Pong: "O",
    Attach: "a",
    Attached: "b",
    Published: "p",
    EndOfStream: "e",
    Detach: "d",
}
_SCHEMAS: dict[type, tuple[WireField, ...]] = {kind: schema_of(kind) for kind in _TAGS}
_BY_TAG: dict[str, type] = {tag: kind for kind, tag in _TAGS.items()}


class _Packer(threading.local):
    """One per thread: to make one takes longer than to pack a message."""

    def __init__(self) -> None:
        self.of_this_thread = msgpack.Packer(use_bin_type=True, strict_types=True)


_PACKER = _Packer()


def encode(message: Message, *, limit_nbytes: int = FRAME_LIMIT_NBYTES, **changes: Any) -> bytes:
    """The frame of the message with the fields in ``changes`` replaced.

    Raises ``ProtocolError`` for a value that would not arrive as it was sent.
    """
    kind = type(message)
    schema = _SCHEMAS.get(kind)
    if schema is None:
        raise ProtocolError(f"{kind.__name__} is not a message; see shmstage.wire.messages")
    wire: dict[str, Any] = {_TAG_KEY: _TAGS[kind]}
    for attribute, key, check, where, exact, limit in schema:
        value = changes[attribute] if attribute in changes else getattr(message, attribute)
        type_ = type(value)
        if type_ is not exact and not (type_ is int and 0 <= value < limit):
            check(value, where)
        wire[key] = value
    try:
        frame = cast(bytes, _PACKER.of_this_thread.pack(wire))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{kind.__name__} cannot be encoded: {error}") from error
    if len(frame) > limit_nbytes:
        largest = max(schema, key=lambda row: len(msgpack.packb(wire[row.key], use_bin_type=True)))
        raise ProtocolError(
            f"{kind.__name__} takes {len(frame)} bytes, most of them in {largest.attribute!r}; the frame limit is "
            f"{limit_nbytes}; put arrays into a slot and large state into a file"
        )
    return frame


def decode(frame: bytes, *, limit_nbytes: int = FRAME_LIMIT_NBYTES) -> Message:
    """The message of a frame from anybody. Raises ``ProtocolError``, and nothing else, for a hostile one."""
    # Before anything is parsed: a few bytes can claim gigabytes, and msgpack's own limits follow the frame size.
    if len(frame) > limit_nbytes:
        raise ProtocolError(f"a frame of {len(frame)} bytes arrived; the limit is {limit_nbytes}")
    try:
        if len(frame) > _SMALL_NBYTES:
            _check_is_whole(frame)
        wire = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=False,  # _unique_map refuses every key that is not a str
            object_pairs_hook=_unique_map,
            ext_hook=_refuse_extension,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise ProtocolError(f"a frame of {len(frame)} bytes is not msgpack: {reason:.120}") from error
    if type(wire) is not dict:
        raise ProtocolError(f"a frame holds a {type(wire).__name__}; want a map")
    tag = wire.pop(_TAG_KEY, None)
    kind = _BY_TAG.get(tag) if type(tag) is str else None
    if kind is None:
        known = ", ".join(sorted(_BY_TAG))
        raise ProtocolError(f"a frame names message kind {shown(tag, 40)}; known kinds are {known}")
    return _build(kind, wire)


def _check_is_whole(frame: bytes) -> None:
    """Every entry that a list or map announces is there: some msgpack releases allocate for them beforehand.

    Nested lists of as many entries as the frame has bytes would take gigabytes. In a small frame they cannot.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(frame), strict_map_key=False)
    unpacker.feed(frame)
    unpacker.skip()


def _build(kind: type, wire: dict[str, Any]) -> Message:
    schema = _SCHEMAS[kind]
    if schema[0].key == _VERSION_KEY and wire.get(_VERSION_KEY) != PROTOCOL_VERSION:
        # Before the fields: another version may have other ones.
        raise ProtocolError(
            f"{kind.__name__} speaks wire version {shown(wire.get(_VERSION_KEY), 40)}, this side {PROTOCOL_VERSION}; "
            "run the same shmstage release on both sides"
        )
    values = []
    for attribute, key, check, where, exact, limit in schema:
        if key not in wire:
            raise ProtocolError(f"{kind.__name__} lacks {attribute!r}")
        value = wire[key]
        type_ = type(value)
        if type_ is not exact and not (type_ is int and 0 <= value < limit):
            check(value, where)
        values.append(value)
    if len(wire) != len(schema):
        unknown = sorted(set(wire) - {row.key for row in schema})
        raise ProtocolError(f"{kind.__name__} has unknown fields {shown(unknown, 120)[1:-1]}")
    return cast(Message, kind(*values))


def _unique_map(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    try:
        result: dict[str, Any] = dict(pairs)
    except TypeError:  # a list as a key
        result = {}
    if len(result) == len(pairs) and _STR.issuperset(map(type, result)):
        return result
    result = {}
    for key, value in pairs:
        if type(key) is not str:
            raise ProtocolError(f"a map has the key {shown(key, 40)}; keys are str")
        if key in result:
            raise ProtocolError(f"a map has the key {shown(key, 40)} twice")
        result[key] = value
    return result


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"a frame holds msgpack extension {code} of {len(data)} bytes; extensions are refused")

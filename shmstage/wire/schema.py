"""Checks that a value may travel. The encoder runs the same ones as the decoder: what one refuses, both do.

A message field is declared as ``Annotated[type, Wire(key, check)]``; ``schema_of`` reads the declarations.
A hand-written table, because a pydantic model of the same strictness costs an import of 130 ms in every
process and cannot say "no subclass of float" (a ``numpy.float64`` is one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import NamedTuple, get_type_hints

from shmstage.errors import ProtocolError

DEPTH_LIMIT = 16
"""How deep lists and maps may nest inside one field."""

Check = Callable[[object, str], None]
"""Takes a value and where it stands; raises ``ProtocolError`` unless the value may travel there."""


class Wire(NamedTuple):
    """How one message field travels: its short key and the check of its value."""

    key: str
    check: Check


class WireField(NamedTuple):
    """One row of a message's schema."""

    attribute: str
    key: str
    check: Check


def schema_of(message_type: type) -> tuple[WireField, ...]:
    """The rows of a message class, in declaration order; every field must carry a ``Wire``."""
    hints = get_type_hints(message_type, include_extras=True)
    rows = []
    for field in fields(message_type):
        wire = next(item for item in hints[field.name].__metadata__ if isinstance(item, Wire))
        # Absent fields are refused even where the constructor has a default: one message, one shape.
        rows.append(WireField(field.name, wire.key, wire.check))
    if len({row.key for row in rows}) != len(rows):
        raise TypeError(f"{message_type.__name__} uses one wire key twice")
    return tuple(rows)


def _refuse(where: str, value: object, want: str) -> ProtocolError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ProtocolError(f"{where} is {type(value).__module__}.{type(value).__name__} {shown}; want {want}")


def unsigned(bits: int) -> Check:
    """An exact ``int`` (no bool, no numpy scalar) in ``0 .. 2**bits - 1``."""
    limit = 1 << bits

    def check(value: object, where: str) -> None:
        if type(value) is not int or not 0 <= value < limit:
            raise _refuse(where, value, f"an integer from 0 to 2**{bits} - 1")

    return check


U32 = unsigned(32)
U64 = unsigned(64)


def flag(value: object, where: str) -> None:
    """``True`` or ``False``; 0 and 1 are refused."""
    if type(value) is not bool:
        raise _refuse(where, value, "a bool")


def text(value: object, where: str) -> None:
    """A ``str``; bytes are refused."""
    if type(value) is not str:
        raise _refuse(where, value, "a str")


def plain(value: object, where: str, depth: int = 0) -> None:
    """None, bool, int (64 bits), float, str, bytes, and lists and str-keyed maps of those."""
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is str or kind is bytes:
        return
    if kind is int:
        if not -(1 << 63) <= value < (1 << 64):  # type: ignore[operator]
            raise _refuse(where, value, "an integer of 64 bits")
        return
    if depth >= DEPTH_LIMIT:
        raise ProtocolError(f"{where} nests deeper than {DEPTH_LIMIT} levels; flatten it")
    if isinstance(value, list) and kind is list:
        for index, item in enumerate(value):
            plain(item, f"{where}[{index}]", depth + 1)
        return
    if isinstance(value, dict) and kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise _refuse(f"a key of {where}", key, "a str")
            plain(item, f"{where}.{key}", depth + 1)
        return
    raise _refuse(where, value, "None, bool, int, float, str, bytes, list or dict")


def plain_map(value: object, where: str) -> None:
    """A str-keyed map of plain values."""
    if type(value) is not dict:
        raise _refuse(where, value, "a dict")
    plain(value, where)


def plain_list(value: object, where: str) -> None:
    """A list of plain values."""
    if type(value) is not list:
        raise _refuse(where, value, "a list")
    plain(value, where)


def stamps(value: object, where: str) -> None:
    """A map from a stamp's name to nanoseconds of a monotonic clock."""
    if not isinstance(value, dict) or type(value) is not dict:
        raise _refuse(where, value, "a dict")
    for key, item in value.items():
        text(key, f"a key of {where}")
        U64(item, f"{where}.{key}")


def slot_generation_pairs(value: object, where: str) -> None:
    """A list of ``[slot, generation]``."""
    if not isinstance(value, list) or type(value) is not list:
        raise _refuse(where, value, "a list")
    for index, pair in enumerate(value):
        if type(pair) is not list or len(pair) != 2:
            raise _refuse(f"{where}[{index}]", pair, "[slot, generation]")
        U32(pair[0], f"{where}[{index}].slot")
        U64(pair[1], f"{where}[{index}].generation")

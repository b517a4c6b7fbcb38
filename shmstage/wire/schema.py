"""Checks that a value may travel. The encoder runs the same ones as the decoder: what one refuses, both do.

A message field is declared as ``Annotated[type, Wire(key, check)]``; ``schema_of`` reads the declarations.
A hand-written table, because a pydantic model of the same strictness costs an import of 130 ms in every
process and cannot say "no subclass of float" (a ``numpy.float64`` is one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, final, get_type_hints

from shmstage.errors import ProtocolError, named, shown

DEPTH_LIMIT = 16
"""How deep lists and maps may nest inside one field."""

Where = str | tuple[Any, int | str]
"""Where a value stands: a name, or the place of the list or map that holds it and the index or key there.

Put into words only for a refusal: done for every value, one frame with a long key makes 250 GB of text.
"""

Check = Callable[[object, Where], None]
"""Takes a value and where it stands; raises ``ProtocolError`` unless the value may travel there."""


class Wire(NamedTuple):
    """How one message field travels: its short key and the check of its value."""

    key: str
    check: Check


class WireField(NamedTuple):
    """One row of a message's schema.

    A value of type ``exact``, or an ``int`` from 0 to ``limit`` - 1, passes ``check``: what most are is known without
    the call.
    """

    attribute: str
    key: str
    check: Check
    where: Where
    exact: type | None
    limit: int


def schema_of(message_type: type) -> tuple[WireField, ...]:
    """The rows of a message class, in declaration order; every field must carry a ``Wire``."""
    hints = get_type_hints(message_type, include_extras=True)
    rows = []
    for field in fields(message_type):
        wire = next(item for item in hints[field.name].__metadata__ if isinstance(item, Wire))
        # Absent fields are refused even where the constructor has a default: one message, one shape.
        where = (message_type.__name__, field.name)
        limit = wire.check.limit if isinstance(wire.check, Unsigned) else 0
        rows.append(WireField(field.name, wire.key, wire.check, where, _EXACT.get(wire.check), limit))
    if len({row.key for row in rows}) != len(rows):
        raise TypeError(f"{message_type.__name__} uses one wire key twice")
    return tuple(rows)


def in_words(where: Where) -> str:
    """``Reply.result.losses[1]``; keys that are long or not printable are shortened and quoted."""
    if isinstance(where, str):
        return where
    outer, at = where
    if isinstance(at, int):
        return f"{in_words(outer)}[{at}]"
    return f"{in_words(outer)}.{named(at, 40)}"


def refusal(where: Where, value: object, want: str) -> ProtocolError:
    """The error for a value that is not what is wanted there."""
    kind = type(value)
    return ProtocolError(f"{in_words(where)} is {kind.__module__}.{kind.__name__} {shown(value)}; want {want}")


@final
class Unsigned:
    """An exact ``int`` (no bool, no numpy scalar) in ``0 .. 2**bits - 1``."""

    __slots__ = ("_bits", "limit")

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.limit = 1 << bits

    def __call__(self, value: object, where: Where) -> None:
        if type(value) is not int or not 0 <= value < self.limit:
            raise refusal(where, value, f"an integer from 0 to 2**{self._bits} - 1")


U32 = Unsigned(32)
U64 = Unsigned(64)


_LEAVES = frozenset({type(None), bool, float, str, bytes})


def flag(value: object, where: Where) -> None:
    """``True`` or ``False``; 0 and 1 are refused."""
    if type(value) is not bool:
        raise refusal(where, value, "a bool")


def text(value: object, where: Where) -> None:
    """A ``str``; bytes are refused."""
    if type(value) is not str:
        raise refusal(where, value, "a str")


#: checks that ask for one type and no more
_EXACT: dict[Check, type] = {flag: bool, text: str}


def plain(value: object, where: Where, depth: int = 0) -> None:
    """None, bool, int (64 bits), float, str, bytes, and lists and str-keyed maps of those."""
    kind = type(value)
    if kind in _LEAVES:
        return
    if kind is int:
        if not -(1 << 63) <= value < (1 << 64):  # type: ignore[operator]
            raise refusal(where, value, "an integer of 64 bits")
        return
    if depth >= DEPTH_LIMIT:
        raise ProtocolError(f"{in_words(where)} nests deeper than {DEPTH_LIMIT} levels; flatten it")
    if isinstance(value, list) and kind is list:
        for index, item in enumerate(value):
            if type(item) not in _LEAVES:
                plain(item, (where, index), depth + 1)
        return
    if isinstance(value, dict) and kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise refusal(f"a key of {in_words(where)}", key, "a str")
            if type(item) not in _LEAVES:
                plain(item, (where, key), depth + 1)
        return
    raise refusal(where, value, "None, bool, int, float, str, bytes, list or dict")


def plain_map(value: object, where: Where) -> None:
    """A str-keyed map of plain values."""
    if type(value) is not dict:
        raise refusal(where, value, "a dict")
    plain(value, where)


def plain_list(value: object, where: Where) -> None:
    """A list of plain values."""
    if type(value) is not list:
        raise refusal(where, value, "a list")
    plain(value, where)


def stamps(value: object, where: Where) -> None:
    """A map from a stamp's name to nanoseconds of a monotonic clock."""
    if not isinstance(value, dict) or type(value) is not dict:
        raise refusal(where, value, "a dict")
    for key, item in value.items():
        if type(key) is not str:
            raise refusal(f"a key of {in_words(where)}", key, "a str")
        U64(item, (where, key))


def slot_generation_pairs(value: object, where: Where) -> None:
    """A list of ``[slot, generation]``."""
    if not isinstance(value, list) or type(value) is not list:
        raise refusal(where, value, "a list")
    for index, pair in enumerate(value):
        if type(pair) is not list or len(pair) != 2:
            raise refusal((where, index), pair, "[slot, generation]")
        U32(pair[0], ((where, index), "slot"))
        U64(pair[1], ((where, index), "generation"))

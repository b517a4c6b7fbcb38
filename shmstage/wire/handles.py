"""A slot's handle as it stands inside a message: a list of ten plain values."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle
from shmstage.wire.schema import U32, U64, Check, Where, flag, refusal

DIGEST_NBYTES = 16
_INT = frozenset({int})


def _digest(value: object, where: Where) -> None:
    if type(value) is not bytes or len(value) != DIGEST_NBYTES:
        raise refusal(where, value, f"{DIGEST_NBYTES} bytes")


# The order on the wire; a list, because ten names would cost more than the values.
_FIELDS: tuple[tuple[str, Check], ...] = (
    ("slot", U32),
    ("generation", U64),
    ("layout_id", U32),
    ("digest", _digest),
    ("rows", U32),
    ("step", U64),
    ("index", U32),
    ("is_final", flag),
    ("loss_tokens", U64),
    ("segments", U32),
)
_values = attrgetter(*(name for name, _ in _FIELDS))


def _is_good(
    slot: Any, generation: Any, layout_id: Any, digest: Any, rows: Any, step: Any, index: Any, is_final: Any,
    loss_tokens: Any, segments: Any,
) -> bool:  # fmt: skip
    """The checks of ``_FIELDS`` without a call for each."""
    ints = (slot, layout_id, rows, index, segments, generation, step, loss_tokens)
    if type(digest) is not bytes or type(is_final) is not bool or not _INT.issuperset(map(type, ints)):
        return False
    in_range = min(ints) >= 0 and max(ints) < U64.limit and max(slot, layout_id, rows, index, segments) < U32.limit
    return in_range and len(digest) == DIGEST_NBYTES


def check_handle(value: object, where: Where) -> None:
    """The check for a message field that holds a handle in its wire form."""
    if type(value) is not list or len(value) != len(_FIELDS):
        raise refusal(where, value, f"a list of {len(_FIELDS)} values")
    if _is_good(*value):
        return  # what is left below is to say what is wrong
    for item, (name, check) in zip(value, _FIELDS, strict=True):
        check(item, (where, name))


def handle_to_wire(handle: Handle) -> list[int | bytes | bool]:
    """``[slot, generation, layout_id, digest, rows, step, index, is_final, loss_tokens, segments]``.

    Raises ``ProtocolError`` naming the field that is out of range.
    """
    values: list[int | bytes | bool] = list(_values(handle))
    check_handle(values, "handle")
    return values


def handle_from_wire(value: object) -> Handle:
    """The handle; raises ``ProtocolError`` for anything but ten values of the right types and ranges.

    Whether the slot exists and still holds that generation is for the pool's reader to say.
    """
    check_handle(value, "handle")
    assert isinstance(value, list)
    return Handle(*value)


def named_by(arguments: Mapping[str, Any]) -> tuple[int, int, str]:
    """(step, index, request id) of what arguments name; -1, -1 and "" where they name none. Never raises."""
    try:
        if "handle" in arguments:
            handle = handle_from_wire(arguments["handle"])
            return handle.step, handle.index, handle.request_id
        if "request_id" in arguments:
            name = str(arguments["request_id"])
            step, _, index = name.partition("@")[0].partition(".")
            return int(step), int(index), name
        return int(arguments.get("step", arguments.get("version", -1))), -1, ""
    except (ProtocolError, ValueError, TypeError):
        return -1, -1, ""

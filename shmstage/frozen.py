"""Changed copies of frozen records, for state machines that make several per micro-batch."""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def replace(record: Record, **changes: Any) -> Record:
    """``dataclasses.replace`` without ``__init__``: for thirty fields a tenth of its time.

    For frozen dataclasses without slots and without ``__post_init__``. ``TypeError`` for a name that is no field.
    """
    copy = object.__new__(type(record))
    values, given = copy.__dict__, record.__dict__
    values.update(given)
    values.update(changes)
    if len(values) != len(given):
        raise TypeError(f"{type(record).__name__} has no {', '.join(sorted(changes.keys() - given.keys()))}")
    return copy

"""A changed copy is what ``dataclasses.replace`` would make."""

from __future__ import annotations

import dataclasses

import pytest

from shmstage.frozen import replace


@dataclasses.dataclass(frozen=True)
class Record:
    name: str
    count: int = 0


def test_a_changed_copy_is_equal_to_one_made_by_dataclasses() -> None:
    record = Record("a", 1)
    assert replace(record, count=2) == dataclasses.replace(record, count=2) == Record("a", 2)
    assert hash(replace(record, count=1)) == hash(record)
    assert record == Record("a", 1)


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(TypeError, match="Record has no cuont"):
        replace(Record("a"), cuont=2)

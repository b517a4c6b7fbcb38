"""Handles."""

from __future__ import annotations

from typing import Any

import pytest

from shmstage.memory.handle import Handle


def test_the_request_id_names_step_index_slot_and_generation() -> None:
    assert Handle(slot=2, generation=14, layout_id=9, step=7, index=1).request_id == "7.1@2:14"


@pytest.mark.parametrize("digest", [None, 7, "text", b"", object()])
def test_describing_a_handle_never_raises(digest: Any) -> None:
    """B1"""
    class Hostile:
        def __format__(self, spec: str) -> str:
            raise RuntimeError

    assert Handle(Hostile(), 2, 3, digest=digest).describe()  # type: ignore[arg-type]


def test_a_handle_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Handle(0, 2, 3).slot = 1  # type: ignore[misc]

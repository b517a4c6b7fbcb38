"""A small pool with a reader, made and removed around a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pool_making import LAYOUT, RUN, Child, Ends

from shmstage.errors import PoolError
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader


@pytest.fixture
def identity() -> Iterator[ProcessIdentity]:
    identity = ProcessIdentity.create(RUN, "orchestrator")
    yield identity
    identity.close()


@pytest.fixture
def start_child() -> Iterator[Callable[..., Child]]:
    """start_child(code, *arguments) → a child process that is killed at the end of the test if it still runs."""
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture
def make_ends(identity: ProcessIdentity) -> Iterator[Callable[..., Ends]]:
    """make_ends(slots=2, ..., reader={...}) → a pool and an attached reader that know LAYOUT."""
    made: list[Ends] = []

    def make(slots: int = 2, *, layout: Layout = LAYOUT, reader: dict[str, Any] | None = None, **more: Any) -> Ends:
        pool = Pool.create(RUN, epoch=1, layouts=[layout], slots=slots, identity=identity, **more)
        attached = PoolReader.attach(pool.name, run_id=RUN, epoch=1, **(reader or {}))
        attached.register(layout)
        made.append(Ends(pool, attached))
        return made[-1]

    yield make
    for ends in made:
        for end in (ends.reader, ends.pool):
            with contextlib.suppress(PoolError):  # arrays of the test may still be alive; its own test checks that
                end.close()


@pytest.fixture
def ends(make_ends: Callable[..., Ends]) -> Ends:
    return make_ends()

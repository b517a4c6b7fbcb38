"""What comes in, seen from the planner: groups of trajectories that lie here, or of references to others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from shmstage.packing.reference import Described


class DescribedGroup(Protocol):
    """The trajectories of one prompt, all of one batch: a ``Group``, or one of references."""

    @property
    def group_id(self) -> str: ...
    @property
    def batch_index(self) -> int: ...
    @property
    def trajectories(self) -> Sequence[Described]: ...


class Groups(Protocol):
    """A ``Source``, as far as reading it goes."""

    def groups(self, cursor: int) -> Iterator[DescribedGroup]:
        """Groups number ``cursor``, ``cursor + 1``, ...; ends where the input ends."""
        ...


class InputGroups(Groups, Protocol):
    """An input: ``passes`` is how often it is run over, ``None`` without end."""

    @property
    def passes(self) -> int | None: ...

"""Where trajectories come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, final

from shmstage.packing.bundle import Bundle, read_bundle
from shmstage.packing.trajectory import Group
from shmstage.settings import RoutingEncoding

__all__ = ["BundleSource", "Group", "Source"]


class Source(Protocol):
    """Groups in arrival order. `replayable`: `groups(cursor)` gives the same groups again, in any process.

    What a source that is not replayable gives is journaled before it is used, and read from the journal when it is
    needed again. `groups` is called once per process then, with the number of groups journaled so far as `cursor`: 0
    at first; after a restart the source may go on with what it had not handed over, or ignore it and give what is new.

    A source may also have `expected_groups(batch_index) -> int | None`, always the same for the same batch. With
    `order = "prompt_batch"` a batch is then complete, and can be trained, when so many of its groups have come;
    otherwise when the source is two batches further, or at its end.

    A source whose `windows_are_microbatches` is true gives in each batch just what makes one micro-batch; then nothing
    of a batch is left over for the next one, however few rows it takes.
    """

    @property
    def replayable(self) -> bool: ...

    def groups(self, cursor: int) -> Iterator[Group]:
        """Groups number `cursor`, `cursor + 1`, ...; ends where the input ends."""
        ...


@final
class BundleSource:
    """The groups of a bundle, in its order, held as `read_bundle` has them; raises as that does."""

    replayable = True

    def __init__(self, path: Path | str, encoding: RoutingEncoding = "dense", experts: int = 0) -> None:
        self.bundle: Bundle = read_bundle(path, encoding, experts)
        self._groups = self.bundle.groups()

    def groups(self, cursor: int) -> Iterator[Group]:
        """Groups number `cursor`, `cursor + 1`, ... of the bundle."""
        return iter(self._groups[cursor:])

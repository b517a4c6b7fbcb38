"""Makes a live source replayable: what it gave lies in a journal before anybody sees it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, final

from shmstage.errors import BundleError
from shmstage.packing.group_record import REMEDY
from shmstage.packing.journal import Journal
from shmstage.packing.source import Source
from shmstage.packing.trajectory import Group


@final
class JournaledSource:
    """The groups of `live` by number, from the journal as far as it goes, then from `live`, journaled first.

    `live.groups` is called once. Whoever iterates goes on with that one iterator, one thread at a time.
    """

    replayable = True

    def __init__(self, live: Source, journal: Journal) -> None:
        self.journal = journal
        self.expected_groups: Any = getattr(live, "expected_groups", None)
        self._source = live
        self._lock = threading.Lock()
        self._live: Iterator[Group] | None = None
        self._ended: BaseException | bool = False
        self._first = journal.first()

    def first(self) -> Group | None:
        """The first group with a trajectory, read if it has not come yet."""
        if self._first is None:
            for group in self.groups(self.journal.begin):
                if group.trajectories:
                    self._keep_first(group)
                    break
        return self._first

    def groups(self, cursor: int) -> Iterator[Group]:
        """Groups number `cursor`, `cursor + 1`, ... Raises `BundleError` for what was released, damaged or lost."""
        if cursor > self.journal.count:
            raise BundleError(
                f"{self.journal.directory} holds groups up to number {self.journal.count - 1}, and number {cursor} is "
                f"to be read next: some of it is lost; {REMEDY}"
            )
        while True:
            for group in self.journal.read(cursor):
                cursor += 1
                yield group
            new = self._new(cursor)
            while new is not None:
                cursor += 1
                yield new
                new = self._new(cursor)
            if self.journal.count <= cursor:
                return

    def _new(self, number: int) -> Group | None:
        """Group `number`, journaled, if it is the next one of `live`; None if there is none or the journal has it."""
        with self._lock:
            if self.journal.count > number:
                return None  # another iteration was at it
            if isinstance(self._ended, BaseException):
                raise self._ended
            if self._ended:
                return None
            try:
                if self._live is None:
                    self._live = iter(self._source.groups(self.journal.count))
                group = next(self._live)
            except StopIteration:
                self._ended = True
                return None
            except BaseException as error:
                self._ended = error  # an iterator that has raised ends quietly when asked again
                raise
            if self._first is None and group.trajectories:
                self._keep_first(group)
            self.journal.append(group)
            return group

    def _keep_first(self, group: Group) -> None:
        # before it is journaled: once that is released it can be found nowhere else
        self.journal.keep_first(group)
        self._first = group

"""Readers' cells: a pool whose newest publication is what counts, read by processes that come, go and die.

A reader writes into its cell which publication it takes and looks again whether that is still the newest; the owner
names another one the newest and only then looks at the cells: a slot that is neither the newest nor in a cell is read
by nobody, and none can begin to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import final

from shmstage import _native
from shmstage.errors import EndpointBusyError, PoolError
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.names import lock_path_of, lock_word

_SLOT_BITS = 16


@final
class Cells:
    """The owner's side; made by ``Pool.cells``."""

    def __init__(
        self, headers: _native.Headers, run_id: str, check_backed: Callable[[], None] = lambda: None
    ) -> None:
        """``check_backed`` raises if the headers' file was shrunk: touching them would be SIGBUS."""
        self._headers = headers
        self._check_backed = check_backed
        self._run_id = run_id
        self._announced = 0
        # Kept open: a lock that loses its name to a tidy-up script still says that its holder lives.
        self._watches: dict[int, PeerWatch] = {}

    def announce(self, slot: int) -> None:
        """What was published in ``slot`` is the newest from here on."""
        self._check_backed()
        self._announced += 1
        self._headers.set_latest(self._announced << _SLOT_BITS | slot + 1)

    def announce_nothing(self) -> None:
        """There is no newest publication; who reads the last one goes on reading it."""
        self._check_backed()
        self._headers.set_latest(0)

    def newest_slot(self) -> int | None:
        self._check_backed()
        return _slot_of(self._headers.latest())

    def readers(self) -> dict[int, list[str]]:
        """Slot → the living readers that read it, in words. Cells of readers proven dead are cleared."""
        self._check_backed()
        found: dict[int, list[str]] = {}
        cells = [self._headers.cell(index) for index in range(_native.MAX_CONSUMERS)]
        for gone in self._watches.keys() - {identity for identity, _ in cells}:
            self._watches.pop(gone).close()
        for index, (identity, word) in enumerate(cells):
            if not identity:
                continue
            try:
                watch = self._watches.get(identity) or PeerWatch(lock_path_of(self._run_id, identity))
            except PoolError:  # a lock we may not look at proves nothing: it counts as living
                found.setdefault(_slot_of(word) or 0, []).append(f"reader in cell {index}")
                continue
            self._watches[identity] = watch
            if watch.dead():
                self._headers.release_cell(index, identity)
            elif (slot := _slot_of(word)) is not None:
                found.setdefault(slot, []).append(watch.describe())
        return found

    def close(self) -> None:
        """Stop watching the readers; harmless twice."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()


@final
class Cell:
    """A reader's place in one pool; made by ``PoolReader.claim_cell``."""

    def __init__(
        self,
        headers: _native.Headers,
        identity: ProcessIdentity,
        pool: str,
        check_backed: Callable[[], None] = lambda: None,
    ) -> None:
        """As ``Cells``."""
        self._headers = headers
        self._check_backed = check_backed
        self._identity = lock_word(identity.lock_path)
        self._released = False
        self._index = headers.claim_cell(self._identity)
        if self._index < 0:
            raise EndpointBusyError(f"all {_native.MAX_CONSUMERS} readers' cells of pool {pool} are taken; close one")

    def take(self) -> int | None:
        """The slot of the newest publication, which stays as it is until ``put_back``; ``None`` if there is none."""
        self._check_backed()
        return _slot_of(self._headers.take_latest(self._index))

    def put_back(self) -> None:
        """What was taken is not read any more."""
        with suppress(PoolError):  # what is lost need not be put back
            self._check_backed()
            self._headers.put_back(self._index)

    def release(self) -> None:
        """Give the place up; harmless twice."""
        # Once: another reader of this process may have taken the place since, in the name of the same identity.
        if not self._released:
            self._released = True
            with suppress(PoolError):
                self._check_backed()
                self._headers.release_cell(self._index, self._identity)


def _slot_of(word: int) -> int | None:
    return (word & (1 << _SLOT_BITS) - 1) - 1 if word else None

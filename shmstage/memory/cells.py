"""Readers' cells: a pool whose newest publication is what counts, read by processes that come, go and die.

A reader writes into its cell which publication it takes and looks again whether that is still the newest; the owner
names another one the newest and only then looks at the cells: a slot that is neither the newest nor in a cell is read
by nobody, and none can begin to.
"""

from __future__ import annotations

from typing import final

from shmstage import _native
from shmstage.errors import EndpointBusyError, PoolError
from shmstage.memory.identity import PeerWatch, ProcessIdentity
from shmstage.memory.names import lock_path_of, lock_word

_SLOT_BITS = 16


@final
class Cells:
    """The owner's side; made by ``Pool.cells``."""

    def __init__(self, headers: _native.Headers, run_id: str) -> None:
        self._headers = headers
        self._run_id = run_id
        self._announced = 0

    def announce(self, slot: int) -> None:
        """What was published in ``slot`` is the newest from here on."""
        self._announced += 1
        self._headers.set_latest(self._announced << _SLOT_BITS | slot + 1)

    def announce_nothing(self) -> None:
        """There is no newest publication; who reads the last one goes on reading it."""
        self._headers.set_latest(0)

    def newest_slot(self) -> int | None:
        return _slot_of(self._headers.latest())

    def readers(self) -> dict[int, list[str]]:
        """Slot → the living readers that read it, in words. Cells of readers proven dead are cleared."""
        found: dict[int, list[str]] = {}
        for index in range(_native.MAX_CONSUMERS):
            identity, word = self._headers.cell(index)
            if not identity:
                continue
            try:
                watch = PeerWatch(lock_path_of(self._run_id, identity))
            except PoolError:  # a lock we may not look at proves nothing: it counts as living
                found.setdefault(_slot_of(word) or 0, []).append(f"reader in cell {index}")
                continue
            try:
                if watch.dead():
                    self._headers.release_cell(index, identity)
                elif (slot := _slot_of(word)) is not None:
                    found.setdefault(slot, []).append(watch.describe())
            finally:
                watch.close()
        return found


@final
class Cell:
    """A reader's place in one pool; made by ``PoolReader.claim_cell``."""

    def __init__(self, headers: _native.Headers, identity: ProcessIdentity, pool: str) -> None:
        self._headers = headers
        self._identity = lock_word(identity.lock_path)
        self._index = headers.claim_cell(self._identity)
        if self._index < 0:
            raise EndpointBusyError(f"all {_native.MAX_CONSUMERS} readers' cells of pool {pool} are taken; close one")

    def take(self) -> int | None:
        """The slot of the newest publication, which stays as it is until ``put_back``; ``None`` if there is none."""
        return _slot_of(self._headers.take_latest(self._index))

    def put_back(self) -> None:
        """What was taken is not read any more."""
        self._headers.put_back(self._index)

    def release(self) -> None:
        """Give the place up; harmless twice."""
        self._headers.release_cell(self._index, self._identity)


def _slot_of(word: int) -> int | None:
    return (word & (1 << _SLOT_BITS) - 1) - 1 if word else None

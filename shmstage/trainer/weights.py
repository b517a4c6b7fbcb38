"""The weights pool: three places in shared memory where the parameters of a version are published for readers.

Owned by this incarnation of the trainer. Readers (``shmstage.WeightsReader``) take the newest version through their
cells; the next is written where no cell points. One reader per version and one version being written: three places are
enough for any number of readers that keep up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, final

import jax

from shmstage.errors import CancelledError, WaitTimeoutError
from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout, dtype_name
from shmstage.memory.pool import Pool
from shmstage.memory.reservation import Numa
from shmstage.trainer.host_copy import copy_to
from shmstage.wire.handles import handle_to_wire

BUFFERS = 3
REMEDY = 'set weight_sync = "off", or give the machine more shared memory'
LOOK_EVERY_S = 0.005


@final
class WeightsPool:
    """Made at the first publication, from the names, dtypes and shapes of the parameters.

    ``publish`` is called by one thread, the rest by any.
    """

    def __init__(self, run_id: str, incarnation: int, identity: ProcessIdentity, *, numa: Numa = "default") -> None:
        self._run_id = run_id
        self._incarnation = incarnation
        self._identity = identity
        self._numa = numa
        self._pool: Pool | None = None
        self._published: dict[int, Handle] = {}
        self._lock = threading.Lock()
        self._skipped = 0
        self._newest = -1
        self._giving_up = threading.Event()

    def publish(
        self, version: int, weights: Mapping[str, jax.Array], *, sync: bool, deadline: float = 0.0
    ) -> dict[str, Any]:
        """Copy the parameters straight into a free place, waiting until they are computed, and publish them.

        Returns run, version, pool, epoch, layout and handle in wire form, and how many rounds were skipped so far. With
        no free place the round is skipped (``"skipped": True``), or with ``sync`` waited for until ``deadline``
        (``time.monotonic``): ``WaitTimeoutError`` then names who reads. Raises ``BudgetError`` if the pool does not
        fit, ``CancelledError`` if the wait was given up. A version older than one that was published here is skipped.
        """
        layout = Layout.of({name: (dtype_name(a.dtype), a.shape) for name, a in weights.items()})
        pool = self._made(layout)
        if version < self._newest:  # after a restore: readers never go back
            return self._skip(version)
        place = self._free_place(pool, version, deadline) if sync else self._try_free_place(pool)[0]
        if place is None:
            return self._skip(version)
        with pool.acquire(layout, timeout_s=0.0, only=place) as slot:
            for name, array in weights.items():
                copy_to(slot.views[name], array)
            handle = slot.publish(step=version)
        with self._lock:
            self._published[place] = handle
            pool.cells.announce(place)
        self._newest = version
        return {
            "run_id": self._run_id,
            "version": version,
            "pool": pool.name,
            "epoch": self._incarnation,
            "layout": layout.to_wire(),
            "handle": handle_to_wire(handle),
            "skipped": False,
            "skipped_total": self._skipped,
        }

    def release(self, version: int) -> bool:
        """Take a version back, False if it is not published (any more); who reads it now may finish."""
        with self._lock:
            places = [place for place, handle in self._published.items() if handle.step == version]
            if not places or self._pool is None:
                return False
            if self._pool.cells.newest_slot() in places:
                self._pool.cells.announce_nothing()
            read = self._pool.cells.readers()
            for place in places:
                if place not in read:
                    self._withdraw(self._pool, place)
            return True

    def give_up_waiting(self, wanted: bool) -> None:
        """While ``wanted``, whoever waits in ``publish`` for a reader stops waiting."""
        if wanted:
            self._giving_up.set()
        else:
            self._giving_up.clear()

    def close(self) -> None:
        """Unlink and unmap; readers keep what they have mapped. Idempotent."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _skip(self, version: int) -> dict[str, Any]:
        self._skipped += 1
        return {"version": version, "skipped": True, "skipped_total": self._skipped}

    def _made(self, layout: Layout) -> Pool:
        with self._lock:
            if self._pool is None:
                # its one consumer ends no lease: a version stays published until it is withdrawn
                self._pool = Pool.create(
                    self._run_id, epoch=self._incarnation, layouts=[layout], slots=BUFFERS, identity=self._identity,
                    numa=self._numa, remedy=f"these are {BUFFERS} places for all parameters: {REMEDY}",
                )  # fmt: skip
            return self._pool

    def _free_place(self, pool: Pool, version: int, deadline: float) -> int:
        began = time.monotonic()
        while True:
            place, read = self._try_free_place(pool)
            if place is not None:
                return place
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"no place for version {version} within {deadline - began:.3g} s: {self._who_reads(read)}; end "
                    'what was taken, or use weight_sync = "async", which skips such a round'
                )
            if self._giving_up.wait(LOOK_EVERY_S):
                raise CancelledError(f"version {version} was not published: the wait for a place was given up")

    def _try_free_place(self, pool: Pool) -> tuple[int | None, dict[int, list[str]]]:
        """A place that nobody reads and nobody can begin to, taken back from what it held; or who reads what."""
        with self._lock:
            newest = pool.cells.newest_slot()  # first: who takes a later one finds it in its own place
            read = pool.cells.readers()
            for place in range(BUFFERS):
                if place != newest and place not in read:
                    self._withdraw(pool, place)
                    return place, read
            return None, read

    def _who_reads(self, read: Mapping[int, list[str]]) -> str:
        versions = {place: handle.step for place, handle in self._published.items()}
        parts = [f"{' and '.join(who)} read version {versions.get(place, '?')}" for place, who in sorted(read.items())]
        return "; ".join(parts)

    def _withdraw(self, pool: Pool, place: int) -> None:
        handle = self._published.pop(place, None)
        if handle is not None:
            pool.withdraw(handle)

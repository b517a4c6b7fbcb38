"""The weights pool: three places in shared memory where the parameters of a version are published for readers.

Owned by this incarnation of the trainer. Readers attach with ``PoolReader`` and lease the handle that a ticket names.
The newest two versions stay; to publish another the oldest is taken back, and whoever still copies from it sees
its lease turn stale and takes the newest instead.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, final

import jax

from shmstage.memory.handle import Handle
from shmstage.memory.identity import ProcessIdentity
from shmstage.memory.layout import Layout, dtype_name
from shmstage.memory.pool import Pool
from shmstage.trainer.host_copy import copy_to
from shmstage.wire.handles import handle_to_wire

BUFFERS = 3


@final
class WeightsPool:
    """Made at the first publication, from the names, dtypes and shapes of the parameters. Any thread may call it."""

    def __init__(self, run_id: str, incarnation: int, identity: ProcessIdentity, *, timeout_s: float) -> None:
        self._run_id = run_id
        self._incarnation = incarnation
        self._identity = identity
        self._timeout_s = timeout_s
        self._pool: Pool | None = None
        self._published: dict[int, Handle] = {}
        self._lock = threading.Lock()

    def publish(self, version: int, weights: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Copy the parameters straight into a free place, waiting until they are computed, and publish them.

        Returns version, pool, epoch, layout and handle in wire form. Raises ``BudgetError`` if the pool does not fit.
        """
        layout = Layout.of({name: (dtype_name(a.dtype), a.shape) for name, a in weights.items()})
        with self._lock:
            if self._pool is None:
                self._pool = Pool.create(
                    self._run_id, epoch=self._incarnation, layouts=[layout], slots=BUFFERS, identity=self._identity
                )
            pool = self._pool
            while len(self._published) >= BUFFERS:
                self._withdraw(min(self._published))
            with pool.acquire(layout, timeout_s=self._timeout_s) as slot:
                for name, array in weights.items():
                    copy_to(slot.views[name], array)
                handle = slot.publish(step=version)
            self._withdraw(version)  # published again after a restore
            self._published[version] = handle
        return {
            "version": version,
            "pool": pool.name,
            "epoch": self._incarnation,
            "layout": layout.to_wire(),
            "handle": handle_to_wire(handle),
        }

    def release(self, version: int) -> bool:
        """Take a version back; False if it is not published (any more)."""
        with self._lock:
            return self._withdraw(version)

    def close(self) -> None:
        """Unlink and unmap; idempotent."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def _withdraw(self, version: int) -> bool:
        handle = self._published.pop(version, None)
        if handle is None or self._pool is None:
            return False
        self._pool.withdraw(handle)
        return True

"""Micro-batches that wait in this process's own memory, so that the slots they came in go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from shmstage.errors import PoolError
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.trainer import aliasing
from shmstage.trainer.device_buffers import Readable
from shmstage.trainer.host_copy import copy_bytes

Memory = np.ndarray[Any, np.dtype[np.uint8]]


@final
class HostBuffers:
    """``count`` places, each kept for good and grown when a larger layout comes. For one thread."""

    def __init__(self, count: int) -> None:
        # a deque: an upload's end gives its place back from the thread that watches it
        self._free: deque[Memory] = deque(np.empty(0, np.uint8) for _ in range(count))
        self._layouts: dict[int, Layout] = {}

    def room(self) -> bool:
        """Whether a place is free."""
        return bool(self._free)

    def hold(self, lease: Readable) -> Readable:
        """A copy of the lease's ``views``, which is a lease on its place; the lease given is ended, also by an error.

        There has to be room. Raises as ``Lease.check``.
        """
        memory = self._free.popleft()
        try:
            lease.check()
            layout = self._layout(lease)
            if memory.nbytes < layout.nbytes:
                memory = aligned_buffer(layout.nbytes, aliasing.ALIGNMENT)
            views = layout.views(memory, 0)
            try:
                for name, source in lease.views.items():
                    copy_bytes(views[name], source)
            except PoolError:
                lease.check()  # says which pool, and what is left of it
                raise
            lease.check()  # the slot held this generation from the first byte to the last
        except BaseException:
            self._free.append(memory)
            raise
        finally:
            lease.end()
        return _Held(lease.handle, views, memory, self._free)

    def _layout(self, lease: Readable) -> Layout:
        layout_id = lease.handle.layout_id
        if layout_id not in self._layouts:
            self._layouts[layout_id] = Layout.from_arrays(lease.views)
        return self._layouts[layout_id]


@final
@dataclass(slots=True)
class _Held:
    handle: Handle
    views: Mapping[str, np.ndarray[Any, Any]]
    memory: Memory
    free: deque[Memory]
    ended: bool = False

    @property
    def late_views(self) -> Mapping[str, np.ndarray[Any, Any]]:
        return {}

    def check(self) -> None:
        """Nobody else writes here: what is held stays as it was copied."""

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.free.append(self.memory)

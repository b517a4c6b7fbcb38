"""A slot while it is written. After ``publish`` there is nothing left to write with."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

import numpy as np

from shmstage import _native
from shmstage.errors import ForkedError, InputError, PoolError, SlotStateError
from shmstage.memory.handle import NO_DIGEST, Handle
from shmstage.memory.layout import Layout


@final
class WritableSlot:
    """A claimed slot: fill ``views``, then ``publish``. As a context manager it abandons what is not published."""

    __slots__ = (
        *("__weakref__", "_all_consumers", "_check_backed", "_generation", "_headers", "_on_done", "_pid", "_views"),
        *("index", "layout"),
    )

    def __init__(
        self,
        headers: _native.Headers,
        index: int,
        layout: Layout,
        views: dict[str, np.ndarray[Any, Any]],
        all_consumers: int,
        check_backed: Callable[[], None],
        on_done: Callable[[int], object],
    ) -> None:
        """Made by ``Pool.acquire``."""
        self.index = index
        self.layout = layout
        self._headers = headers
        self._generation = headers.generation(index)
        self._views: dict[str, np.ndarray[Any, Any]] | None = views
        self._all_consumers = all_consumers
        self._check_backed = check_backed
        self._on_done = on_done
        self._pid = os.getpid()

    @property
    def views(self) -> dict[str, np.ndarray[Any, Any]]:
        """Field name → writable array in the slot, late fields too. Holds what the slot held before."""
        if self._views is None:
            raise SlotStateError(f"slot {self.index} is no longer this writer's: it was published or abandoned")
        return self._views

    def publish(
        self,
        *,
        digest: bytes = NO_DIGEST,
        rows: int = 0,
        step: int = 0,
        index: int = 0,
        is_final: bool = False,
        loss_tokens: int = 0,
        segments: int = 0,
        consumers: int | None = None,
    ) -> Handle:
        """Makes the content visible to the consumers in the bit mask (all of them if ``None``).

        The views turn read-only; slices and reshapes taken from them earlier do not, and must not be written any more.
        Raises ``SlotStateError`` when called twice, ``InputError`` for numbers that no header can hold, ``PoolError``
        if somebody has shrunk the pool's file.
        """
        if os.getpid() != self._pid:
            raise ForkedError(f"slot {self.index} belongs to process {self._pid}; a forked child must not publish it")
        views = self.views
        self._check_backed()
        mask = self._all_consumers if consumers is None else consumers
        if mask & ~self._all_consumers:
            raise InputError(f"consumers = {mask:#x} names one beyond the pool's ({self._all_consumers:#x})")
        if len(digest) != 16:
            raise InputError(f"a digest has 16 bytes, not {len(digest)}")
        for view in views.values():
            view.setflags(write=False)
        layout_id = self.layout.layout_id
        try:
            generation = self._headers.publish(self.index, self._generation, layout_id, mask, step, index)
        except TypeError:
            for view in views.values():
                view.setflags(write=True)
            raise InputError(f"step {step!r} and index {index!r} must be integers of 64 and 32 bits") from None
        self._finish()
        if not generation:
            raise SlotStateError(f"slot {self.index} is no longer being written at {self._generation}")
        return Handle(
            self.index, generation, layout_id, digest, rows, step, index, is_final, loss_tokens, segments
        )

    def abandon(self) -> None:
        """Gives the slot back unpublished, at the next even generation, which no handle names. Idempotent."""
        if self._views is not None and os.getpid() == self._pid:  # in a forked child it stays the parent's
            try:
                self._check_backed()
                self._headers.discard(self.index, self._generation)
            except PoolError:  # somebody took the memory away: there is nothing left to give back
                pass
            for view in self._views.values():
                view.setflags(write=False)
            self._finish()

    def __enter__(self) -> WritableSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _finish(self) -> None:
        self._views = None
        self._on_done(self.index)

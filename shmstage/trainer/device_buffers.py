"""Device buffers: how many micro-batches may be on the devices, and when one's memory is free again.

Two releases, and they are different things. The *slot* is released when the copy out of it is proven over; the
*device buffer* is retired when its micro-batch is settled (the engine will not run it again), every token of it, a
replay's too, has resolved and, where arrays alias host memory, JAX has dropped them. ``aliasing.py`` says why.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import jax
import numpy as np

from shmstage.errors import CancelledError, PoolError, TrainerError, WaitTimeoutError
from shmstage.events import NO_EVENTS, Events
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.trainer import aliasing
from shmstage.trainer.host_copy import copy_bytes
from shmstage.trainer.reporting import describe

Shardings = Mapping[str, jax.sharding.Sharding]

POLL_S = 0.05
DROP_POLL_S = 0.001


class Readable(Protocol):
    """What an upload needs of a lease."""

    @property
    def handle(self) -> Handle: ...
    @property
    def views(self) -> Mapping[str, np.ndarray[Any, Any]]: ...
    @property
    def late_views(self) -> Mapping[str, np.ndarray[Any, Any]]: ...
    def check(self) -> None: ...
    def end(self) -> None: ...


class Watch(Protocol):
    """``TokenWatcher.watch``: call back with (ready_ns, error) when the arrays are ready."""

    def __call__(self, arrays: Any, on_ready: Callable[[int, str], None]) -> None: ...


#: issue the upload of host arrays, by field name; they are read until what it returns is ready
Put = Callable[[Mapping[str, np.ndarray[Any, Any]], Shardings], dict[str, jax.Array]]
#: the same for arrays that are this host's part of what a trainer that spans hosts computes on
Spread = Callable[[Mapping[str, np.ndarray[Any, Any]]], dict[str, jax.Array]]


@dataclass(slots=True)
class StagedBatch:
    """A micro-batch whose upload has been issued. ``take`` gives its arrays away once."""

    name: str
    buffer: int
    arrays: dict[str, jax.Array]

    def take(self) -> dict[str, jax.Array]:
        """The arrays; no reference stays here, since one kept anywhere keeps the buffer from being retired."""
        arrays, self.arrays = self.arrays, {}
        return arrays


@dataclass(slots=True)
class _Buffer:
    """One place. ``use`` numbers its uploads, so that news of an old one is told apart.

    ``computing`` are the tokens over its arrays that have not resolved, numbered as they were dispatched; the first is
    among them from the upload on.
    """

    use: int = 0
    holder: str = ""
    settled: bool = True
    dropped: bool = True
    dispatched: int = 0
    computing: set[int] = field(default_factory=set)
    memory: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.uint8))
    #: whose retirement is still to be noted, and when its latest condition came true
    noted_of: Handle | None = None
    changed_ns: int = 0

    @property
    def retired(self) -> bool:
        return self.settled and self.dropped and not self.computing

    def why_held(self) -> str:
        if not self.settled:
            return f"{self.holder} is not trained or not settled"
        if self.computing:
            return f"{self.holder} is still being computed"
        return f"the arrays of {self.holder} are still referenced"


@final
class DeviceBuffers:
    """``count`` places, used by one thread; other threads only report, through a queue.

    On the CPU backend each place is a private aligned host buffer, kept for good and grown when a larger layout comes.
    """

    def __init__(
        self,
        count: int,
        watch: Watch,
        *,
        timeout_s: float = 600.0,
        cancelled: Callable[[], bool] = lambda: False,
        put: Put | None = None,
        events: Events = NO_EVENTS,
        count_name: str = "device_buffers",
    ) -> None:
        """``watch`` waits for uploads; ``cancelled`` is polled while waiting for a place (``CancelledError``).

        ``put``: the engine's own way to a device that is not the host's, instead of ``jax.device_put``.
        ``count_name``: what the caller calls ``count``, for the remedies of errors.
        """
        self._buffers = [_Buffer() for _ in range(count)]
        self._watch = watch
        self._count_name = count_name
        self._timeout_s = timeout_s
        self._cancelled = cancelled
        self._put = put or _put
        self._events = events
        self._news: queue.SimpleQueue[tuple[str, int, int, int, int]] = queue.SimpleQueue()
        self._placements: dict[int, Layout] = {}

    def upload(
        self,
        lease: Readable,
        shardings: Shardings,
        on_ready: Callable[[int, str], None] = lambda ready_ns, error: None,
        *,
        keep_lease: bool = False,
        spread: Spread | None = None,
    ) -> StagedBatch:
        """Issue the upload of a leased slot and end the lease when its copy is proven over.

        Waits for a retired place first. ``on_ready(ready_ns, error)`` runs on the watcher's thread when the staged
        arrays are ready. ``keep_lease``: the caller ends it. ``spread`` uploads in the place of ``put``. Raises
        ``StaleHandleError`` if the slot moved on while it was read, ``WaitTimeoutError`` naming who holds the places;
        nothing is staged then.
        """
        number, buffer = self._retired_buffer()
        lease.check()
        buffer.use += 1
        if aliasing.aliases_host_memory(shardings):
            put = spread or (lambda views: _put(views, shardings))
            arrays, report = self._through_host_buffer(number, buffer, lease, put, keep_lease), on_ready
        else:
            put = spread or (lambda views: self._put(views, shardings))
            arrays, report = self._from_slot(lease, put, keep_lease, on_ready)
            buffer.dropped = True
        buffer.holder, buffer.settled = lease.handle.request_id, False
        buffer.dispatched, buffer.computing = 0, {0}
        buffer.noted_of, buffer.changed_ns = lease.handle, 0
        self._watch(list(arrays.values()), report)
        return StagedBatch(buffer.holder, number, arrays)

    # --- what lets a place go -------------------------------------------------------------------------------

    def settled(self, buffer: int) -> None:
        """The engine will not run this place's micro-batch again; its tokens are known by now."""
        place = self._buffers[buffer]
        if not place.settled:
            place.settled = True
            self._note("settled", place, now := time.monotonic_ns())
            self._changed(buffer, now)

    def resolver(self, buffer: int) -> Callable[[], None]:
        """A program over the place's arrays is being dispatched: what to call, from any thread, when it is over.

        One per program; calling it twice is harmless.
        """
        place = self._buffers[buffer]
        use, number = place.use, place.dispatched
        place.dispatched += 1
        place.computing.add(number)
        return lambda: self._news.put(("resolved", buffer, use, number, time.monotonic_ns()))

    def discard(self, batch: StagedBatch) -> None:
        """Give up a batch that no program was given."""
        batch.take()
        self._buffers[batch.buffer].settled = True
        self._buffers[batch.buffer].computing.clear()
        self._changed(batch.buffer, time.monotonic_ns())

    def retired(self) -> list[int]:
        """The places free now."""
        self._read_news()
        return [number for number, buffer in enumerate(self._buffers) if buffer.retired]

    def memory_of(self, buffer: int) -> np.ndarray[Any, Any]:
        """The place's private host memory, uint8 (empty where uploads read the slot). For tests that poison it."""
        return self._buffers[buffer].memory

    def wait_retired(self) -> None:
        """Wait until at least one place is free. Raises as ``upload``."""
        self._retired_buffer()

    # --- two ways to the device -----------------------------------------------------------------------------

    def _through_host_buffer(
        self, number: int, buffer: _Buffer, lease: Readable, put: Spread, keep_lease: bool
    ) -> dict[str, jax.Array]:
        sources = _fields(lease)
        placement = self._placement(lease.handle.layout_id, sources)
        if buffer.memory.nbytes < placement.nbytes:
            buffer.memory = aligned_buffer(placement.nbytes, aliasing.ALIGNMENT)
        use = buffer.use
        buffer.dropped = False

        def dropped() -> None:
            self._news.put(("dropped", number, use, 0, time.monotonic_ns()))

        base = aliasing.exported(buffer.memory, dropped)
        views = placement.views(base, 0)
        for name, source in sources.items():
            try:
                copy_bytes(views[name], source)
            except PoolError:
                lease.check()  # says which pool, and what is left of it
                raise
        lease.check()  # the slot held this generation from the first byte to the last
        if not keep_lease:
            lease.end()
        return put(views)

    def _from_slot(
        self, lease: Readable, put: Spread, keep_lease: bool, on_ready: Callable[[int, str], None]
    ) -> tuple[dict[str, jax.Array], Callable[[int, str], None]]:
        views = _fields(lease)
        self._placement(lease.handle.layout_id, views)
        arrays = put(views)

        def report(ready_ns: int, error: str) -> None:
            for act in (lease.check,) if keep_lease else (lease.check, lease.end):
                try:
                    act()
                except Exception as raised:
                    error = error or describe(raised)
            on_ready(ready_ns, error)

        return arrays, report

    def _placement(self, layout_id: int, sources: Mapping[str, np.ndarray[Any, Any]]) -> Layout:
        if layout_id not in self._placements:
            placement = Layout.from_arrays(sources)
            aliasing.refuse_narrowing((f.name, f.dtype) for f in placement.fields)
            self._placements[layout_id] = placement
        return self._placements[layout_id]

    # --- waiting for a place --------------------------------------------------------------------------------

    def _retired_buffer(self) -> tuple[int, _Buffer]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._read_news()
            for number, buffer in enumerate(self._buffers):
                if buffer.retired:
                    return number, buffer
            self._wait_for_news(deadline)

    def _wait_for_news(self, deadline: float) -> None:
        held = "; ".join(f"{n}: {buffer.why_held()}" for n, buffer in enumerate(self._buffers))
        if not any(buffer.settled for buffer in self._buffers):
            # only this very thread could settle one: waiting would never end
            raise TrainerError(f"all {len(self._buffers)} device buffers are taken ({held}); raise {self._count_name}")
        left = deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeoutError(
                f"no device buffer was retired within {self._timeout_s:g} s ({held}); "
                f"drop references to their arrays or raise {self._count_name}"
            )
        if self._cancelled():
            raise CancelledError("the wait for a device buffer was given up: a new handshake or a stop is waiting")
        dropping = any(b.settled and not b.computing for b in self._buffers)
        if dropping:
            aliasing.nudge()
        try:
            self._take(self._news.get(timeout=min(left, DROP_POLL_S if dropping else POLL_S)))
        except queue.Empty:
            pass

    def _read_news(self) -> None:
        while True:
            try:
                self._take(self._news.get_nowait())
            except queue.Empty:
                return

    def _take(self, news: tuple[str, int, int, int, int]) -> None:
        what, number, use, token, at_ns = news
        buffer = self._buffers[number]
        if buffer.use != use:
            return
        if what == "resolved":
            buffer.computing.discard(token)
        else:
            buffer.dropped = True
        self._changed(number, at_ns)

    # --- what is noted --------------------------------------------------------------------------------------

    def _changed(self, number: int, at_ns: int) -> None:
        """One of the conditions of ``retired`` came true at ``at_ns``, which may be a while ago."""
        buffer = self._buffers[number]
        buffer.changed_ns = max(buffer.changed_ns, at_ns)
        if buffer.retired and buffer.noted_of is not None:
            self._note("retired", buffer, buffer.changed_ns, buffer=number)
            buffer.noted_of = None

    def _note(self, event: str, of: _Buffer, at_ns: int, **figures: int) -> None:
        handle = of.noted_of
        if handle is not None:
            self._events.note(
                event, at_ns, step=handle.step, index=handle.index, request_id=of.holder, **figures
            )


def _fields(lease: Readable) -> dict[str, np.ndarray[Any, Any]]:
    """All fields in the layout's order: the late ones lie last."""
    return {**lease.views, **lease.late_views}


def _put(views: Mapping[str, np.ndarray[Any, Any]], shardings: Shardings) -> dict[str, jax.Array]:
    """One ``device_put`` for all leaves: eight leaves in one call cost about twice one leaf."""
    names = list(views)
    placed = jax.device_put([views[name] for name in names], [shardings[name] for name in names])
    return dict(zip(names, placed, strict=True))

"""A device that takes a given time: in-order queues with exact stamps, uploads that really read what they are given.

An operation begins at the latest of its enqueueing, the end of the one before it and the end of the upload it reads; it
ends its duration later. Those stamps are computed, not observed: the idle they add up to is the device's, not that of
the threads which act it out. Whoever waits for an end hears of it when the clock is there, a thread switch later.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import numpy as np

from shmstage import _native
from shmstage.errors import PoolError

#: read at once by an upload; between two of them it waits until its pace allows the next
CHUNK_NBYTES = 4 << 20
#: how long after an operation's begin it is acted out, at most
ACT_AFTER_NS = 3_000_000
DEADLINE_S = 600.0

Kind = Literal["fwd_bwd", "update", "upload"]
#: gets each piece an upload has read: the array's name and its bytes, which are overwritten after the call
Reader = Callable[[str, np.ndarray[Any, Any]], None]


def begin_of(enqueued_ns: int, previous_end_ns: int, needed_end_ns: int = 0) -> int:
    """When an operation of an in-order queue begins: nothing else in this module decides that."""
    return max(enqueued_ns, previous_end_ns, needed_end_ns)


@final
@dataclass(eq=False, slots=True)
class Operation:
    """One piece of work; its stamps are final once it is ready. Any thread may wait for it."""

    kind: Kind
    step: int
    index: int
    enqueued_ns: int
    duration_ns: int
    needs: Operation | None = None
    begin_ns: int = 0
    end_ns: int = 0
    #: what an upload has really read
    nbytes: int = 0
    #: how much later than ``end_ns`` it was told
    late_ns: int = 0
    error: str = ""
    _over: threading.Event = field(default_factory=threading.Event)

    def is_ready(self) -> bool:
        return self._over.is_set()

    def block_until_ready(self) -> Operation:
        """Return when it is over. Raises ``RuntimeError`` if it failed, ``TimeoutError`` after ten minutes."""
        if not self._over.wait(DEADLINE_S):
            raise TimeoutError(f"{self.kind} {self.step}.{self.index} was not over after {DEADLINE_S:g} s")
        if self.error:
            raise RuntimeError(self.error)
        return self

    def tell(self, now_ns: int) -> None:
        self.late_ns = now_ns - self.end_ns
        self._over.set()

    def record(self) -> dict[str, Any]:
        names = (
            "kind", "step", "index", "enqueued_ns", "duration_ns", "begin_ns", "end_ns", "late_ns", "nbytes", "error",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "needed_ns": 0 if self.needs is None else self.needs.end_ns,
        }


@dataclass(frozen=True)
class Boundary:
    """The device between L, the last micro-batch of ``step``, and F, the first of the next, in ns."""

    step: int
    idle_ns: int
    before_update_ns: int
    after_update_ns: int
    #: how much of ``after_update_ns`` F's upload alone accounts for
    upload_ns: int
    step_ns: int


def boundaries_of(operations: Sequence[Operation]) -> list[Boundary]:
    """Idle at each step boundary from the compute queue's operations, in order; the last step has none.

    ``step_ns`` is from one update's end to the next one's, 0 for the first.
    """
    found: list[Boundary] = []
    previous_end = 0
    for before, update, after in zip(operations, operations[1:], operations[2:], strict=False):
        if update.kind != "update":
            continue
        waited = after.begin_ns - update.end_ns
        needed = 0 if after.needs is None else after.needs.end_ns
        upload = max(0, min(waited, needed - max(update.end_ns, after.enqueued_ns)))
        early = update.begin_ns - before.end_ns
        step_ns = update.end_ns - previous_end if previous_end else 0
        found.append(Boundary(update.step, early + waited, early, waited, upload, step_ns))
        previous_end = update.end_ns
    return found


class _Queue:
    """One in-order queue and the thread that acts it out."""

    def __init__(self, name: str, run: Callable[[Operation, Callable[[], None]], None]) -> None:
        self._run = run
        self._todo: queue.SimpleQueue[tuple[Operation, Callable[[], None]] | None] = queue.SimpleQueue()
        self.operations: list[Operation] = []
        self._thread = threading.Thread(target=self._loop, name=f"simulated-{name}", daemon=True)
        self._thread.start()

    def put(self, operation: Operation, act: Callable[[], None]) -> Operation:
        self.operations.append(operation)
        self._todo.put((operation, act))
        return operation

    def close(self) -> None:
        self._todo.put(None)
        self._thread.join(DEADLINE_S)

    def _loop(self) -> None:
        while (item := self._todo.get()) is not None:
            self._run(*item)
            del item  # else the last one's arrays live until the next comes


@final
class SimulatedDevice:
    """A compute queue and an upload queue. ``upload_gbps`` is in 1e9 bytes per second; 0: as fast as memory.

    One thread dispatches. ``sleep_until(ns)`` and ``clock_ns`` are the clock's.
    """

    def __init__(
        self,
        *,
        upload_gbps: float = 0.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep_until: Callable[[int], None] | None = None,
    ) -> None:
        self._ns_per_byte = 1 / upload_gbps if upload_gbps else 0.0
        self._clock_ns = clock_ns
        self._sleep_until = sleep_until or _sleep_until
        self._compute_end = self._upload_end = 0
        self._compute = _Queue("compute", self._run_compute)
        self._uploads = _Queue("upload", self._run_upload)
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._lock = threading.Lock()
        self._piece = np.zeros(CHUNK_NBYTES, np.uint8)  # the upload thread's alone

    # --- dispatch: stamps, queues, returns ------------------------------------------------------------------

    def compute(
        self, kind: Kind, step: int, index: int, seconds: float, *, needs: Operation | None = None,
        act: Callable[[], None] = lambda: None,
    ) -> Operation:  # fmt: skip
        """Work of ``seconds`` that reads what ``needs`` uploads. ``act`` runs when it begins; it fails if that raises,
        or if the upload failed."""
        operation = Operation(kind, step, index, self._clock_ns(), round(seconds * 1e9), needs)
        return self._compute.put(operation, act)

    def upload(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], read: Reader | None = None
    ) -> tuple[Operation, dict[str, np.ndarray[Any, Any]]]:
        """Begin to copy C-contiguous ``arrays`` at the device's pace; returns the token and where the copies will be.

        The arrays are read until the token is ready. The copies lie in device memory: ``recycle`` gives it back. With
        ``read`` nothing is kept, and nothing returned: the device's memory is not this machine's, and ``read`` takes
        from each piece what will be asked for.
        """
        sizes = {name: array.nbytes for name, array in arrays.items()}
        memory = {name: self._taken(nbytes) for name, nbytes in sizes.items()} if read is None else {}
        sources = {name: array.reshape(-1).view(np.uint8) for name, array in arrays.items()}
        operation = Operation("upload", 0, 0, self._clock_ns(), round(sum(sizes.values()) * self._ns_per_byte))

        def act() -> None:
            for name, source in sources.items():
                for start in range(0, source.nbytes, CHUNK_NBYTES):
                    self._sleep_until(operation.begin_ns + round(operation.nbytes * self._ns_per_byte))
                    part = source[start : start + CHUNK_NBYTES]
                    into = (self._piece if read is not None else memory[name][start:])[: part.nbytes]
                    if not _native.copy_guarded(into, part):
                        raise PoolError(f"the slot of field {name} went away under its upload: its pool was shrunk")
                    operation.nbytes += part.nbytes
                    if read is not None:
                        read(name, into)

        self._uploads.put(operation, act)
        return operation, {name: memory[name].view(a.dtype).reshape(a.shape) for name, a in arrays.items() if memory}

    def recycle(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Nothing will read these copies any more."""
        with self._lock:
            for array in arrays.values():
                self._free.setdefault(array.nbytes, []).append(array.reshape(-1).view(np.uint8))

    # --- what it was like -----------------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[Operation]:
        return [operation for operation in self._compute.operations if not operation.is_ready()]

    def boundaries(self) -> list[Boundary]:
        """Of everything that is over."""
        return boundaries_of([operation for operation in self._compute.operations if operation.is_ready()])

    def record(self) -> dict[str, Any]:
        """All stamps and the boundaries, as plain values."""
        return {
            "compute": [operation.record() for operation in self._compute.operations],
            "uploads": [operation.record() for operation in self._uploads.operations],
            "boundaries": [{name: getattr(b, name) for name in Boundary.__annotations__} for b in self.boundaries()],
        }

    def close(self) -> None:
        """Finish what was dispatched and end the threads."""
        self._uploads.close()
        self._compute.close()

    # --- the two threads ------------------------------------------------------------------------------------

    def _run_compute(self, operation: Operation, act: Callable[[], None]) -> None:
        if operation.needs is not None:
            operation.needs._over.wait(DEADLINE_S)
            operation.error = operation.needs.error
        needed = 0 if operation.needs is None else operation.needs.end_ns
        operation.begin_ns = begin_of(operation.enqueued_ns, self._compute_end, needed)
        operation.end_ns = self._compute_end = operation.begin_ns + operation.duration_ns
        # what is acted out holds the interpreter, which a device does not: whoever waited for the one before goes first
        self._sleep_until(operation.begin_ns + min(operation.duration_ns // 20, ACT_AFTER_NS))
        try:
            if not operation.error:
                act()
        except Exception as error:
            operation.error = f"{type(error).__name__}: {error}"
        self._sleep_until(operation.end_ns)
        operation.tell(self._clock_ns())

    def _run_upload(self, operation: Operation, act: Callable[[], None]) -> None:
        operation.begin_ns = begin_of(operation.enqueued_ns, self._upload_end)
        try:
            act()
        except Exception as error:
            operation.error = f"{type(error).__name__}: {error}"
        # a copy that could not keep the pace is over when it is over: nothing may begin on half of it
        operation.end_ns = self._upload_end = max(operation.begin_ns + operation.duration_ns, self._clock_ns())
        self._sleep_until(operation.end_ns)
        operation.tell(self._clock_ns())

    def _taken(self, nbytes: int) -> np.ndarray[Any, Any]:
        with self._lock:
            kept = self._free.get(nbytes)
            if kept:
                return kept.pop()
        return np.empty(nbytes, np.uint8)


def _sleep_until(ns: int) -> None:
    left = ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)

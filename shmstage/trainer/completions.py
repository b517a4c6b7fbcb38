"""From readiness to events: two watchers, the stamps, and a list of failures for the command thread to read."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax

from shmstage.events import NO_EVENTS, Events
from shmstage.memory.handle import Handle
from shmstage.trainer.reporting import report
from shmstage.trainer.step_health import StepHealth
from shmstage.trainer.timing import StepTiming
from shmstage.trainer.tokens import TokenWatcher
from shmstage.wire.messages import TokenEvent

UPLOAD_STAMPS = {"staged": ("upload_begin_ns", "staged_ready_ns"), "patched": ("patch_begin_ns", "patch_ready_ns")}

Emit = Callable[[TokenEvent], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """Device work that did not succeed. ``kind`` and ``request_id`` as in the token event."""

    kind: str
    request_id: str
    error: str


@final
class Completions:
    """Every piece of dispatched work ends in exactly one token event, ok or failed."""

    def __init__(
        self,
        emit: Emit,
        timing: StepTiming,
        *,
        timeout_s: float = 600.0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        events: Events = NO_EVENTS,
    ) -> None:
        self.health = StepHealth(timeout_s)
        self._emit = emit
        self._timing = timing
        self._clock_ns = clock_ns
        self._events = events
        self._compute = TokenWatcher("compute", clock_ns=clock_ns)
        self._uploads = TokenWatcher("uploads", at_once=True, clock_ns=clock_ns)
        self._failures: queue.SimpleQueue[Failure] = queue.SimpleQueue()
        #: waits for uploads; what ``DeviceBuffers`` needs
        self.watch_upload = self._uploads.watch

    def dispatched(
        self,
        kind: str,
        name: tuple[str, int, int],
        token: jax.Array | None,
        begin_ns: int,
        end_ns: int,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch a program. ``name`` is (request id, step, index); ``on_over`` runs before the event is emitted.

        ``kind`` is ``"fwd_bwd"`` (the first attempt), ``"replay"`` (the same micro-batch again, after it overflowed) or
        ``"update"``. A micro-batch is over when the last of its events is out, and they all precede the update's.
        """
        request_id, step, index = name
        updates, replays = kind == "update", kind == "replay"
        if replays:
            self._timing.replayed(step, request_id, begin_ns, end_ns)
        else:
            self._timing.dispatched(step, request_id, -1 if updates else index, begin_ns, end_ns)
        if updates:
            self.health.update_began(step)
        of = (-1, "") if updates else (index, request_id)
        note = partial(self._events.note, step=step, index=of[0], request_id=of[1])
        note("dispatched", begin_ns, end_ns, kind=kind)

        def on_ready(ready_ns: int, error: str) -> None:
            on_over()
            self._timing.ready(step, request_id, ready_ns, replay=replays)
            if updates:
                error = self.health.update_verdict(step, error)
            stamps = {"dispatch_begin_ns": begin_ns, "dispatch_end_ns": end_ns, "ready_ns": ready_ns}
            error = self._report(TokenEvent(0, kind, request_id, step, index, not error, error, stamps))
            failed: dict[str, Any] = {"error": error} if error else {}
            if updates:
                note("landed", ready_ns, **failed)
                self.health.update_over(step, error, ready_ns)
            else:
                note("ready", ready_ns, kind=kind, **failed)
                self.health.forward_over(step, error and f"{kind} of {request_id}: {error}")

        if token is None:
            on_ready(end_ns, "")  # an engine without tokens returns when the work is done
        else:
            self._compute.watch(token, on_ready)

    def watch(self, arrays: object, on_over: Callable[[], None]) -> None:
        """Watch computed arrays that nobody outside asks about (scores, evaluations)."""
        self._compute.watch(arrays, lambda ready_ns, error: on_over())

    def upload_reporter(
        self, handle: Handle, kind: str, begin_ns: int, nbytes: int = 0
    ) -> Callable[[int, str], None]:
        """What to call when an upload of ``nbytes`` is over: emits ``staged`` or ``patched`` with its stamps."""
        begin, ready = UPLOAD_STAMPS[kind]
        self.health.upload_began(handle.step)

        def on_ready(ready_ns: int, error: str) -> None:
            stamps = {begin: begin_ns, ready: ready_ns}
            error = self._report(
                TokenEvent(0, kind, handle.request_id, handle.step, handle.index, not error, error, stamps)
            )
            self.health.upload_over(handle.step, error and f"upload of {handle.request_id}: {error}")
            if not error:
                self._events.note(
                    kind, begin_ns, ready_ns, step=handle.step, index=handle.index, request_id=handle.request_id,
                    nbytes=nbytes,
                )  # fmt: skip

        return on_ready

    def failures(self) -> list[Failure]:
        """Failures since the last call."""
        found = []
        while not self._failures.empty():  # only the caller takes from it
            found.append(self._failures.get_nowait())
        return found

    def hold(self) -> None:
        """From now to ``release`` watch what is dispatched only after ``flush``: before everything that may block."""
        self._compute.hold()
        self._uploads.hold()

    def flush(self) -> None:
        self._uploads.flush()
        self._compute.flush()

    def release(self) -> None:
        self._uploads.release()
        self._compute.release()

    def drain(self, timeout_s: float) -> None:
        """Return when everything dispatched so far has resolved."""
        self._uploads.drain(timeout_s)
        self._compute.drain(timeout_s)

    def close(self) -> None:
        self._uploads.close()
        self._compute.close()

    def _report(self, event: TokenEvent) -> str:
        """Returns the error it was told with: an event that cannot travel is told as failed, and then it is."""
        return report(self._note_and_emit, event).error

    def _note_and_emit(self, event: TokenEvent) -> None:
        if event.error:
            # first: whoever sees the event may send the next command at once
            self._failures.put(Failure(event.kind, event.request_id, event.error))
        self._emit(event)

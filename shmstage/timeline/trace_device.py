"""What the devices of one trainer did: each work's begin is derived, since only its dispatch and its end are stamped.

A program begins at the latest of its dispatch, the end of the one before it, and the arrival of what it reads. Source:
the contract of the step boundary ("Measuring the idle").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from shmstage.timeline.idle import BoundaryInstants, boundary_idle_s, calibrated_microbatch_s, idle_windows
from shmstage.timeline.reading import Event

UPDATE: Final = "update"
_FWD_BWD: Final = "fwd_bwd"
#: while the devices do this they are not idle, though no micro-batch is on them
BUSY_COMMANDS: Final = frozenset({"eval_step", "per_token_logps"})


@dataclass(slots=True)
class DeviceWork:
    """One program: a micro-batch's first attempt (fwd_bwd), its replay, or an update. `event` is its end.

    `dispatched` None: the dispatch was not seen, and nobody knows when it began.
    """

    kind: str
    event: Event
    end: int
    dispatched: int | None
    previous: int
    staged: int
    patched: int

    @property
    def begin(self) -> int | None:
        """Never after the end: only what was seen before it counts."""
        if self.dispatched is None:
            return None
        return max(self.dispatched, self.previous, self.staged, self.patched)


@dataclass(frozen=True, slots=True)
class Boundary:
    """`step`: the one whose update ends it."""

    step: int
    idle_s: float
    windows: list[tuple[int, int]]


def device_works(events: Sequence[Event]) -> list[DeviceWork]:
    """All works of one start of one trainer that were seen to end, in the order in which they ended."""
    dispatches = _Latest((_kind(e), _subject(_kind(e), e), e.t) for e in events if e.event == "dispatched")
    uploads = _Latest((e.event, e.id, e.end or e.t) for e in events if e.event in ("staged", "patched") and e.id)
    works: list[DeviceWork] = []
    previous = 0
    for event in sorted((e for e in events if e.event in ("ready", "landed")), key=lambda e: e.end or e.t):
        kind = UPDATE if event.event == "landed" else _kind(event)
        end = event.end or event.t
        works.append(
            DeviceWork(
                kind, event, end,
                dispatched=dispatches.before(kind, _subject(kind, event), end),
                previous=previous,
                staged=uploads.before("staged", event.id, end) or 0,
                patched=uploads.before("patched", event.id, end) or 0,
            )
        )  # fmt: skip
        previous = end
    return works


def boundaries(works: Sequence[DeviceWork], events: Iterable[Event]) -> list[Boundary]:
    """Every boundary of which all instants are there; the others are left out, not guessed."""
    busy = [
        (e.t, e.end)
        for e in events
        if (e.event == "executed" and str(e.figures.get("command")) in BUSY_COMMANDS)
        or (e.event == "ticketed" and str(e.figures.get("kind")) in BUSY_COMMANDS)
    ]
    microbatch_s = calibrated_microbatch_s(list(_intervals(works)))
    found = []
    for position, update in enumerate(works):
        if update.kind != UPDATE or position == 0 or update.dispatched is None:
            continue
        last, step = works[position - 1], update.event.step
        first = next((w for w in works[position + 1 : position + 2] if w.kind == _FWD_BWD), None)
        if first is None or first.dispatched is None or last.kind == UPDATE or step < 0:
            continue
        if (last.event.step, first.event.step) != (step, step + 1):
            continue  # restored in between, or something was lost
        near = [window for window in busy if update.end < window[1] and window[0] < first.end]
        at = BoundaryInstants(
            last_finished=last.end, update_dispatched=update.dispatched, update_landed=update.end,
            first_dispatched=first.dispatched, first_staged_ready=first.staged, first_ready=first.end,
            first_patch_ready=first.patched,
        )  # fmt: skip
        found.append(Boundary(step, boundary_idle_s(at, microbatch_s, near), idle_windows(at, microbatch_s, near)))
    return found


def _intervals(works: Sequence[DeviceWork]) -> Iterable[tuple[int, int, int]]:
    """For the calibration: micro-batches that followed another of their step on the device, and no replay."""
    for before, work in pairwise(works):
        together = before.kind == work.kind == _FWD_BWD and before.event.step == work.event.step
        if together and work.dispatched is not None:
            yield work.dispatched, before.end, work.end


class _Latest:
    """The latest instant of a kind and subject at or before a given one."""

    def __init__(self, instants: Iterable[tuple[str, object, int]]) -> None:
        self._found: dict[tuple[str, object], list[int]] = {}
        for kind, subject, instant in instants:
            self._found.setdefault((kind, subject), []).append(instant)
        for found in self._found.values():
            found.sort()

    def before(self, kind: str, subject: object, instant: int) -> int | None:
        found = self._found.get((kind, subject), [])
        position = bisect_right(found, instant)
        return found[position - 1] if position else None


def _kind(event: Event) -> str:
    kind: Any = event.figures.get("kind", _FWD_BWD)
    return kind if type(kind) is str else _FWD_BWD


def _subject(kind: str, event: Event) -> object:
    """What the end of a work and its dispatch have in common."""
    return event.step if kind == UPDATE else (event.id or (event.step, event.index))

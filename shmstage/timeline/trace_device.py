"""What the devices of one trainer did: each work's begin is derived, since only its dispatch and its end are stamped.

A program begins at the latest of its dispatch, the end of the one before it, and the arrival of what it reads. Source:
the contract of the step boundary ("Measuring the idle").
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shmstage.timeline.reading import Event

UPDATE: Final = "update"
_FWD_BWD: Final = "fwd_bwd"


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

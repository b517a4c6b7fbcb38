"""How long each slot was taken, and by which micro-batch: from acquired to the end of the last lease."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from shmstage.timeline.reading import Event


@dataclass(slots=True)
class Occupation:
    """One micro-batch in one slot. `end` None: nobody was seen to end a lease. `published` -1: it was not."""

    process: int
    slot: int
    begin: int
    end: int | None = None
    published: int = -1
    acquired: Event | None = None
    packed: Event | None = None
    publication: Event | None = None
    lease_ends: list[int] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        return [event for event in (self.publication, self.packed, self.acquired) if event is not None]


def occupations(events: Iterable[tuple[int, Event]]) -> list[Occupation]:
    """From (process, event) pairs of all processes, in order of begin and with all times on one axis.

    The producer's events make the occupations of its own pool; a lease's end may come from any process and belongs to
    the last publication of that slot and generation before it, since a new pool counts generations from the beginning.
    """
    of_slot: dict[tuple[int, int], list[Occupation]] = {}
    published: dict[tuple[int, int], list[Occupation]] = {}
    ended = []
    for process, event in sorted(events, key=lambda pair: _seen(pair[1])):
        slot = _count(event.figures.get("slot"))
        if slot is None or event.event not in ("slot_acquired", "packed", "published", "lease_ended"):
            continue
        if event.event == "lease_ended":
            ended.append((slot, event))
            continue
        taken = of_slot.setdefault((process, slot), [])
        _take(taken, process, slot, event)
        generation = _count(event.figures.get("generation"))
        if event.event == "published" and generation is not None:
            published.setdefault((slot, generation), []).append(taken[-1])
    for slot, event in ended:
        generation = _count(event.figures.get("generation"))
        candidates = published.get((slot, generation), []) if generation is not None else []
        before = bisect_right(candidates, event.t, key=lambda occupation: occupation.published)
        if before:
            candidates[before - 1].lease_ends.append(event.t)
    found = [occupation for taken in of_slot.values() for occupation in taken]
    for occupation in found:
        occupation.end = max(occupation.lease_ends, default=None)
    return sorted(found, key=attrgetter("begin"))


def close_open(taken: Iterable[Occupation], last_seen: Sequence[int]) -> None:
    """An occupation without an end lasts until the slot is taken again, else as long as its producer was seen."""
    after: dict[tuple[int, int], int] = {}
    for occupation in sorted(taken, key=attrgetter("begin"), reverse=True):
        key = (occupation.process, occupation.slot)
        if occupation.end is None:
            occupation.end = max(occupation.begin, after.get(key, last_seen[occupation.process]))
        after[key] = occupation.begin


def _take(taken: list[Occupation], process: int, slot: int, event: Event) -> None:
    """Puts a producer's event where it belongs: acquired → packed → published, each once."""
    now = _seen(event)
    last = taken[-1] if taken else None
    if event.event == "slot_acquired":
        taken.append(Occupation(process, slot, now, acquired=event))
    elif event.event == "packed":
        if last is None or last.packed is not None or last.publication is not None:
            taken.append(last := Occupation(process, slot, event.t))
        last.packed = event
    else:
        if last is None or last.publication is not None:
            taken.append(last := Occupation(process, slot, now))
        last.publication, last.published = event, now


def _seen(event: Event) -> int:
    return event.end or event.t


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None

"""The arrows of a trace: the way of each micro-batch from packed over published, staged and dispatched to ready."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from shmstage.timeline.trace_tracks import Mark

PACKED, PUBLISHED, STAGED, DISPATCHED, READY = range(5)


@dataclass(frozen=True, slots=True)
class Stop:
    """Where an arrow may begin or end: an instant within a slice."""

    identity: str
    stage: int
    at: int
    mark: Mark


def stop(identity: str, stage: int, at: int, mark: Mark) -> list[Stop]:
    """One stop, moved into its slice; none if that has no inside: a reader would tie the arrow to something else."""
    if not identity or mark.end is None or mark.begin >= mark.end:
        return []
    return [Stop(identity, stage, min(max(at, mark.begin), mark.end - 1), mark)]


def flows(produced: Iterable[Stop], consumed: Iterable[Stop]) -> list[list[Stop]]:
    """Chains of at least two stops, in order of time and stage: every arrow has both ends.

    `produced` are the stops of orchestrators, `consumed` those of trainers. Each consumer that took a micro-batch has a
    chain of its own, which begins at the latest production before it; what it does again (a replay, after a restart)
    is a chain of its own, too.
    """
    origins: dict[str, list[list[Stop]]] = {}
    for chain in sorted(_chains(produced), key=lambda chain: chain[-1].at):
        origins.setdefault(chain[0].identity, []).append(chain)
    found: list[list[Stop]] = []
    used: dict[int, set[int]] = {}
    for chain in _chains(consumed):
        known = origins.get(chain[0].identity, [])
        before = bisect_right(known, chain[0].at, key=lambda origin: origin[-1].at)
        if before:
            origin, consumer = known[before - 1], chain[0].mark.process
            takers = used.setdefault(id(origin), set())
            if consumer not in takers:
                takers.add(consumer)
                chain = [*origin, *chain]
        found.append(chain)
    found += [origin for chains in origins.values() for origin in chains if id(origin) not in used]
    return sorted((chain for chain in found if len(chain) > 1), key=lambda chain: chain[0].at)


def _chains(stops: Iterable[Stop]) -> list[list[Stop]]:
    """Cuts the stops of each identity in each process where a stage comes again or an earlier one begins anew."""
    found: list[list[Stop]] = []
    current: dict[tuple[str, int], list[Stop]] = {}
    for one in sorted(stops, key=lambda s: (s.at, s.stage)):
        key = (one.identity, one.mark.process)
        chain = current.get(key)
        if chain is None or one.stage <= chain[-1].stage:
            current[key] = chain = []
            found.append(chain)
        chain.append(one)
    return found

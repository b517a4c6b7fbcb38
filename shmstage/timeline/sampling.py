"""How a report of a hundred thousand steps stays small: what is drawn one by one, what is summed up. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: points along the axis of a chart; more steps than this are summed up in groups of neighbours
POINTS: Final = 400
#: boundaries that can be looked at one by one
BOUNDARIES_KEPT: Final = 120
#: spans of all lanes of a run together; boundaries with less idle are left out first
SPANS_KEPT: Final = 40_000
#: points of one memory curve
SAMPLES: Final = 300


def groups(count: int, points: int = POINTS) -> list[range]:
    """``count`` positions in at most ``points`` runs of neighbours, as even as can be."""
    size = max(1, -(-count // points))
    return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]


def kept(idle: Sequence[float], limit: int = BOUNDARIES_KEPT) -> list[int]:
    """Which of many boundaries are drawn, most important first: half by idle, the two ends, the rest evenly spread."""
    count = len(idle)
    if count <= limit:
        return sorted(range(count), key=lambda k: -idle[k])
    by_idle = sorted(range(count), key=lambda k: -idle[k])[: limit // 2]
    ends = [*range(limit // 12), *range(count - limit // 12, count)]
    spread = [round(k * (count - 1) / (limit // 3)) for k in range(limit // 3 + 1)]
    return list(dict.fromkeys((*by_idle, *ends, *spread)))[:limit]


def thinned(samples: Sequence[tuple[int, int]], limit: int = SAMPLES) -> list[tuple[int, int]]:
    """(time, value), the largest value of each group: a peak is never lost."""
    return [max((samples[k] for k in group), key=lambda sample: sample[1]) for group in groups(len(samples), limit)]

"""Records and what is gathered of them, for tests that call the native fill itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from shmstage import _native


def gather(rows: int, segments: Sequence[tuple[int, int, int]], records: Sequence[Any]) -> _native.Gathered:
    """`segments` are (row, start, length), one per record."""
    placed: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
    for number, (row, start, length) in enumerate(segments):
        placed[row].append((number, start, length))
    held = {number: SimpleNamespace(record=record) for number, record in enumerate(records)}
    return _native.Gathered([tuple(row) for row in placed], held)


def routed(length: int, source: Any, shape: tuple[int, int], bits: int) -> _native.TrajectoryRecord:
    """A record of routing alone: `source` dense int16, or (bytes of `pack_routing`, tokens)."""
    layers, top_k = shape
    if isinstance(source, tuple):
        return _native.TrajectoryRecord(length, (), (*source, layers, top_k, bits))
    tokens = memoryview(source).nbytes // max(2 * layers * top_k, 1)
    return _native.TrajectoryRecord(length, (), (source, tokens, layers, top_k, 0))

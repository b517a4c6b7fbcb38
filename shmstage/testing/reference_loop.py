"""The oracle of every boundary mode: the serial loop, short and obvious; its source is frozen by sha256."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def reference_loop(
    engine: Any,
    steps: Iterable[tuple[int, list[Mapping[str, Any]]]],
    place: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    record: Callable[[int, Mapping[str, Any]], None],
) -> None:
    """Train ``steps``, pairs of (number, micro-batches of arrays ``[rows, tokens, ...]``), one after the other.

    ``place`` puts a micro-batch's arrays on the devices as private copies; ``record`` takes each step's metrics.
    Every step is closed by exactly one update, the last one too if the input ended inside it.
    """
    for number, microbatches in steps:
        for arrays in microbatches:
            engine.fwd_bwd(place(arrays))
        engine.update()
        record(number, engine.metrics())

"""Micro-batches cut into windows, and windows put together again, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from shmstage.packing.fields import microbatch_layout
from shmstage.packing.parts import WindowPart, part_of, read_part
from shmstage.packing.pieces import Piece, decode_pieces, encode_pieces
from shmstage.packing.plan import PlannedMicrobatch
from shmstage.packing.reference import Key, TrajectoryReference
from shmstage.packing.trajectory import Trajectory
from shmstage.packing.window import Window
from shmstage.packing.window_fill import fill_window

GARBAGE = 0xA5
STORES = 3

Views = dict[str, np.ndarray[Any, Any]]


def references(trajectories: Mapping[int, Trajectory]) -> dict[int, TrajectoryReference]:
    """Arrival number n lies in store n % 3 under a number of its own."""
    keys = {number: Key(number % STORES, 100 + number) for number in trajectories}
    return {number: TrajectoryReference.of(one, keys[number]) for number, one in trajectories.items()}


def fetched(part: WindowPart, trajectories: Mapping[int, Trajectory]) -> dict[int, Piece]:
    """What the stores of ``references`` give, through their buffers."""
    found = {}
    for wanted in part.wanted():
        asked = [trajectories[number - 100] for number in wanted.numbers.tolist()]
        spans = np.stack([wanted.begins, wanted.ends], axis=1)
        found.update(wanted.matched(decode_pieces(encode_pieces(asked, spans))))
    return found


def part_and_pieces(
    plan: PlannedMicrobatch, trajectories: Mapping[int, Trajectory], window: Window
) -> tuple[WindowPart, dict[int, Piece]]:
    sent = part_of(plan, references(trajectories), window)
    part = read_part(sent.plan, sent.digests, window)
    return part, fetched(part, trajectories)


def windows_between(rows: Sequence[int], tokens: Sequence[int]) -> list[Window]:
    """Cut at these, first and last are the micro-batch's own ends; row of windows by row of windows."""
    return [Window(*row, *token) for row in pairwise(rows) for token in pairwise(tokens)]


def filled_window(
    plan: PlannedMicrobatch,
    trajectories: Mapping[int, Trajectory],
    window: Window,
    layout: Mapping[str, Any],
    shift: int = 0,
) -> Views:
    """The window's arrays, filled in garbage with garbage around it, of which nothing was touched."""
    slot = np.full(microbatch_layout(window.rows, window.tokens, **layout).nbytes + 128, GARBAGE, np.uint8)
    views = microbatch_layout(window.rows, window.tokens, **layout).views(slot, 64 + shift)
    part, pieces = part_and_pieces(plan, trajectories, window)
    real = fill_window(part, pieces, views)
    assert real == int((views["segment_ids"] > 0).sum())
    found = {name: view.copy() for name, view in views.items()}
    for view in views.values():
        view.view(np.uint8)[:] = GARBAGE
    assert (slot == GARBAGE).all(), "bytes outside the fields were written"
    return found


def put_together(parts: Sequence[Views], across: int) -> Views:
    """Windows, row of windows by row of windows, `across` in each: every field along its first two axes."""
    rows = [parts[at : at + across] for at in range(0, len(parts), across)]
    return {
        name: np.concatenate([np.concatenate([one[name] for one in row], axis=1) for row in rows], axis=0)
        for name in parts[0]
    }

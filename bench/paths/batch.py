"""The micro-batch that every path carries: real trajectories, planned and filled natively."""

from __future__ import annotations

import numpy as np

from paths.ends import Arrays, span_nbytes
from paths.proof import Expected, number
from shmstage import _native
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.layout import Layout
from shmstage.packing.fields import microbatch_layout, optional_fields
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.testing.simulated_input import InputSettings, SimulatedSource

#: layers, top-k and experts of the routing: the reference's, and few where a token of that would be the whole payload
_ROUTING, _SMALL_ROUTING = (60, 10, 512), (4, 2, 16)
_SMALL_NBYTES = 100_000
_MOST_ROWS = 64
_WORDS = 6  # per-token fields of four bytes
#: distinct trajectories are made up to here, far more than any cache holds; rows beyond repeat them
_DISTINCT_NBYTES = 512 << 20


def input_settings(nbytes: int) -> InputSettings:
    """``[rows, tokens]`` of about this many bytes, rows full."""
    layers, top_k, experts = _SMALL_ROUTING if nbytes < _SMALL_NBYTES else _ROUTING
    places = max(1, round(nbytes / (4 * _WORDS + 2 * layers * top_k)))
    rows = min(_MOST_ROWS, max(1, places // 12))
    return InputSettings(
        rows, max(1, round(places / rows)), microbatches=1, layers=layers, top_k=top_k, experts=experts
    )


class Batch:
    """Trajectories in the orchestrator, and one warm private buffer that holds them packed."""

    def __init__(self, nbytes: int) -> None:
        self.settings = settings = input_settings(nbytes)
        row_nbytes = nbytes // settings.rows
        distinct = min(settings.rows, max(1, _DISTINCT_NBYTES // max(1, row_nbytes)))
        source = SimulatedSource(
            InputSettings(
                distinct, settings.tokens, microbatches=1, layers=settings.layers, top_k=settings.top_k,
                experts=settings.experts,
            )
        )  # fmt: skip
        made = [trajectory for group in source.groups(0) for trajectory in group.trajectories]
        self._trajectories = {row: made[row % distinct] for row in range(settings.rows)}
        self.layout: Layout = microbatch_layout(
            settings.rows, settings.tokens, optional=optional_fields(made[0]), layers=settings.layers,
            top_k=settings.top_k,
        )  # fmt: skip
        self.nbytes = self.layout.payload_nbytes
        self.private = aligned_buffer(span_nbytes(self.layout))
        self.packed: Arrays = self.layout.views(self.private, 0)
        self.fill(self.packed)
        self.expected = Expected(self.packed)
        self.serial = 0

    def fill(self, views: Arrays) -> None:
        """Trajectories → packed arrays: planned, and filled natively; what every path is given."""
        planner = Planner(PlanSettings(rows=self.settings.rows, tokens=self.settings.tokens))
        for arrival, trajectory in self._trajectories.items():
            planner.add(arrival, trajectory.length)
        (plan,) = planner.flush()
        fill_microbatch(plan, self._trajectories, views)

    def copy_into(self, views: Arrays) -> None:
        """The packed arrays, where what is timed begins with them in place."""
        for name, view in views.items():
            _native.copy_into(np.asarray(view), self.packed[name])

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def mark(self, views: Arrays) -> None:
        """Writes the serial number: one word."""
        number(views, self.serial)

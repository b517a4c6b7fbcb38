"""The rig's input, packed natively into memory that somebody else provides."""

from __future__ import annotations

import time
from itertools import cycle
from typing import Any

import numpy as np

from shmstage.packing.fields import microbatch_layout, optional_fields
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import Planner, PlanSettings
from shmstage.testing.simulated_input import InputSettings, SimulatedSource


class PackedInput:
    """Micro-batches in order, again and again."""

    def __init__(self, settings: InputSettings) -> None:
        groups = list(SimulatedSource(settings).groups(0))
        planner = Planner(PlanSettings(rows=settings.rows, tokens=settings.tokens))
        self._trajectories = dict(enumerate(t for group in groups for t in group.trajectories))
        plans = []
        for number, trajectory in self._trajectories.items():
            planner.add(number, trajectory.length)
            if (number + 1) % settings.rows == 0:
                plans += planner.close_window()
        first = self._trajectories[0]
        self.layout = microbatch_layout(
            settings.rows, settings.tokens, optional=optional_fields(first), layers=settings.layers,
            top_k=settings.top_k,
        )  # fmt: skip
        self._next = cycle(plans)
        #: seconds each took
        self.pack_s: list[float] = []

    def pack_into(self, buffer: np.ndarray[Any, Any]) -> None:
        began = time.monotonic()
        fill_microbatch(next(self._next), self._trajectories, self.layout.views(buffer, 0))
        self.pack_s.append(time.monotonic() - began)

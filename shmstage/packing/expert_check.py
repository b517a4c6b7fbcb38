"""Whether a trajectory's expert ids fit the number of experts that a run encodes for; asked once, on arrival."""

from __future__ import annotations

import numpy as np

from shmstage.errors import TrajectoryError
from shmstage.packing.trajectory import Trajectory


def check_experts(trajectory: Trajectory, experts: int) -> None:
    """Raises ``TrajectoryError`` for an id of ``experts`` or above; ``experts`` 0: not known, anything goes."""
    routing = trajectory.routing
    # ids below the trajectory's own number were checked when it was made
    if not experts or routing is None or 0 < trajectory.experts <= experts or 0 in routing.shape:
        return
    largest = int(np.asarray(routing).max())
    if largest >= experts:
        raise TrajectoryError(
            f"trajectory {trajectory.trajectory_id!r}: routing wants expert ids below experts = {experts}, got "
            f"{largest}; set experts to the number of experts that the sampler chose from"
        )

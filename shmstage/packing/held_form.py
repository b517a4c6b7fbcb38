"""In which form trajectories wait: checked and encoded once, when they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shmstage.packing.expert_check import check_experts
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.routing import id_bits
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.settings import RoutingEncoding


@final
@dataclass(frozen=True, slots=True)
class HeldForm:
    """The form for slots of `encoding`; `experts`: no id may be as large, 0: not known.

    `ragged` leaves routing as it came: a trajectory alone has no padding.
    """

    encoding: RoutingEncoding = "dense"
    experts: int = 0

    def of(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory in this form, with the same digest. Raises ``TrajectoryError`` as ``check_experts``."""
        routing = trajectory.routing
        # as a bundle has it from the second pass on, checked when it was packed; not what was packed for more experts
        if isinstance(routing, HeldRouting) and routing.bits == self._bits and trajectory.experts <= self.experts:
            return trajectory
        check_experts(trajectory, self.experts)
        if self.encoding != "ragged_packed" or routing is None or not self.experts:
            return trajectory
        return trajectory.with_held_routing(self._bits)

    @property
    def _bits(self) -> int:
        return id_bits(self.experts) if self.experts else 0

    def of_group(self, group: Group) -> Group:
        """The group with every trajectory in this form."""
        return Group(group.group_id, group.batch_index, tuple(map(self.of, group.trajectories)))

"""What an orchestrator knows of a trajectory that lies somewhere else: enough to plan it, count it and name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, final


class Shaped(Protocol):
    """Routing as far as a layout needs it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Carrier(Protocol):
    """Which arrays somebody carries: `Trajectory`, `TrajectoryReference` and `Piece` say it."""

    @property
    def trajectory_id(self) -> str: ...
    @property
    def optional(self) -> frozenset[str]: ...
    @property
    def experts(self) -> int: ...
    @property
    def routing(self) -> Shaped | None: ...


class Described(Carrier, Protocol):
    """What planning, digests and books need of a trajectory: `Trajectory` has it, and `TrajectoryReference`."""

    @property
    def group_id(self) -> str: ...
    @property
    def batch_index(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def loss_tokens(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


class Key(NamedTuple):
    """Where a trajectory lies: `number` in the books of store `store`, never used twice."""

    store: int
    number: int


class RoutingShape(NamedTuple):
    """Stands where a trajectory has its routing `[tokens, layers, top_k]`."""

    shape: tuple[int, int, int]


@final
@dataclass(frozen=True, slots=True)
class TrajectoryReference:
    """A trajectory without its arrays. `nbytes`: of the arrays as the store holds them, encoded."""

    key: Key
    trajectory_id: str
    group_id: str
    batch_index: int
    policy_version: int
    length: int
    nbytes: int
    loss_tokens: int
    digest: bytes
    optional: frozenset[str]
    experts: int
    routing: RoutingShape | None

    @classmethod
    def of(cls, trajectory: Described, key: Key) -> TrajectoryReference:
        """The reference to a trajectory that lies under `key`."""
        routing = None
        if trajectory.routing is not None:
            tokens, layers, top_k = trajectory.routing.shape
            routing = RoutingShape((tokens, layers, top_k))
        return cls(
            key=key, trajectory_id=trajectory.trajectory_id, group_id=trajectory.group_id,
            batch_index=trajectory.batch_index, policy_version=trajectory.policy_version, length=trajectory.length,
            nbytes=trajectory.nbytes, loss_tokens=trajectory.loss_tokens, digest=trajectory.digest,
            optional=trajectory.optional, experts=trajectory.experts, routing=routing,
        )  # fmt: skip

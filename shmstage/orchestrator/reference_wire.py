"""How a store tells what it holds: groups of references, read from plain lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, final

from shmstage.errors import ProtocolError, shown
from shmstage.packing.fields import OPTIONAL_FIELDS
from shmstage.packing.reference import Key, RoutingShape, TrajectoryReference
from shmstage.packing.trajectory import MAX_ID_CHARACTERS, MAX_INTEGER
from shmstage.wire.handles import DIGEST_NBYTES

_GROUP = "[group_number, group_id, batch_index, trajectories]"
_TRAJECTORY = (
    "[number, trajectory_id, policy_version, length, nbytes, loss_tokens, digest, optional, experts, routing shape]"
)


@final
@dataclass(frozen=True, slots=True)
class ReferenceGroup:
    """The trajectories of one prompt, as one store knows them; ``number``: of the group, in its pass."""

    number: int
    group_id: str
    batch_index: int
    trajectories: tuple[TrajectoryReference, ...]


def groups_from_wire(value: object, store: int, where: str) -> list[ReferenceGroup]:
    """Raises ``ProtocolError`` naming ``where`` for anything but what Seam 5's ``read`` answers."""
    if type(value) is not list:
        _refuse(where, "groups", "a list", value)
    return [_group(each, store, where) for each in value]


def group_from_wire(value: object, store: int, where: str) -> ReferenceGroup:
    """One of them."""
    return _group(value, store, where)


def _group(value: object, store: int, where: str) -> ReferenceGroup:
    if type(value) is not list or len(value) != 4 or type(value[3]) is not list:
        _refuse(where, "a group", _GROUP, value)
    number, group_id, batch_index, trajectories = value
    if not (_is_count(number) and _is_id(group_id) and _is_count(batch_index)):
        _refuse(where, "a group", _GROUP, value[:3])
    found = tuple(_reference(each, group_id, batch_index, store, where) for each in trajectories)
    return ReferenceGroup(number, group_id, batch_index, found)


def _reference(value: object, group_id: str, batch_index: int, store: int, where: str) -> TrajectoryReference:
    if type(value) is not list or len(value) != 10:
        _refuse(where, "a trajectory", _TRAJECTORY, value)
    number, identity, version, length, nbytes, loss_tokens, digest, optional, experts, shape = value
    counts = (number, version, length, nbytes, loss_tokens, experts)
    good = all(map(_is_count, counts)) and loss_tokens <= length and _is_id(identity)
    good = good and type(digest) is bytes and len(digest) == DIGEST_NBYTES
    good = good and type(optional) is list and all(type(name) is str and name in OPTIONAL_FIELDS for name in optional)
    good = good and type(shape) is list and len(shape) in (0, 3) and all(map(_is_count, shape))
    if not good or bool(shape) != ("routing" in optional):
        _refuse(where, "a trajectory", _TRAJECTORY, value)
    return TrajectoryReference(
        key=Key(store, number), trajectory_id=identity, group_id=group_id, batch_index=batch_index,
        policy_version=version, length=length, nbytes=nbytes, loss_tokens=loss_tokens, digest=digest,
        optional=frozenset(optional), experts=experts, routing=RoutingShape(tuple(shape)) if shape else None,
    )  # fmt: skip


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INTEGER


def _is_id(value: Any) -> bool:
    # ids go into error lines, tables and file names of reports
    return type(value) is str and 0 < len(value) <= MAX_ID_CHARACTERS and value.isprintable()


def _refuse(where: str, what: str, want: str, got: object) -> NoReturn:
    raise ProtocolError(f"{where}: {what} wants {want}, got {shown(got, 300)}")

"""``make_source``: the recorded bundle as a source of groups. Imports no jax: the orchestrator uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from shmstage.errors import SettingsError
from shmstage.packing.fields import TOKEN_FIELDS
from shmstage.packing.source import BundleSource, Group, Source
from shmstage.packing.trajectory import MAX_EXPERTS, Trajectory

ROUTING_SETTINGS = ("routing_layers", "routing_top_k", "routing_experts")
MAX_LAYERS = 1 << 10
#: every so many-th choice is not known
UNSET_EVERY = 7


def recorded_bundle() -> Path:
    """Directory of the bundle that ships with the package."""
    # The package is never run from an archive: it holds a compiled extension.
    return Path(str(resources.files("shmstage.demo") / "bundle"))


def make_source(settings: Mapping[str, object]) -> Source:
    """The factory behind ``source = "shmstage.demo.source:make_source"``.

    Settings: ``bundle``, the directory of another bundle; ``routing_layers``, ``routing_top_k`` and
    ``routing_experts``, all three or none: trajectories carry routing of that shape, made up, always the same. Raises
    ``SettingsError``, ``BundleError``.
    """
    for name in settings:
        if name not in ("bundle", *ROUTING_SETTINGS):
            raise SettingsError(
                f"unknown source setting {name} = {settings[name]!r}; the demo's source knows bundle, "
                f"{', '.join(ROUTING_SETTINGS)}"
            )
    given = settings.get("bundle")
    if given is not None and (not isinstance(given, str) or not given):
        raise SettingsError(f"source setting bundle = {given!r}: must be the directory of a bundle")
    routing = _routing(settings)
    source = BundleSource(given if isinstance(given, str) else recorded_bundle())
    return RoutedSource(source, *routing) if routing is not None else source


def _routing(settings: Mapping[str, object]) -> tuple[int, int, int] | None:
    if not any(name in settings for name in ROUTING_SETTINGS):
        return None
    most = dict(zip(ROUTING_SETTINGS, (MAX_LAYERS, MAX_EXPERTS, MAX_EXPERTS), strict=True))
    found = []
    for name in ROUTING_SETTINGS:
        value = settings.get(name)
        if type(value) is not int or not 1 <= value <= most[name]:
            raise SettingsError(
                f"source setting {name} = {value!r}: must be an integer from 1 to {most[name]}; routing has all of "
                f"{', '.join(ROUTING_SETTINGS)}"
            )
        found.append(value)
    layers, top_k, experts = found
    if top_k > experts:
        raise SettingsError(f"source setting routing_top_k = {top_k} of routing_experts = {experts}: too many")
    return layers, top_k, experts


@final
class RoutedSource:
    """Another source's groups with routing made up for each trajectory from its digest: the same in any process."""

    def __init__(self, source: Source, layers: int, top_k: int, experts: int) -> None:
        self.replayable = source.replayable
        self._source = source
        self._shape = layers, top_k, experts

    def groups(self, cursor: int) -> Iterator[Group]:
        """As the source's ``groups``."""
        for group in self._source.groups(cursor):
            routed = tuple(with_routing(trajectory, *self._shape) for trajectory in group.trajectories)
            yield Group(group.group_id, group.batch_index, routed)


def with_routing(trajectory: Trajectory, layers: int, top_k: int, experts: int) -> Trajectory:
    """The trajectory with ``n - 1`` rows of routing, a few choices of them unset."""
    noise = np.random.default_rng(list(trajectory.digest))
    count = max(trajectory.length - 1, 0)
    routing = np.empty((count, layers, top_k), np.int16)
    for token in range(count):  # not all at once: hundreds of experts for each of many tokens are many bytes
        routing[token] = np.argsort(noise.random((layers, experts)), axis=-1)[:, :top_k]
    routing[noise.integers(0, UNSET_EVERY, (count, layers)) == 0] = -1
    fields: dict[str, npt.NDArray[np.generic]] = {
        field.source: getattr(trajectory, field.source)
        for field in TOKEN_FIELDS
        if getattr(trajectory, field.source) is not None
    }
    return Trajectory(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        batch_index=trajectory.batch_index,
        policy_version=trajectory.policy_version,
        experts=experts,
        **{**fields, "routing": routing},  # type: ignore[arg-type]
    )

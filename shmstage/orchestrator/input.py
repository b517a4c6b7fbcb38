"""Where trajectories come from: a bundle on disk or a source of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import cast, final

from shmstage.errors import SettingsError, TrajectoryError
from shmstage.packing.source import BundleSource, Source
from shmstage.packing.trajectory import Group, Trajectory
from shmstage.plugins import make
from shmstage.settings import Settings


@final
class Input:
    """A source whose first trajectory is known before anything is planned; nothing read for that is lost.

    ``passes`` is how often it is run over: a source that cannot be replayed is run over once.
    """

    def __init__(self, source: Source, settings: Settings) -> None:
        """Raises ``TrajectoryError`` for an empty input, ``SettingsError`` for what a live source cannot do."""
        self.replayable = bool(getattr(source, "replayable", False))
        if not self.replayable and settings.resume:
            raise SettingsError("resume = true: the source cannot be replayed, so what it gave before is gone")
        if not self.replayable and (settings.passes or 1) > 1:
            raise SettingsError(f"passes = {settings.passes}: the source cannot be replayed; use passes = 1")
        self.passes = settings.passes if self.replayable else 1
        self._source = source
        self._begun: Iterator[Group] | None = source.groups(0)
        self._read: list[Group] = []
        self.first = self._first_trajectory()

    def groups(self, cursor: int) -> Iterator[Group]:
        """Groups from ``cursor`` on; the first call goes on with what was begun to look at the first trajectory."""
        if cursor == 0 and self._begun is not None:
            groups, self._begun = chain(self._read, self._begun), None
            return groups
        return self._source.groups(cursor)

    def _first_trajectory(self) -> Trajectory:
        assert self._begun is not None
        for group in self._begun:
            self._read.append(group)
            if group.trajectories:
                return group.trajectories[0]
        raise TrajectoryError("the input holds no trajectory; check the bundle or the source")


def load_input(settings: Settings) -> Input:
    """The input that the settings name. Raises ``BundleError``, ``PluginError``, or the factory's own."""
    if settings.bundle is not None:
        return Input(BundleSource(settings.bundle), settings)
    source = make("source", settings.source, settings.source_settings, needs=("groups",))
    return Input(cast(Source, source), settings)

"""Where trajectories come from: a bundle on disk or a source of the user's."""

from __future__ import annotations

from typing import cast

from shmstage.packing.source import BundleSource, Source
from shmstage.plugins import make
from shmstage.settings import Settings


def load_source(settings: Settings) -> Source:
    """The source that the settings name. Raises ``BundleError``, ``PluginError``, or the factory's own."""
    if settings.bundle is not None:
        return BundleSource(settings.bundle)
    return cast(Source, make("source", settings.source, settings.source_settings, needs=("groups",)))

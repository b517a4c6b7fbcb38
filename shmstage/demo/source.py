"""``make_source``: the recorded bundle as a source of groups. Imports no jax: the orchestrator uses it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from shmstage.errors import SettingsError
from shmstage.packing.source import BundleSource


def recorded_bundle() -> Path:
    """Directory of the bundle that ships with the package."""
    # The package is never run from an archive: it holds a compiled extension.
    return Path(str(resources.files("shmstage.demo") / "bundle"))


def make_source(settings: Mapping[str, object]) -> BundleSource:
    """The factory behind ``source = "shmstage.demo.source:make_source"``.

    One setting: ``bundle``, the directory of another bundle. Raises ``SettingsError``, ``BundleError``.
    """
    for name, value in settings.items():
        if name != "bundle":
            raise SettingsError(
                f"unknown source setting {name} = {value!r}; the demo's source knows only bundle"
            )
        if not isinstance(value, str) or not value:
            raise SettingsError(f"source setting bundle = {value!r}: must be the directory of a bundle")
    given = settings.get("bundle")
    return BundleSource(given if isinstance(given, str) else recorded_bundle())

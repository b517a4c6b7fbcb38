"""Sources named by the user as ``module:factory``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from shmstage.errors import PluginError, ShmstageError
from shmstage.packing.source import BundleSource, Source
from shmstage.settings import Settings


def load_source(settings: Settings) -> Source:
    """The source that the settings name. Raises ``PluginError``, or what the factory raises of ours."""
    if settings.bundle is not None:
        return BundleSource(settings.bundle)
    factory = _factory(settings.source, "source")
    try:
        source = factory(settings.source_settings)
    except ShmstageError:
        raise
    except Exception as error:
        raise PluginError(f"source = {settings.source!r}: the factory raised {type(error).__name__}: {error}") from error
    if not callable(getattr(source, "groups", None)):
        raise PluginError(
            f"source = {settings.source!r}: the factory returned a {type(source).__name__} without groups(cursor)"
        )
    return source  # type: ignore[no-any-return]


def _factory(spec: str, setting: str) -> Callable[..., Any]:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise PluginError(f"{setting} = {spec!r}: expected module:factory, for example my_package.data:make_source")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), name)  # type: ignore[no-any-return]
    except ImportError as error:
        raise PluginError(f"{setting} = {spec!r}: cannot import {module_name}: {error}; is it installed?") from None
    except AttributeError:
        raise PluginError(f"{setting} = {spec!r}: module {module_name} has no {name}") from None

"""Plug-ins named ``module:factory``: import one, call it, and say clearly what is wrong with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from shmstage.errors import MissingExtraError, PluginError, ShmstageError, named

#: top-level package → the extra of ours that installs it
EXTRAS = {"optax": "train", "orbax": "train", "ray": "ray", "pyarrow": "parquet", "prometheus_client": "metrics"}
#: most functions that an error names
MAX_NAMED = 8


def make(setting: str, name: str, settings: Mapping[str, Any], *, needs: Sequence[str]) -> Any:
    """Call the factory that ``name`` (``module:factory``) points at with ``settings`` and return what it makes.

    The working directory is importable. ``setting`` names the setting in errors; ``needs`` are the methods the result
    must have. Raises ``PluginError``, or ``MissingExtraError`` when an optional dependency of ours is missing; a
    factory's own ``ShmstageError`` passes unchanged.
    """
    factory = _find(setting, name)
    try:
        made = factory(settings)
    except ShmstageError:
        raise
    except ModuleNotFoundError as error:
        raise _missing(setting, name, error) from error
    except Exception as error:
        raise PluginError(
            f"{setting} {name} raised {type(error).__name__}: {error}; called with settings {sorted(settings)}"
        ) from error
    missing = [method for method in needs if not callable(getattr(made, method, None))]
    if missing:
        raise PluginError(f"{setting} {name} returned {type(made).__name__}, which has no {', '.join(missing)}")
    return made


def _find(setting: str, name: str) -> Callable[[Mapping[str, Any]], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{setting} {name!r} is not of the form module:factory, for example my_package.rl:make")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing(setting, name, error) from error
    except Exception as error:
        raise PluginError(
            f"{setting} {name}: importing {module_name} raised {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise PluginError(f"{setting} {name}: {module_name} has no {attribute!r}; {_functions_of(module)}")
    factory = getattr(module, attribute)
    if not callable(factory):
        kind = type(factory).__name__
        raise PluginError(f"{setting} {name}: {module_name}.{attribute} is a {kind}, not a function of the settings")
    return factory  # type: ignore[no-any-return]


def _functions_of(module: ModuleType) -> str:
    """The public functions and classes of the module's own package, for an error's text."""
    package = module.__name__.partition(".")[0]
    names = [
        name for name, value in vars(module).items()
        if isinstance(value, FunctionType | type) and not name.startswith("_")
        and str(value.__module__).partition(".")[0] == package
    ]  # fmt: skip
    if not names:
        return "there is no function there"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"functions there: {', '.join(named(name, 40) for name in names[:MAX_NAMED])}{more}"


def _missing(setting: str, name: str, error: ModuleNotFoundError) -> ShmstageError:
    root = (error.name or "").partition(".")[0]
    if root in EXTRAS:
        return MissingExtraError(f"{setting} {name} needs {root}; pip install 'shmstage[{EXTRAS[root]}]'")
    return PluginError(
        f"{setting} {name}: no module named {error.name!r}; it is looked for in {Path.cwd()} and sys.path"
    )

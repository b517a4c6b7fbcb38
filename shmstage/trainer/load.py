"""``engine = "module:factory"``: import a plug-in and say clearly what is wrong with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from shmstage.errors import MissingExtraError, PluginError, ShmstageError
from shmstage.trainer.engine import TrainEngine

REQUIRED = ("shardings", "fwd_bwd", "update", "metrics", "save", "restore", "weights")
EXTRAS = {"optax": "train", "orbax": "train"}


def load_engine(name: str, settings: Mapping[str, Any], checkpoint_dir: Path | str | None = None) -> TrainEngine:
    """Call the factory that ``name`` (``module:factory``) points at with ``settings``.

    The factory gets ``checkpoint_dir`` (a string or ``None``) among them unless they name one. The working directory
    is importable. Raises ``PluginError`` naming what is missing, ``MissingExtraError`` when an optional dependency of
    ours is; a factory's own ``ShmstageError`` passes unchanged.
    """
    factory = _factory(name)
    directory = None if checkpoint_dir is None else str(checkpoint_dir)
    try:
        engine = factory({"checkpoint_dir": directory, **settings})
    except ShmstageError:
        raise
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    except Exception as error:
        raise PluginError(
            f"engine {name} raised {type(error).__name__}: {error}; called with settings {sorted(settings)}"
        ) from error
    missing = [method for method in REQUIRED if not callable(getattr(engine, method, None))]
    if missing:
        raise PluginError(
            f"engine {name} returned {type(engine).__name__}, which has no {', '.join(missing)}; "
            "see shmstage.trainer.engine.TrainEngine"
        )
    return cast(TrainEngine, engine)


def _factory(name: str) -> Callable[[Mapping[str, Any]], object]:
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise PluginError(f"engine {name!r} is not of the form module:factory")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    except Exception as error:
        raise PluginError(f"engine {name}: importing {module_name} raised {type(error).__name__}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = "nothing" if factory is None else f"a {type(factory).__name__}"
        raise PluginError(f"engine {name}: {module_name}.{attribute} is {found}, not a function of the settings")
    return cast("Callable[[Mapping[str, Any]], object]", factory)


def _missing(name: str, error: ModuleNotFoundError) -> ShmstageError:
    root = (error.name or "").partition(".")[0]
    if root in EXTRAS:
        return MissingExtraError(f"engine {name} needs {root}; pip install 'shmstage[{EXTRAS[root]}]'")
    return PluginError(f"engine {name}: no module named {error.name!r}; it is looked for in {Path.cwd()} and sys.path")

"""Plug-ins that cannot be used, each in its own way; named by string in ``test_load.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmstage.errors import BudgetError

not_callable = 7


def raises(settings: Mapping[str, Any]) -> object:
    raise KeyError("width")


def refuses(settings: Mapping[str, Any]) -> object:
    raise BudgetError("2 towers need 9 GB; 8 are left; use width = 100")


def returns_little(settings: Mapping[str, Any]) -> object:
    class HalfAnEngine:
        def fwd_bwd(self, batch: Any) -> None: ...

    return HalfAnEngine()


def lacks_optax(settings: Mapping[str, Any]) -> object:
    raise ModuleNotFoundError("No module named 'optax.contrib'", name="optax.contrib")

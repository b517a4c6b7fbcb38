"""The micro-batch that the golden figures are of, and bounds to hold it against."""

from __future__ import annotations

from typing import Any

from shmstage.budget.fields import MicrobatchFields, words
from shmstage.budget.formula import Inputs
from shmstage.budget.verdict import Bound

ROUTED = MicrobatchFields(optional=words(7)[0], layers=60, top_k=10, experts=512)
GOLDEN: dict[str, Any] = {"rows": 64, "tokens": 65536}


def given(nbytes: int) -> list[Bound]:
    return [Bound("the limit given", "given", nbytes)]


def small(**changes: Any) -> Inputs:
    return Inputs(**{"rows": 4, "tokens": 256, **changes})

"""The oracle is frozen: whoever changes the reference loop changes what every mode is measured against."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shmstage.testing import reference_loop as module
from shmstage.testing.reference_loop import reference_loop

SHA256 = "9c624ef91edc071082660bcfb6cab398a8c379f922599741cacc11fda4075cc3"


def test_the_reference_loop_is_the_frozen_one() -> None:
    assert module.__file__ is not None
    assert hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() == SHA256


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def fwd_bwd(self, batch: Mapping[str, Any]) -> None:
        self.calls.append(f"fwd_bwd {batch['name']}")

    def update(self) -> None:
        self.calls.append("update")

    def metrics(self) -> dict[str, Any]:
        return {"loss": len(self.calls)}


def test_one_update_closes_each_step_a_short_one_too() -> None:
    engine, seen = Recorder(), []
    steps = [(1, [{"name": "a"}, {"name": "b"}]), (2, [{"name": "c"}])]
    reference_loop(engine, steps, dict, lambda number, metrics: seen.append((number, metrics["loss"])))
    assert engine.calls == ["fwd_bwd a", "fwd_bwd b", "update", "fwd_bwd c", "update"]
    assert seen == [(1, 3), (2, 5)]

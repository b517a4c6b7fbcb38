"""Evaluation micro-batches: packed from a bundle of their own into aux slots, which training never takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from shmstage.errors import StoppedError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.arrivals import Groups
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.packer import Packer
from shmstage.packing.held_form import HeldForm
from shmstage.packing.plan import PlanSettings


@final
class Evaluator:
    """Packs the same micro-batches each time it is asked; one aux slot is enough, more of them overlap better."""

    def __init__(
        self,
        source: Groups,
        plan: PlanSettings,
        packer: Packer,
        *,
        stop: Callable[[], bool] = lambda: False,
        form: HeldForm | None = None,
    ) -> None:
        """``packer`` is one for aux slots."""
        self._source = source
        self._plan = plan
        self._packer = packer
        self._stop = stop
        self._form = form

    def handles(self, step: int) -> Iterator[Handle]:
        """Handles of published aux slots, one by one; the next is packed when a slot is free again."""
        for index, planned in enumerate(Intake(self._source, self._plan, passes=1, form=self._form)):
            try:
                filled = self._packer.pack(planned, step=step, index=index, is_final=False, stop=self._stop)
            except StoppedError:
                return  # a part of an evaluation is of no use, and there is a step to be saved
            yield filled.handle


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of all micro-batches: sums, and every sum divided by the summed denominator where there is one."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    denominator = totals.get("denominator", 0.0)
    if not denominator:
        return totals
    means = {name.removesuffix("_sum"): value / denominator for name, value in totals.items() if name != "denominator"}
    return {**means, "denominator": denominator}

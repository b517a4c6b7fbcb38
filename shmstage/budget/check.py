"""The budget as a gate: a run that cannot fit ends before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.search import suggestions
from shmstage.budget.sizes import in_words
from shmstage.budget.verdict import Bound, bounds_of_machine, judge
from shmstage.errors import BudgetError, LayoutError
from shmstage.memory.reservation import REMEDY


def check_run(inputs: Inputs, bounds: Sequence[Bound] | None = None) -> None:
    """Raises ``BudgetError`` naming value, binding limit and remedy if the run does not fit into ``bounds``.

    ``None``: those of this machine, read now, which may raise ``LimitUnreadableError``.
    """
    known = bounds_of_machine() if bounds is None else bounds
    count = f"slots = {inputs.slots} + aux_slots = {inputs.aux_slots}"
    shape = f"{count} of rows = {inputs.rows} x tokens = {inputs.tokens}"
    try:
        found = forecast(inputs)
    except LayoutError as error:
        raise BudgetError(f"{shape}: {error}; {REMEDY}") from None
    judgement = judge(found, known)
    if judgement.verdict != "does not fit":
        return
    binding = judgement.binding
    helps = [each.text for each in suggestions(inputs, known)]
    raise BudgetError(
        f"{shape} take {in_words(found.slot_nbytes)} each, in all {in_words(binding.need_nbytes)} of "
        f"{' and '.join(binding.bound.scopes)} memory; {binding.bound.name} leaves "
        f"{in_words(binding.bound.available_nbytes)}; use {' or '.join(helps[:2]) if helps else _ELSE}; "
        "`shmstage budget` shows all of it"
    )


_ELSE = "fewer slots, or fewer rows or tokens per micro-batch"

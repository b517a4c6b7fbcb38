"""The budget as a gate: a run that cannot fit ends before anything is allocated.

Asked twice: by the launcher, before it starts a process, with what is certain by then, and by the orchestrator, before
it makes the pool, with the exact layout.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from shmstage.budget.bundle_facts import BundleFacts, bundle_facts
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs, forecast
from shmstage.budget.inputs import fields_of_bundle, fields_of_trajectory, inputs_of, lower_bound
from shmstage.budget.platform import platform_here
from shmstage.budget.search import suggestions
from shmstage.budget.sizes import in_words
from shmstage.budget.verdict import Bound, bounds_of_machine, judge
from shmstage.errors import BudgetError, BundleError, LayoutError
from shmstage.memory.reservation import REMEDY
from shmstage.memory.sweep import sweep
from shmstage.packing.fields import late_fields
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings


def check_before_start(settings: Settings) -> None:
    """Raises ``BudgetError`` for a run that needs more than there is, whatever its input turns out to be.

    Exact fields of a bundle, the mandatory ones otherwise. Raises ``LimitUnreadableError`` and ``SettingsError``, too.
    A bundle that cannot be read is not this check's to refuse.
    """
    late = late_fields(settings)
    facts: dict[str, BundleFacts] = {}
    for name in ("bundle", "eval_bundle"):
        path = getattr(settings, name)
        with contextlib.suppress(BundleError):
            if path is not None:
                facts[name] = bundle_facts(path)
    fields = fields_of_bundle(facts["bundle"], settings, late) if "bundle" in facts else MicrobatchFields(late=late)
    evaluation = fields_of_bundle(facts["eval_bundle"], settings) if "eval_bundle" in facts else None
    held, evaluated = (facts[name].nbytes if name in facts else 0 for name in ("bundle", "eval_bundle"))
    inputs = inputs_of(
        settings, fields, evaluation, platform=platform_here(os.environ), held_input_nbytes=held,
        evaluation_nbytes=evaluated, longest=max((each.longest for each in facts.values()), default=0)
        if "bundle" in facts
        else 0,
    )  # fmt: skip
    check_run(lower_bound(inputs))


def check_before_pool(
    settings: Settings, first: Trajectory, evaluated: Trajectory | None, *, restarted: bool
) -> None:
    """Raises ``BudgetError`` if what is still to be allocated does not fit; the input is in memory by now.

    ``first`` and ``evaluated``: one trajectory of each input. ``restarted``: the trainer may have its buffers already.
    """
    fields = fields_of_trajectory(first, settings, late_fields(settings))
    evaluation = fields_of_trajectory(evaluated, settings) if evaluated is not None else None
    inputs = inputs_of(settings, fields, evaluation, platform=platform_here(os.environ))
    check_run(lower_bound(inputs, has_buffers=restarted))


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
        f"{_leftovers() if 'shm' in binding.bound.scopes else ''}`shmstage budget` shows all of it"
    )


def _leftovers() -> str:
    """What the dead left in shared memory counts against every limit on it, and can be had back."""
    nbytes = sum(item.nbytes for item in sweep(dry_run=True))
    return f"`shmstage gc` frees {in_words(nbytes)} that dead processes left; " if nbytes else ""


_ELSE = "fewer slots, or fewer rows or tokens per micro-batch"

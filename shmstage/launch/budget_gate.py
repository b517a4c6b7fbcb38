"""Before a run starts anything: can it fit at all?"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from shmstage.budget.bundle_facts import BundleFacts, bundle_facts
from shmstage.budget.check import check_run
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.inputs import fields_of_bundle, inputs_of, lower_bound
from shmstage.budget.platform import platform_here
from shmstage.errors import BundleError
from shmstage.packing.fields import late_fields
from shmstage.settings import Settings


def check_before_start(settings: Settings) -> None:
    """Raises ``BudgetError`` for a run that needs more than there is, whatever its input turns out to be.

    Exact fields of a bundle, the mandatory ones otherwise; the orchestrator checks again with the exact layout. Raises
    ``LimitUnreadableError`` and ``SettingsError``, too. A bundle that cannot be read is not this check's to refuse.
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
    inputs = lower_bound(inputs_of(settings, fields, evaluation), platform_here(os.environ))
    check_run(replace(inputs, held_input_nbytes=sum(each.nbytes for each in facts.values())))

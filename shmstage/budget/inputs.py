"""From settings, and what is known besides, to the formula's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from shmstage.budget.bundle_facts import BundleFacts
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs, Platform
from shmstage.packing.fields import optional_fields
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings


def fields_of_bundle(facts: BundleFacts, late: Sequence[str] = (), encoding: str = "dense") -> MicrobatchFields:
    """What micro-batches of a bundle carry."""
    return MicrobatchFields(
        optional=facts.optional, layers=facts.layers, top_k=facts.top_k, experts=facts.experts, late=tuple(late),
        encoding=encoding,
    )  # fmt: skip


def fields_of_trajectory(first: Trajectory, late: Sequence[str] = ()) -> MicrobatchFields:
    """What micro-batches of trajectories like this one carry."""
    layers, top_k = (int(n) for n in first.routing.shape[1:]) if first.routing is not None else (0, 0)
    return MicrobatchFields(
        optional=optional_fields(first), layers=layers, top_k=top_k, experts=first.experts, late=tuple(late)
    )


def inputs_of(settings: Settings, fields: MicrobatchFields, evaluation: MicrobatchFields | None = None) -> Inputs:
    """Everything that the settings say; parameters, hosts and the like are left at what costs nothing."""
    return Inputs(
        rows=settings.rows, tokens=settings.tokens, fields=fields, evaluation=evaluation,
        max_real_tokens=settings.max_real_tokens, slots=settings.slots, aux_slots=settings.aux_slots,
        device_buffers=settings.device_buffers, microbatches_per_step=settings.microbatches_per_step,
        steps=settings.step_cap, checkpoint_every=settings.checkpoint_every,
        max_held_nbytes=settings.max_held_bytes, weight_sync=settings.weight_sync != "off",
        reference=settings.reference_logps,
    )  # fmt: skip


def lower_bound(inputs: Inputs, platform: Platform) -> Inputs:
    """Less than this a run never needs: no trajectory held but what is held for certain, no process counted."""
    return replace(inputs, fill=Fraction(0), platform=platform)

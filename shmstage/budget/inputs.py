"""From settings, and what is known besides, to the formula's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from shmstage.budget.bundle_facts import BundleFacts
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs, Platform
from shmstage.packing.fields import optional_fields
from shmstage.packing.routing import experts_for
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings


def fields_of_bundle(facts: BundleFacts, settings: Settings, late: Sequence[str] = ()) -> MicrobatchFields:
    """What micro-batches of a bundle carry. Raises ``SettingsError`` as ``experts_for``."""
    return MicrobatchFields(
        optional=facts.optional, layers=facts.layers, top_k=facts.top_k, late=tuple(late),
        encoding=settings.routing_encoding, experts=_experts(settings, facts.layers, facts.experts, "the bundle"),
    )  # fmt: skip


def fields_of_trajectory(first: Trajectory, settings: Settings, late: Sequence[str] = ()) -> MicrobatchFields:
    """What micro-batches of trajectories like this one carry. Raises ``SettingsError`` as ``experts_for``."""
    layers, top_k = (int(n) for n in first.routing.shape[1:]) if first.routing is not None else (0, 0)
    who = f"trajectory {first.trajectory_id!r}"
    return MicrobatchFields(
        optional=optional_fields(first), layers=layers, top_k=top_k, late=tuple(late),
        encoding=settings.routing_encoding, experts=_experts(settings, layers, first.experts, who),
    )  # fmt: skip


def _experts(settings: Settings, layers: int, said: int, who: str) -> int:
    if not layers:
        return 0
    return experts_for(settings.routing_encoding, asked=settings.experts, said=said, who=who)


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

"""From settings, and what is known besides, to the formula's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from shmstage.budget.bundle_facts import BundleFacts
from shmstage.budget.fields import MicrobatchFields
from shmstage.budget.formula import Inputs
from shmstage.packing.fields import optional_fields
from shmstage.packing.routing import experts_for
from shmstage.packing.trajectory import Trajectory
from shmstage.settings import Settings

#: launcher, orchestrator and a trainer that has imported jax, optax and orbax: measured with the demo, on CPU, rounded
#: up; an accelerator's libraries and pinned memory come on top, and no two drivers take the same
PROCESS_NBYTES = 650_000_000


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


def inputs_of(
    settings: Settings, fields: MicrobatchFields, evaluation: MicrobatchFields | None = None, **beyond: Any
) -> Inputs:
    """Everything that the settings say. ``beyond``: what they do not, by its name in ``Inputs``; what nobody names is
    left at what costs nothing.
    """
    cap = settings.step_cap
    return Inputs(
        rows=settings.rows, tokens=settings.tokens, fields=fields, evaluation=evaluation,
        max_real_tokens=settings.max_real_tokens, slots=settings.slots, aux_slots=settings.aux_slots,
        device_buffers=settings.device_buffers, microbatches_per_step=settings.microbatches_per_step,
        steps=cap, checkpoint_every=settings.checkpoint_every, max_held_nbytes=settings.max_held_bytes,
        weight_sync=settings.weight_sync != "off", reference=settings.reference_logps,
        recompute=settings.recompute_old_logps, pipelined=settings.boundary != "serial",
        stages=settings.boundary.startswith("staged"),
        evaluates=0 < settings.eval_every <= (settings.eval_every if cap is None else cap), **beyond,
    )  # fmt: skip


def lower_bound(inputs: Inputs, *, has_buffers: bool = False) -> Inputs:
    """Less than this a run never needs: no trajectory held but what is held for certain, nothing that may not come.

    ``has_buffers``: the trainer may have its buffers already, so they are not asked for.
    """
    certain = replace(inputs, fill=Fraction(0), stages=False)
    if has_buffers:
        return replace(certain, device_buffers=0, reference=False, recompute=False, evaluates=False)
    return certain

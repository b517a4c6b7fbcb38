"""``python -m shmstage.testing.reference_run``: the reference loop on the same input, without memory or messages.

Packs with the numpy packer and places private copies, so that it shares no hot-path code with what it judges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shmstage.child import Lifeline, run_child
from shmstage.memory.layout import Layout
from shmstage.orchestrator.assembly import plan_settings
from shmstage.orchestrator.importance import sampler_is_weights
from shmstage.orchestrator.input import load_input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.layouts import layout_of
from shmstage.orchestrator.session import write_summary
from shmstage.packing.fields import OLD_LOGPS, REF_LOGPS, SAMPLER_IS_WEIGHTS, late_fields
from shmstage.settings import Settings
from shmstage.testing.engines_placing import place_private_copies
from shmstage.testing.numpy_packer import pack_with_numpy
from shmstage.testing.reference_loop import reference_loop
from shmstage.trainer.digests import param_digest, payload_digest
from shmstage.trainer.load import load_engine


def steps_of(settings: Settings, layout: Layout) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """(number, micro-batches) as the settings bound them; late fields that no trajectory carries are zero."""
    source = load_input(settings)
    number = 1
    microbatches: list[Mapping[str, Any]] = []
    absent = {f.name: np.zeros(f.shape, f.dtype) for f in layout.fields if f.late}
    for planned in Intake(source, plan_settings(settings), passes=source.passes, order=settings.order):
        trajectories: dict[int, Any] = {key: arrival.trajectory for key, arrival in planned.arrivals.items()}
        microbatches.append(absent | pack_with_numpy(planned.plan, trajectories, settings.tokens))
        if len(microbatches) == settings.microbatches_per_step:
            yield number, microbatches
            if number == settings.step_cap:
                return
            number, microbatches = number + 1, []
    if microbatches:
        yield number, microbatches


def run(settings: Settings) -> dict[str, Any]:
    # as the loss sees it, whatever form it takes in a slot
    settings = settings.model_copy(update={"routing_encoding": "dense"})
    engine = load_engine(settings.engine, settings.engine_settings, checkpoint_dir=None)
    layout = layout_of(load_input(settings).first, settings, late=late_fields(settings))
    shardings = engine.shardings(layout)
    initial = param_digest(engine)
    payload_digests: list[list[str]] = [[]]
    losses: list[float] = []
    denominators: list[float] = []

    def place(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        scored = with_scores(engine, arrays, shardings, settings)
        payload_digests[-1].append(payload_digest({field.name: scored[field.name] for field in layout.fields}))
        return place_private_copies(scored, shardings)

    def record(number: int, metrics: Mapping[str, Any]) -> None:
        losses.append(float(np.asarray(metrics["loss"])))
        denominators.append(float(np.asarray(metrics["denominator"])))
        payload_digests.append([])

    reference_loop(engine, steps_of(settings, layout), place, record)
    return {
        "steps": len(losses),
        "losses": losses,
        "denominators": denominators,
        "payload_digests": payload_digests[:-1],
        "initial_param_digest": initial,
        "param_digest": param_digest(engine),
    }


def with_scores(
    engine: Any, arrays: Mapping[str, Any], shardings: Mapping[str, Any], settings: Settings
) -> Mapping[str, Any]:
    """The micro-batch with its late fields, scored under the reference and under the parameters as they are now."""
    if settings.reference_logps:
        placed = place_private_copies(arrays, shardings)
        arrays = {**arrays, REF_LOGPS: np.array(engine.per_token_logps(placed, "reference"))}
    if settings.recompute_old_logps:
        placed = place_private_copies(arrays, shardings)
        recomputed = np.array(engine.per_token_logps(placed, "actor"))
        weights = sampler_is_weights(
            arrays[OLD_LOGPS], recomputed, arrays["completion_mask"], settings.sampler_is_cap
        )
        arrays = {**arrays, OLD_LOGPS: recomputed, SAMPLER_IS_WEIGHTS: weights}
    return arrays


def serve(settings: Settings, lifeline: Lifeline, epoch: int, peers_file: Path | None) -> None:
    lifeline.exit_at_once()  # the loop has no place to stop at
    write_summary(settings, run(settings))


if __name__ == "__main__":
    sys.exit(run_child("testing.reference_run", serve))

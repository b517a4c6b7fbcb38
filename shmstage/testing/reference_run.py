"""``python -m shmstage.testing.reference_run``: the reference loop on the same input, without memory or messages.

Packs with the numpy packer and places private copies, so that it shares no hot-path code with what it judges.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shmstage.child import Lifeline, run_child
from shmstage.orchestrator.input import load_input
from shmstage.orchestrator.intake import Intake
from shmstage.orchestrator.session import layout_of, plan_settings, write_summary
from shmstage.settings import Settings
from shmstage.testing.engines_placing import place_private_copies
from shmstage.testing.numpy_packer import pack_with_numpy
from shmstage.testing.reference_loop import reference_loop
from shmstage.trainer.digests import param_digest, payload_digest
from shmstage.trainer.load import load_engine


def steps_of(settings: Settings, payload_digests: list[list[str]]) -> Iterator[tuple[int, list[Mapping[str, Any]]]]:
    """(number, micro-batches) as the settings bound them; notes the payload digest of each micro-batch."""
    source = load_input(settings)
    layout = layout_of(source.first, settings)
    number = 1
    microbatches: list[Mapping[str, Any]] = []
    payload_digests.append([])
    for planned in Intake(source, plan_settings(settings), passes=source.passes):
        trajectories = {key: arrival.trajectory for key, arrival in planned.arrivals.items()}
        arrays = pack_with_numpy(planned.plan, trajectories, settings.tokens)
        payload_digests[-1].append(payload_digest({field.name: arrays[field.name] for field in layout.fields}))
        microbatches.append(arrays)
        if len(microbatches) == settings.microbatches_per_step:
            yield number, microbatches
            if number == settings.step_cap:
                return
            number, microbatches = number + 1, []
            payload_digests.append([])
    if microbatches:
        yield number, microbatches
    else:
        payload_digests.pop()


def run(settings: Settings) -> dict[str, Any]:
    engine = load_engine(settings.engine, settings.engine_settings, checkpoint_dir=None)
    layout = layout_of(load_input(settings).first, settings)
    shardings = engine.shardings(layout)
    initial = param_digest(engine)
    payload_digests: list[list[str]] = []
    losses: list[float] = []
    denominators: list[float] = []

    def record(number: int, metrics: Mapping[str, Any]) -> None:
        losses.append(float(np.asarray(metrics["loss"])))
        denominators.append(float(np.asarray(metrics["denominator"])))

    steps = steps_of(settings, payload_digests)
    reference_loop(engine, steps, lambda arrays: place_private_copies(arrays, shardings), record)
    return {
        "steps": len(losses),
        "losses": losses,
        "denominators": denominators,
        "payload_digests": payload_digests,
        "initial_param_digest": initial,
        "param_digest": param_digest(engine),
    }


def serve(settings: Settings, lifeline: Lifeline, epoch: int) -> None:
    lifeline.exit_at_once()  # the loop has no place to stop at
    write_summary(settings, run(settings))


if __name__ == "__main__":
    sys.exit(run_child("testing.reference_run", serve))

"""What the model says of 1 to 1,024 hosts: ours beside the reference's one path, the same job and the same engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scale_calibration import SAME_IDLE_S
from scale_device import Boundaries
from scale_inputs import ARMS, CHIPS_PER_HOST, FUNNEL_PAYLOADS, job, reference_of
from scale_ours import OurLoop
from scale_reference import ReferenceLoop

#: ``blocks``: settles on the host, flushes in a step's second call, as the reference's trainer; ``free``: never
ENGINES = {"blocks": True, "free": False}
#: staged before the update: whose load on the orchestrator is told
TOLD = "staged_before_update"


def predict(law: str, engine: str, microbatches: int, hosts: int) -> dict[str, Any]:
    a_job, blocks = job(law, hosts), ENGINES[engine]
    given = reference_of(a_job)
    found: dict[str, Any] = {
        "law": law, "engine": engine, "microbatches_per_step": microbatches, "hosts": hosts,
        "chips": hosts * CHIPS_PER_HOST, "payload_nbytes": a_job.payload_nbytes, "microbatch_s": a_job.microbatch_s,
        "reference": {}, "ours": {},
    }  # fmt: skip
    for order in ARMS.values():
        times = ReferenceLoop(given, order, microbatches, blocks=blocks).run()
        found["reference"][order] = _times(times)
        times, load = OurLoop(a_job, order, microbatches, blocks=blocks).run()
        found["ours"][order] = _times(times)
        if order == TOLD:
            found["load"] = asdict(load)
    # one more payload is held where the next micro-batch is packed ahead: stated, +5.11 GB at 128 chips
    found["reference_load"] = {
        "orchestrator_ram_nbytes": FUNNEL_PAYLOADS * a_job.payload_nbytes,
        "orchestrator_network_nbytes": microbatches * a_job.payload_nbytes,
        "pipelined_adds_nbytes": a_job.payload_nbytes,
    }
    return found


def problems_of(predictions: list[dict[str, Any]]) -> list[str]:
    return [
        f"{p['law']}, {p['engine']}, {p['hosts']} hosts, {side}, {order}: idle by instants {each['idle_off_s']} s off"
        for p in predictions
        for side in ("reference", "ours")
        for order, each in p[side].items()
        if abs(each["idle_off_s"]) > SAME_IDLE_S
    ]


def _times(times: Boundaries) -> dict[str, float]:
    return {
        "idle_s": times.idle_s, "step_s": times.step_s, "instep_idle_s": times.instep_idle_s,
        "idle_off_s": times.idle_s - times.device_idle_s,
    }  # fmt: skip

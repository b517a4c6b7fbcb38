"""What ``scale.py`` is fed: durations with where they are stated, the reference's measured arms, how a job grows.

``STATED`` stands in ``shared/reference/pipelined-step-boundary.txt`` (or the named page) as it is; ``INFERRED`` follows
from figures there, named in ``source``; ``ASSUMED`` is neither. Nothing is fitted to an arm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

STATED, MEASURED, INFERRED, ASSUMED = "stated", "measured", "inferred", "assumed"


def _given(value: float, unit: str, kind: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "kind": kind, "source": source})


class Assumption(NamedTuple):
    name: str
    value: str
    unit: str
    kind: str
    source: str


@dataclass(frozen=True)
class Reference:
    """Durations of the reference's rig: 128 chips, 64 rows of 65,536 tokens a micro-batch."""

    microbatch_s: float = _given(13.38, "s", STATED, "the calibrated micro-batch time (TPU rig)")
    update_s: float = _given(1.5, "s", STATED, "the update's device time (why stage before the update)")
    payload_nbytes: float = _given(5.15e9, "B", STATED, "payload of a micro-batch (TPU rig)")
    arrival_call_s: float = _given(
        7.01, "s", INFERRED, "payload in a train call: idle less idle net of upload, mean of A0, A0', A1 at 2 per step"
    )
    arrival_stage_s: float = _given(
        5.465, "s", INFERRED, "payload in a stage call: idle less idle net of upload, mean of A2, A3 at 2 per step"
    )
    placing_call_s: float = _given(3.85, "s", STATED, "middle of 3.7-4.0 s, unprepared payload in its call (caveat 2)")
    placing_staged_s: float = _given(3.8, "s", STATED, "middle of 3.7-3.9 s after a prepared stage (caveat 2)")
    device_wait_s: float = _given(2.78, "s", STATED, "middle of 2.69-2.87 s, a stage's least wait (caveat 5)")
    bookkeeping_s: float = _given(
        1.36, "s", INFERRED, "bookkeeping and packing: net idle of A0 and A0' (mean) less that of A1, 2 per step"
    )
    readiness_s: float = _given(0.005, "s", STATED, "least of 0.005-0.020 s until a finished array is seen (caveat 1)")
    after_landing_s: float = _given(0.016, "s", STATED, "A3's gap between update landed and F (caveat 3)")


@dataclass(frozen=True)
class Ours:
    """What our side costs; measured on a virtual machine of two cores unless said otherwise."""

    upload_share: float = _given(0.162, "of dense", MEASURED, "ragged_packed, 512 experts (bench/README, pack)")
    fetch_share: float = _given(1 / 7, "of dense", MEASURED, "what a trajectory weighs, encoded and unpadded (issue 7)")
    fetch_rate: float = _given(0.36e9, "B/s", MEASURED, "Ray between nodes, the slow end of 0.36-0.7 (FACTS)")
    fetch_call_s: float = _given(0.0008, "s", MEASURED, "a Ray actor call; one after another, a store each (FACTS)")
    fill_rate: float = _given(1.5e9, "B/s", MEASURED, "5.15 GB packed in 3.4 s, two cores (bench/README, full size)")
    upload_rate: float = _given(1.39e9, "B/s", STATED, "the reference's placing, 5.15 GB in 3.7 s, now per host")
    host_call_s: float = _given(0.00023, "s", MEASURED, "processor of the orchestrator per host and phase: our Client")
    call_rest_s: float = _given(0.00027, "s", MEASURED, "the rest of a call: wire, the other side's threads")
    network_s: float = _given(0.0001, "s", ASSUMED, "round trip between hosts")
    plan_s: float = _given(16.6e-6, "s", MEASURED, "planner per trajectory, 100,000 of them (bench/README, pack)")
    message_nbytes: float = _given(250, "B", MEASURED, "a message of 210 (FACTS) and about 40 of CURVE")
    trajectory_nbytes: float = _given(256, "B", STATED, "reference and plan of a trajectory: the limit of issue 7")
    segment_nbytes: float = _given(112, "B", STATED, "a segment of a plan, told twice, to each further host of its row")
    reference_nbytes: float = _given(889, "B", MEASURED, "a TrajectoryReference in Python")
    process_nbytes: float = _given(55e6, "B", MEASURED, "resident size of an orchestrator that has done nothing")
    held_steps: float = _given(3, "steps", ASSUMED, "training, read ahead, waiting for a durable checkpoint")
    slots: float = _given(3, "", STATED, "the default (DESIGN); one aux slot besides")
    device_buffers: float = _given(2, "", STATED, "the default (DESIGN)")


def assumptions_of(given: Reference | Ours) -> Iterator[Assumption]:
    for each in fields(given):
        told = each.metadata
        yield Assumption(each.name, f"{getattr(given, each.name):.6g}", told["unit"], told["kind"], told["source"])


#: beside the two tables: what the model says of the world
MODEL = (
    Assumption("chips per host", "4", "", ASSUMED, "128 chips are 32 hosts; the reference names chips only"),
    Assumption("trajectories", "128", "per micro-batch", STATED, "256 trajectories are 2 micro-batches (TPU rig)"),
    Assumption("hosts", "alike", "", ASSUMED, "the last host served stands for all; no stragglers, nothing fails"),
    Assumption("trajectories arrive", "early", "", ASSUMED, "no rollouts, checkpoint or weight sync: as on the rig"),
    Assumption("engine", "reference's", "", STATED,
               "settles the micro-batch before in each call, the last before the update; a step's second call flushes"),
    Assumption("decoding", "in compute", "", ASSUMED, "restoring dense routing costs no time of its own"),
    Assumption("funnel", "rates stay", "", ASSUMED, "the reference's one path keeps its B/s at every size"),
    Assumption("funnel's memory", "4.98", "payloads", INFERRED, "205 GB at 1,024 chips; 8 times the rows, 41.2 GB"),
    Assumption("update", "1.5 s", "", ASSUMED, "the same at every size"),
)  # fmt: skip

REFERENCE, OURS = Reference(), Ours()
CHIPS_PER_HOST, REFERENCE_HOSTS, REFERENCE_TRAJECTORIES, REFERENCE_ROWS = 4, 32, 128, 64
#: stated: 205 of 240.5 GB at 1,024 chips
FUNNEL_GB, FUNNEL_LIMIT_GB, FUNNEL_CHIPS = 205.0, 240.5, 1024
FUNNEL_PAYLOADS = FUNNEL_GB * 1e9 / (REFERENCE.payload_nbytes * FUNNEL_CHIPS / CHIPS_PER_HOST / REFERENCE_HOSTS)

ARMS = {"A0": "serial", "A1": "pipelined", "A2": "staged_after_update", "A3": "staged_before_update"}
#: arm, micro-batches per step: boundary idle and step, s; medians of five steps (A0p: A0 repeated, the noise floor)
TPU_RIG = {
    ("A0", 2): (12.40, 40.70), ("A0p", 2): (11.59, 39.89), ("A1", 2): (11.34, 39.64), ("A2", 2): (8.59, 36.88),
    ("A3", 2): (7.56, 35.92),
    ("A0", 3): (12.46, 64.45), ("A0p", 3): (11.72, 61.85), ("A1", 3): (11.34, 62.26), ("A2", 3): (7.43, 59.23),
    ("A3", 3): (0.02, 50.82),
}  # fmt: skip
#: idle net of the boundary's own upload, s, 2 per step: what gave the two arrival times
NET_IDLE_S = {"A0": 5.25, "A0p": 5.19, "A1": 3.86, "A2": 2.31, "A3": 2.91}
#: another driver on 128 chips: step, and what it was measured with (a first call's extra, its own micro-batch)
TRAINER_BENCH = {"A0": 107.73, "A3": 100.01}
TRAINER_BENCH_MICROBATCH_S, TRAINER_BENCH_EXTRA_S, TRAINER_BENCH_COUNT = 10.945, 7.65, 9
#: what the reference itself predicted before its run of 3 per step
PREDICTED_BEFORE_S = {"A0": 64.6, "A3": 52.6}


@dataclass(frozen=True)
class Job:
    """One micro-batch at a number of hosts."""

    hosts: int
    payload_nbytes: float
    microbatch_s: float
    trajectories: float
    rows: float

    @property
    def sharing(self) -> float:
        """Hosts that have tokens of the same rows, and so the same part of the plan."""
        return max(1.0, self.hosts / self.rows)


#: how a job grows with its hosts
LAWS = {
    "rows": "each host has 2 rows: payload and trajectories grow with the hosts, a micro-batch takes 13.38 s",
    "batch": "64 rows and 5.15 GB at every size: a micro-batch takes 13.38 s x 32 / hosts",
}


def job(law: str, hosts: int) -> Job:
    """``law`` of ``LAWS``; both are the reference's rig at 32 hosts."""
    grown = hosts / REFERENCE_HOSTS
    at_32 = Job(hosts, REFERENCE.payload_nbytes, REFERENCE.microbatch_s, REFERENCE_TRAJECTORIES, REFERENCE_ROWS)
    if law == "batch":
        return replace(at_32, microbatch_s=at_32.microbatch_s / grown)
    payload_nbytes, trajectories, rows = at_32.payload_nbytes * grown, at_32.trajectories * grown, at_32.rows * grown
    return replace(at_32, payload_nbytes=payload_nbytes, trajectories=trajectories, rows=rows)


def reference_of(a_job: Job, given: Reference = REFERENCE) -> Reference:
    """The reference with this job's payload going over the same paths at the same rates."""
    ratio = a_job.payload_nbytes / given.payload_nbytes
    carried = ("arrival_call_s", "arrival_stage_s", "placing_call_s", "placing_staged_s", "device_wait_s")
    through = {name: getattr(given, name) * ratio for name in carried}
    return replace(given, payload_nbytes=a_job.payload_nbytes, microbatch_s=a_job.microbatch_s, **through)

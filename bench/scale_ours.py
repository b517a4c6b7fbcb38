"""Our loop in ``scale.py``: plans go out, payloads do not; per host a fetch, a fill and an upload of its own share.

One host stands for all: the last one that is served. What the orchestrator does for each host, one after another, is
held on its one processor (Python), which commands, plans and references share. A command goes to a fleet in two
phases; on one host it is one call, and the pool is the orchestrator's own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

from scale_device import MEASURED_STEPS, WARM_UP_STEPS, Boundaries, Device, Operation, boundaries_of
from scale_events import Process, Resource, Signal, Simulation
from scale_inputs import OURS, REFERENCE, Job, Ours

#: micro-batches that an agent fetches ahead of the slot they go to
PREFETCHED = 4
ONE_PHASE, TWO_PHASES = 1, 2


@dataclass(frozen=True)
class Load:
    """What a step costs the orchestrator, and a host. ``busy_share``: of the step on the orchestrator's processor."""

    orchestrator_ram_nbytes: float
    orchestrator_network_nbytes: float
    busy_share: float
    messages: float
    host_ram_nbytes: float
    host_fetched_nbytes: float


class OurLoop:
    """``order`` is one of the contract's four. ``blocks``: the engine settles and flushes, as the reference's."""

    def __init__(self, job: Job, order: str, microbatches: int, *, blocks: bool = True, given: Ours = OURS) -> None:
        self.job, self.order, self.microbatches, self.blocks, self.given = job, order, microbatches, blocks, given
        self.simulation = simulation = Simulation()
        self.device = Device(simulation)
        self.processor = Resource(simulation, "the orchestrator's processor")
        self.link = Resource(simulation, "the host's network")
        self.copy = Resource(simulation, "the host's copies to its devices")
        self.slots = Resource(simulation, "slots", int(given.slots))
        self.buffers = Resource(simulation, "device buffers", int(given.device_buffers))
        self.ahead = Resource(simulation, "fetches ahead", PREFETCHED)
        self.messages = 0
        self.steps = WARM_UP_STEPS + MEASURED_STEPS + 1
        count = self.steps * microbatches
        self._fetched = [Signal(f"fetched({i})") for i in range(count)]
        self._packed = [Signal(f"packed({i})") for i in range(count)]
        self._booked = [Signal(f"step {step} is written up") for step in range(self.steps)]
        self._unbooked: deque[tuple[int, Operation]] = deque()
        self._uploaded: dict[int, Signal] = {}
        self._computed: list[Operation] = []
        self._settled = 0
        share = 1 / job.hosts
        self.encoded_nbytes = job.payload_nbytes * given.upload_share * share
        self.fetched_nbytes = job.payload_nbytes * given.fetch_share * share * (1 - share)  # the rest lies at home

    def run(self) -> tuple[Boundaries, Load]:
        for process, name in ((self._fetch(), "fetching"), (self._pack(), "packing"), (self._loop(), "the loop")):
            self.simulation.spawn(process, name)
        self.simulation.run()
        return boundaries_of(self.device.operations, self.microbatches), self._load()

    # the feeder

    def _fetch(self) -> Process:
        """Plan and ask every agent to fetch, a few micro-batches ahead."""
        for i in range(len(self._fetched)):
            yield self.ahead.acquire()
            if i % self.microbatches == 0 and self.job.hosts > 1:
                yield from self._call(ONE_PHASE)  # the stores tell the references of a step
            yield from self.processor.hold(self.job.trajectories * self.given.plan_s)
            if self.job.hosts > 1:
                yield from self._call(ONE_PHASE)
            self.simulation.spawn(self._fetch_one(i), f"fetch {i}")

    def _fetch_one(self, i: int) -> Process:
        if self.job.hosts > 1:
            # as many as a host has rows' worth of; a store is asked once
            stores = min(self.job.hosts - 1, ceil(self.job.trajectories / self.job.hosts))
            seconds = stores * self.given.fetch_call_s + self.fetched_nbytes / self.given.fetch_rate
            yield from self.link.hold(seconds)
        self.simulation.fire(self._fetched[i])

    def _pack(self) -> Process:
        for i in range(len(self._packed)):
            step, index = divmod(i, self.microbatches)
            if self.order == "serial" and index == 0 and step:
                yield self._booked[step - 1]
            yield self._fetched[i]
            yield self.slots.acquire()
            if self.job.hosts > 1:
                yield from self._call(ONE_PHASE, self._fill())
            else:
                yield from self._fill()
            self.ahead.release()
            self.simulation.fire(self._packed[i])

    def _fill(self) -> Process:
        yield self.encoded_nbytes / self.given.fill_rate

    # the boundary

    def _loop(self) -> Process:
        staged = self.order.startswith("staged")
        for step in range(self.steps):
            for index in range(self.microbatches):
                i, final = step * self.microbatches + index, index == self.microbatches - 1
                deferred = final and self.order == "staged_before_update"
                yield self._packed[i]
                yield from self._bookkeep_what_landed()
                yield from self._command(self._forward(i, index == 1 and step > 0, final and not deferred))
                if staged and i + 1 < len(self._packed):
                    yield self._packed[i + 1]
                    yield from self._command(self._stage(i + 1))
                if deferred:
                    yield from self._command(self._update())
            yield from self._command(_nothing())  # get_metrics: a ticket
            self._unbooked.append((step, self.device.operations[-1]))
            if self.order == "serial":
                yield from _seen(self.device.operations[-1])
                yield from self._bookkeep_what_landed()

    def _bookkeep_what_landed(self) -> Process:
        """Between two commands, never waited for: a step's books need its update's metrics, and F sent."""
        while self._unbooked and self._unbooked[0][1].finished.at is not None:
            step, _ = self._unbooked[0]
            if self.order != "serial" and len(self._computed) <= (step + 1) * self.microbatches:
                return
            self._unbooked.popleft()
            yield REFERENCE.bookkeeping_s
            self.simulation.fire(self._booked[step])

    def _command(self, act: Process) -> Process:
        yield from self._call(TWO_PHASES if self.job.hosts > 1 else ONE_PHASE, act)

    def _call(self, phases: int, act: Process | None = None) -> Process:
        """Sends to all hosts, hears from all; ``act`` is what the last host does before it replies."""
        given, each_way = self.given, self.job.hosts * self.given.host_call_s / 2
        rest = (given.call_rest_s + (given.network_s if self.job.hosts > 1 else 0.0)) / 2
        for phase in range(phases):
            yield from self.processor.hold(each_way)
            yield rest
            if act is not None and phase == phases - 1:
                yield from act
            yield rest
            yield from self.processor.hold(each_way)
            self.messages += 2 * self.job.hosts

    # the worker of the last host

    def _stage(self, i: int) -> Process:
        yield self.buffers.acquire()
        self._uploaded[i] = self.simulation.spawn(self._upload(), f"upload {i}")

    def _upload(self) -> Process:
        yield from self.copy.hold(self.encoded_nbytes / self.given.upload_rate)
        self.slots.release()

    def _forward(self, i: int, flushes: bool, updates: bool) -> Process:
        if i not in self._uploaded:
            yield from self._stage(i)
        this = self.device.enqueue(f"micro-batch {i}", self.job.microbatch_s, self._uploaded[i])
        self._computed.append(this)
        if self.blocks:
            yield from self._settle(i - 1)
            if flushes:
                yield from _seen(this)
        else:
            self.simulation.spawn(self._retire(this), f"retiring {i}")
        if updates:
            yield from self._update()

    def _update(self) -> Process:
        if self.blocks:
            yield from self._settle(len(self._computed) - 1)
        self.device.enqueue("update", REFERENCE.update_s)
        self.messages += self.job.hosts * (self.microbatches + 1)  # the step's events, one for each program

    def _settle(self, upto: int) -> Process:
        """Read the overflow flags on the host; a device buffer is free when its micro-batch is settled."""
        while self._settled <= upto:
            yield from _seen(self._computed[self._settled])
            self._settled += 1
            self.buffers.release()

    def _retire(self, operation: Operation) -> Process:
        yield operation.finished
        self.buffers.release()

    def _load(self) -> Load:
        given, job, steps = self.given, self.job, self.steps
        step_trajectories = job.trajectories * self.microbatches
        held = given.held_steps * step_trajectories
        pool = (given.slots + 1) * self.encoded_nbytes
        stored = given.held_steps * self.microbatches * job.payload_nbytes * given.fetch_share / job.hosts
        alone = job.hosts == 1
        return Load(
            orchestrator_ram_nbytes=given.process_nbytes + (pool + stored if alone else held * given.reference_nbytes),
            orchestrator_network_nbytes=0.0 if alone else (
                step_trajectories * (given.trajectory_nbytes + (job.sharing - 1) * given.segment_nbytes)
                + self.messages / steps * given.message_nbytes
            ),
            busy_share=self.processor.busy_s / self.simulation.now,
            messages=self.messages / steps,
            host_ram_nbytes=pool + stored,
            host_fetched_nbytes=self.fetched_nbytes * self.microbatches,
        )  # fmt: skip


def _seen(operation: Operation) -> Process:
    yield operation.finished
    yield REFERENCE.readiness_s


def _nothing() -> Process:
    yield 0.0

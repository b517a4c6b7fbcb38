"""The boundary as it is drawn: the real schedule, run against a trainer and a device that only count time.

What is decided, and in which order, is `shmstage.orchestrator.schedule` itself; only the durations are made up.
The engine is of the kind that reads flags on the host: of micro-batch i-1 at the end of forward call i, and of the
last one before the update is dispatched. That is where the four orders differ most: with an engine that never blocks
the last three have no idle at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shmstage.orchestrator.schedule import FORWARD, BoundarySchedule, Command, Config, Key, Kind
from shmstage.settings import Boundary

DEVICE_BUFFERS = 2
MICROBATCH = "micro-batch"  # a span of this kind is labelled STEP.INDEX
SLOTS = 3


@dataclass(frozen=True)
class Took:
    """Durations, in units of the drawing."""

    pack: float = 3.0
    upload: float = 3.6
    compute: float = 7.0
    update: float = 4.0
    bookkeeping: float = 2.4
    call: float = 0.8
    wake_up: float = 0.3
    write: float = 2.0


@dataclass(frozen=True)
class Span:
    lane: str
    begin: float
    end: float
    kind: str
    label: str
    command: Command | None = None


@dataclass
class Drawing:
    """Spans of all lanes, and per boundary (the step it leads into) from when to when the device had nothing to do."""

    spans: list[Span] = field(default_factory=list)
    idle: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def calls(self) -> list[Span]:
        return [span for span in self.spans if span.lane == "calls"]


class Model:
    """One caller, one packer, one upload at a time, one device queue; all in order, each free at a certain time."""

    def __init__(self, config: Config, took: Took) -> None:
        self.schedule = BoundarySchedule(config)
        self.config, self.took = config, took
        self.drawing = Drawing()
        self.now = 0.0  # of the one thread that calls the trainer and does the bookkeeping
        self.packer_free = self.upload_free = self.device_free = self.snapshots_free = 0.0
        self.next_packed = 0
        self.packed_at: dict[Key, float] = {}
        self.uploaded_at: dict[Key, float] = {}
        self.ready_at: dict[Key, float] = {}
        self.slot_free_at: list[float] = [0.0] * SLOTS
        self.happens: list[tuple[float, int, object, tuple[object, ...]]] = []
        self.device_work: list[tuple[float, float, int]] = []

    def run(self) -> Drawing:
        while not self.schedule.state.done:
            self._pack()
            while any(at <= self.now for at, *_ in self.happens):
                self._let_happen()
                self._pack()
            command = self.schedule.next()
            if command is not None:
                self._do(command)
            elif self.happens:
                self._let_happen()
            else:
                raise AssertionError(f"stuck: {self.schedule.state}")
        self._find_idle()
        return self.drawing

    def _let_happen(self) -> None:
        """Waits for the next event."""
        self.happens.sort(key=lambda what: what[:2])
        at, _, tell, arguments = self.happens.pop(0)
        self.now = max(self.now, at)
        tell(*arguments)  # type: ignore[operator]

    def _later(self, at: float, tell: object, *arguments: object) -> None:
        self.happens.append((at, len(self.happens), tell, arguments))

    # --- the feeder ---------------------------------------------------------------------------------------------

    def _pack(self) -> None:
        """Packs what may be packed now; told to the schedule when it is over."""
        per_step = self.config.microbatches_per_step
        while True:
            step, index = divmod(self.next_packed, per_step)
            key = (step + 1, index)
            if self.config.last_step is not None and key[0] > self.config.last_step:
                return
            if key > self.schedule.pack_limit:
                return
            place = self.next_packed % SLOTS
            if self.slot_free_at[place] == float("inf"):
                return
            self.next_packed += 1
            begin = max(self.packer_free, self.slot_free_at[place], self.now if self.next_packed > 1 else 0.0)
            end = begin + self.took.pack
            self.packer_free = self.packed_at[key] = end
            self.slot_free_at[place] = float("inf")  # until it is uploaded
            self._add("packer", begin, end, MICROBATCH, f"{key[0]}.{key[1]}")
            self._later(end, self.schedule.packed, key[0], key[1], index == per_step - 1)

    # --- the trainer --------------------------------------------------------------------------------------------

    def _do(self, command: Command) -> None:
        begin, kind = self.now, command.kind
        if kind is Kind.FINISH:
            self.schedule.returned(command)
            return
        if kind is Kind.BOOKKEEP:
            self.now += self.took.bookkeeping
            self._add("bookkeeping", begin, self.now, "bookkeeping", f"step {command.step}", command)
            self.schedule.returned(command)
            return
        self.now += self.took.call
        if kind in (Kind.STAGE, Kind.FWD_BWD):
            self._upload(command.key)
        if kind in FORWARD:
            self._forward(command.key)
            if command.is_final and not command.defer_update:
                self._update(command.step)
        elif kind in (Kind.APPLY_DEFERRED, Kind.UPDATE):
            self._update(command.step)
        elif kind is Kind.GET_METRICS:
            self._later(self.device_free, self.schedule.metrics_ready, command.step)
        elif kind in (Kind.SAVE_CHECKPOINT, Kind.SYNC_WEIGHTS):
            at = max(self.now, self.device_free, self.snapshots_free)
            self.snapshots_free = at + self.took.write
            word = "checkpoint" if kind is Kind.SAVE_CHECKPOINT else "weights"
            self._add("snapshots", at, at + self.took.write, "snapshot", f"{word} {command.step}")
            if kind is Kind.SYNC_WEIGHTS:
                self._later(at + self.took.write, self.schedule.weights_published, command.step)
        self._add("calls", begin, self.now, "call", command.kind.value, command)
        self.schedule.returned(command)

    def _upload(self, key: Key) -> None:
        number = (key[0] - 1) * self.config.microbatches_per_step + key[1]
        before = divmod(number - DEVICE_BUFFERS, self.config.microbatches_per_step)
        buffer_free = self.ready_at.get((before[0] + 1, before[1]), 0.0)
        begin = max(self.now, self.upload_free, buffer_free)
        end = begin + self.took.upload
        self.upload_free = self.uploaded_at[key] = end
        self.slot_free_at[number % SLOTS] = end
        self._add("uploads", begin, end, MICROBATCH, f"{key[0]}.{key[1]}")

    def _forward(self, key: Key) -> None:
        begin = max(self.now, self.device_free, self.uploaded_at[key])
        end = begin + self.took.compute
        self.device_free = self.ready_at[key] = end
        self.device_work.append((begin, end, key[0]))
        self._add("device", begin, end, MICROBATCH, f"{key[0]}.{key[1]}")
        self._later(end, self.schedule.finished, *key)
        if key[1] > 0:  # it reads the flags of the micro-batch before, which must be over for that
            self.now = max(self.now, self.ready_at[key[0], key[1] - 1])

    def _update(self, step: int) -> None:
        self.now = max(self.now, self.device_free) + self.took.wake_up  # it reads a flag of the last micro-batch first
        begin = max(self.now, self.device_free)
        self.device_free = begin + self.took.update
        self.device_work.append((begin, self.device_free, step))
        self._add("device", begin, self.device_free, "update", f"update {step}")
        self._later(self.device_free, self.schedule.landed, step)

    # --- what is drawn ------------------------------------------------------------------------------------------

    def _add(self, lane: str, begin: float, end: float, kind: str, label: str, command: Command | None = None) -> None:
        self.drawing.spans.append(Span(lane, begin, end, kind, label, command))

    def _find_idle(self) -> None:
        """Between step k's last micro-batch and step k+1's first: written on the step that it leads into."""
        for (_, end, step), (begin, _, next_step) in zip(self.device_work, self.device_work[1:], strict=False):
            is_update = any(span.kind == "update" and span.begin == begin for span in self.drawing.spans)
            if begin > end and (is_update or next_step != step):
                leads_into = step + 1
                self.drawing.idle.setdefault(leads_into, []).append((end, begin))


def drawn_run(mode: Boundary, *, steps: int = 4, microbatches_per_step: int = 3, took: Took | None = None) -> Drawing:
    """A run of some steps with a checkpoint and a weight sync in each."""
    config = Config(
        mode=mode,
        microbatches_per_step=microbatches_per_step,
        last_step=steps,
        checkpoint_every=1,
        weight_sync="async",
    )
    return Model(config, took or Took()).run()

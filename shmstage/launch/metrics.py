"""What a run's metrics are: totals of its step lines, its children and its pools, as Prometheus families.

Step lines and children are told by the launcher's loop; pools, checkpoints and weights are looked at when somebody
asks, without the run's co-operation. Names end in their base unit, counters in ``_total``. Counters begin at 0 with the
launcher: a step trained again after a restart is work done again, and counts again.
"""

from __future__ import annotations

import math
import platform
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shmstage import __version__
from shmstage.errors import SettingsError
from shmstage.launch.run_directory import ROLES, newest_checkpoint
from shmstage.memory.inspect import PoolSnapshot
from shmstage.orchestrator.saving import PUBLISHED, last_published

PREFIX = "shmstage_"
#: name without ``_total`` → key of the step line, help
COUNTERS: dict[str, tuple[str, str]] = {
    "microbatches": ("microbatches", "Micro-batches trained."),
    "tokens": ("tokens", "Real tokens trained, without padding."),
    "loss_tokens": ("loss_tokens", "Tokens that the loss was taken over."),
    "segments": ("segments", "Trajectories trained, each time they were."),
    "slot_bytes": ("bytes", "Bytes of the slots that trained micro-batches lay in, padding included."),
    "pack_seconds": ("pack_s", "Seconds spent filling slots."),
    "slot_wait_seconds": ("slot_wait_s", "Seconds the packer waited for a free slot."),
    "data_wait_seconds": ("data_wait_s", "Seconds the packer waited for trajectories."),
    "upload_seconds": ("upload_s", "Seconds from the issue of an upload until its arrays were on the device."),
    "exposed_seconds": ("exposed_s", "Seconds of staged uploads that no computation hid."),
    "snapshot_wait_seconds": ("snapshot_wait_s", "Seconds that updates waited for copies of what they change."),
}
#: name → key of the step line, help; of the last step
GAUGES: dict[str, tuple[str, str]] = {
    "step": ("step", "Number of the last step that has its line."),
    "attempt": ("attempt", "Attempt that the last step was trained in, counted over restarts."),
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("grad_norm", "Norm of the last step's gradient."),
    "denominator": ("denominator", "What the last step's gradients were divided by."),
    "last_step_seconds": ("step_s", "Length of the last step, from update landed to update landed."),
    "last_boundary_idle_seconds": ("boundary_idle_s", "How long the device waited at the last step boundary."),
}
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "step_seconds": ("step_s", "Length of a step, from update landed to update landed."),
    "boundary_idle_seconds": ("boundary_idle_s", "How long the device waited at a step boundary."),
}
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LATCH_LEVELS = ("on", "after_update", "off")
SLOT_STATES = ("free", "writing", "published")


@final
class StepTotals:
    """Pure. Sums over step lines, and the last of them."""

    def __init__(self) -> None:
        self.steps = 0
        self.staged = 0
        self.sums: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.buckets = {name: [0] * (len(BUCKETS_S) + 1) for name in HISTOGRAMS}
        self.seconds = dict.fromkeys(HISTOGRAMS, 0.0)
        self.last: Mapping[str, Any] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """What is no finite number in ``line`` (the first step has no boundary before it) adds nothing."""
        self.steps += 1
        self.staged += line.get("staged") is True
        for name, (key, _) in COUNTERS.items():
            self.sums[name] += _finite(line.get(key)) or 0
        for name, (key, _) in HISTOGRAMS.items():
            value = _finite(line.get(key))
            if value is not None:
                self.buckets[name][bisect_left(BUCKETS_S, value)] += 1
                self.seconds[name] += value
        self.last = line

    def families(self) -> Iterator[Metric]:
        yield _counter("steps", "Steps that have their line, those trained again after a restart included.", self.steps)
        yield _counter("staged_steps", "Steps whose first micro-batch was staged before they began.", self.staged)
        for name, (_, text) in COUNTERS.items():
            yield _counter(name, text, self.sums[name])
        for name, (_, text) in HISTOGRAMS.items():
            bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
            counted = [float(count) for count in accumulate(self.buckets[name])]
            yield HistogramMetricFamily(
                PREFIX + name, text, list(zip(bounds, counted, strict=True)), self.seconds[name]
            )
        for name, (key, text) in GAUGES.items():
            yield _gauge(name, text, _number(self.last.get(key)))
        yield _gauges("packing_efficiency_ratio", "Real tokens of the last step by the room they lay in.", "of", {
            "row": _number(self.last.get("row_efficiency")),
            "microbatch": _number(self.last.get("microbatch_efficiency")),
        })  # fmt: skip
        latch = self.last.get("latch")
        level = latch.get("level") if isinstance(latch, Mapping) else None
        states = {known: float(known == level) if level is not None else None for known in LATCH_LEVELS}
        yield _gauges("latch", "1 at the place where the latch lets stages go.", "level", states)


@final
class RunCollector(Collector):
    """What one run shows to a scraper; ``collect`` may be called on any thread."""

    def __init__(
        self,
        run: str,
        boundary: str,
        out: Path,
        *,
        pools: Callable[[], list[PoolSnapshot]],
        failed: Callable[[str], None],
    ) -> None:
        """``pools`` looks at the run's pools. ``failed`` hears once of every part that cannot be shown."""
        self._run = {"run": run, "boundary": boundary}
        self._build = {"version": __version__, "python": platform.python_version()}
        self._out = out
        self._pools = pools
        self._failed = failed
        self._lock = threading.Lock()
        self._totals = StepTotals()
        self._epoch = 1
        self._living: dict[str, float | None] = dict.fromkeys(ROLES, 0.0)
        self._restarts: dict[str, int] = dict.fromkeys(ROLES, 0)
        self._said: set[str] = set()

    def steps(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """These steps are done."""
        with self._lock:
            for line in lines:
                self._totals.add(line)

    def children(self, pids: Mapping[str, int | None], epoch: int, restarts: Mapping[str, int]) -> None:
        """Who lives now, and how often each was started again."""
        with self._lock:
            self._epoch = epoch
            self._living = {role: float(pid is not None) for role, pid in pids.items()}
            self._restarts = dict(restarts)

    def collect(self) -> Iterator[Metric]:
        """What cannot be shown is left out, and said once: a scrape never fails as a whole."""
        for part in (self._of_steps, self._of_children, self._of_pools, self._of_out):
            try:
                found = list(part())
            except Exception as error:
                self._say_once(part.__name__, f"metrics are left out: {type(error).__name__}: {error}")
            else:
                yield from found

    def _of_steps(self) -> Iterator[Metric]:
        with self._lock:
            yield from list(self._totals.families())

    def _of_children(self) -> Iterator[Metric]:
        yield InfoMetricFamily(PREFIX + "build", "Version of shmstage and of Python.", self._build)
        yield InfoMetricFamily(PREFIX + "run", "The run that is shown.", self._run)
        with self._lock:
            epoch, living, restarts = self._epoch, self._living, self._restarts
        yield _gauge("epoch", "Incarnation of the orchestrator, from 1.", epoch)
        yield _gauges("up", "1 while the process lives.", "role", living)
        text = "How often a process was started again after it had died."
        again = CounterMetricFamily(PREFIX + "restarts", text, labels=["role"])
        for role, count in restarts.items():
            again.add_metric([role], count)
        yield again

    def _of_pools(self) -> Iterator[Metric]:
        found = [pool for pool in self._pools() if pool.counters is not None]
        feeding = [pool for pool in found if pool.owner.role == "orchestrator"]
        newest = max(feeding, key=lambda pool: pool.epoch, default=None)
        slots = GaugeMetricFamily(
            PREFIX + "slots", "Slots of the pool by what they are for and the state they are in.",
            labels=["kind", "state"],
        )  # fmt: skip
        nbytes = GaugeMetricFamily(PREFIX + "pool_bytes", "Memory that pools occupy.", labels=["pool"])
        for name, pools in (("microbatches", feeding), ("weights", [p for p in found if p.owner.role == "trainer"])):
            nbytes.add_metric([name], sum(pool.allocated_nbytes for pool in pools))
        for aux in (False, True):
            if newest is None:
                break
            states: list[str] = [slot.state for slot in newest.slots if slot.aux == aux]
            for state in SLOT_STATES:
                slots.add_metric(["aux" if aux else "train", state], states.count(state))
        yield slots
        yield nbytes
        text = "Since the orchestrator last said that it made progress."
        yield _gauge("heartbeat_age_seconds", text, newest.heartbeat_s if newest is not None else None)

    def _of_out(self) -> Iterator[Metric]:
        yield _gauge("checkpoint_step", "Step of the newest durable checkpoint in OUT.", newest_checkpoint(self._out))
        text = "Newest version of the weights that was published."
        published = None
        try:
            published = last_published(self._out) if (self._out / PUBLISHED).exists() else None
        except SettingsError as error:
            self._say_once("weights", str(error))
        yield _gauge("weights_version", text, published)

    def _say_once(self, part: str, text: str) -> None:
        with self._lock:
            if part in self._said:
                return
            self._said.add(part)
        self._failed(text)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """Without a sample while there is no value; name and help are there all the same."""
    family = GaugeMetricFamily(PREFIX + name, text)
    if value is not None:
        family.add_metric([], value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float | None]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _number(value: object) -> float | None:
    """NaN is a number: a loss that went there should be seen."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _finite(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) and number >= 0 else None

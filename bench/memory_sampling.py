"""Proportional set size of two processes while they work, read again and again by a thread of the bench.

A page that n processes map counts 1/n, so that the sum over orchestrator and trainer counts the pool once. The kernel
adds a whole process up (``smaps_rollup``), which takes tens of milliseconds per gigabyte (``reading_s``), and meanwhile
the process can map nothing: three quarters of the time are left to it.

What a reading misses the kernel's high-water mark of resident memory has not: it is set back at the baseline, and read
often since it costs nothing. Both marks, less the pool's pages that both processes have, are no less than the true
peak: the two need not have been at their highest at once. Unlike the proportional size they do not move with who else
on the machine runs the same libraries.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from memory_rig import ROLES, Gate
from results import spread

from shmstage.errors import SettingsError
from shmstage.records import read_json

BASELINE_READINGS = 20
POLL_S = 0.005
#: of the rise to the peak: where there is less, not all buffers are there yet, or not any more
FLOWING = 0.9


@dataclass(frozen=True)
class Use:
    """Bytes of one process, or of several: all, and of which kind."""

    pss: int
    anonymous: int
    file: int
    shared: int

    def __add__(self, other: Use) -> Use:
        return Use(*(getattr(self, name) + getattr(other, name) for name in Use.__annotations__))

    def __sub__(self, other: Use) -> Use:
        return Use(*(getattr(self, name) - getattr(other, name) for name in Use.__annotations__))

    def to_json(self) -> dict[str, int]:
        return {f"{name}_nbytes": getattr(self, name) for name in Use.__annotations__}


NOTHING = Use(0, 0, 0, 0)
_KEYS = {"Pss": "pss", "Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}


def use_of(pid: int) -> Use:
    """``NOTHING`` of a process that has ended, or is about to."""
    found = dict.fromkeys(_KEYS.values(), 0)
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, value = line.partition(":")
            if name in _KEYS:
                found[_KEYS[name]] = 1024 * int(value.split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return NOTHING
    return Use(**found)


@dataclass
class HighWater:
    """Of one process, in bytes: resident memory at the baseline and now, most since then, most of it in pools."""

    pid: int
    before: int = 0
    most: int = 0
    pool: int = 0
    now: int = 0

    def reset(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self.before = self._status().get("VmRSS", 0)

    def look(self) -> None:
        status = self._status()
        self.now = status.get("VmRSS", 0)
        self.most = max(self.most, status.get("VmHWM", 0))
        self.pool = max(self.pool, status.get("RssShmem", 0))

    def _status(self) -> dict[str, int]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            return {}
        pairs = (line.split(":", 1) for line in lines if line.startswith(("VmRSS", "VmHWM", "RssShmem")))
        return {name: 1024 * int(value.split()[0]) for name, value in pairs}


@dataclass
class Sampler:
    """``with`` one of them around a run: it waits for the gate, reads the baseline, opens the gate and reads on."""

    out: Path
    gate: Gate
    every_s: float
    baseline: dict[str, Use] = field(default_factory=dict)
    #: (seconds since the gate was opened, of each role)
    samples: list[tuple[float, list[Use]]] = field(default_factory=list)
    reading_s: list[float] = field(default_factory=list)
    high_water: list[HighWater] = field(default_factory=list)
    #: resident memory of both over the baseline, at each look
    resident: list[int] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, name="memory-sampler")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if raised is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._sample()
        except BaseException as error:
            self._error = error
        finally:
            self.gate.open()  # whatever happened here, nobody is to wait any longer

    def _sample(self) -> None:
        while not self.gate.everybody_is_ready():
            if self._over.wait(POLL_S):
                return
        pids = self._pids()
        readings = []
        for _ in range(BASELINE_READINGS):
            readings.append([use_of(pid) for pid in pids])
            self._over.wait(POLL_S)
        self.baseline = {
            role: Use(*(round(median(getattr(each[place], name) for each in readings)) for name in Use.__annotations__))
            for place, role in enumerate(ROLES)
        }
        self.high_water = [HighWater(pid) for pid in pids]
        for each in self.high_water:
            each.reset()
        self.gate.open()
        began = time.monotonic()
        due = began
        while not self._over.is_set():
            for each in self.high_water:
                each.look()
            self.resident.append(sum(each.now - each.before for each in self.high_water))
            if (at := time.monotonic()) >= due:
                uses = [use_of(pid) for pid in pids]
                self.reading_s.append(time.monotonic() - at)
                self.samples.append((at - began, uses))
                due = time.monotonic() + 3 * self.reading_s[-1]
            self._over.wait(self.every_s)

    def _pids(self) -> list[int]:
        while not self._over.is_set():
            try:
                pids = read_json(self.out / "run.json")["pids"]
                if all(pids.get(role) for role in ROLES):
                    return [pids[role] for role in ROLES]
            except (FileNotFoundError, SettingsError):
                pass  # not written yet
            self._over.wait(POLL_S)
        return []

    # --- what it saw ----------------------------------------------------------------------------------------

    @property
    def rises(self) -> list[tuple[float, Use]]:
        """Over the baseline, both processes together."""
        base = sum(self.baseline.values(), NOTHING)
        return [(at, sum(uses, NOTHING) - base) for at, uses in self.samples]

    def seen(self) -> dict[str, Any]:
        """Peak over the baseline and its parts, growth while micro-batches flow, what reading took."""
        rises = self.rises
        at, peak = max(rises, key=lambda each: each[1].pss)
        number = next(place for place, each in enumerate(rises) if each[0] == at)
        per_role = {
            role: (use - self.baseline[role]).to_json()
            for role, use in zip(ROLES, self.samples[number][1], strict=True)
        }
        flowing = [nbytes for nbytes in self.resident if nbytes > FLOWING * max(self.resident)]
        third = max(1, len(flowing) // 3)
        marks = self.high_water
        return {
            "high_water_nbytes": sum(each.most - each.before for each in marks) - min(each.pool for each in marks),
            "peak": peak.to_json(),
            "peak_of": per_role,
            "baseline": {role: use.to_json() for role, use in self.baseline.items()},
            # from the first third to the last: what each micro-batch left behind would add up there
            "growth_nbytes": median(flowing[-third:]) - median(flowing[:third]),
            "reading_s": spread(self.reading_s),
            "readings": len(rises),
            "series": _thinned([
                (round(seconds, 3), use.pss)
                for (seconds, use), (_, uses) in zip(rises, self.samples, strict=True)
                if NOTHING not in uses  # one of them has ended
            ]),
        }


def _thinned(series: list[tuple[float, int]], most: int = 200) -> list[tuple[float, int]]:
    """The highest of each so many: a peak must not be lost."""
    every = -(-len(series) // most)
    return [max(series[start : start + every], key=lambda each: each[1]) for start in range(0, len(series), every)]

"""A foreign reader opens our trace: Perfetto finds every slice, arrow and counter, at the same nanosecond."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_schedule import MS, event, kept, process, schedule
from perfetto_page import opened

from shmstage.events import LANES
from shmstage.testing.trace_checker import counts_of, faults_of
from shmstage.timeline.reading import ProcessEvents
from shmstage.timeline.trace import write_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def orderly() -> list[ProcessEvents]:
    orchestrator, trainer, _ = schedule(steps=4, microbatches=3, late_update=2 * MS, late_first=3 * MS)
    return [orchestrator, trainer]


def untidy() -> list[ProcessEvents]:
    """Killed, started again, a third of the events lost, and much that happens at one instant."""
    chance = random.Random(6)
    found = []
    for start in (1, 2):
        for whole in schedule(steps=3, microbatches=3, begin=(50 + 70 * start) * MS)[:2]:
            left = [e for e in whole.events if chance.random() > 0.3]
            found.append(replace(whole, start=start, events=left))
    names, kinds = list(LANES), ["fwd_bwd", "replay", "update"]
    crowd = []
    for n in range(600):
        name, begin, of = chance.choice(names), 200 * MS + chance.randrange(40), chance.randrange(3)
        end = chance.choice([0, begin + chance.randrange(9)])
        where = {"slot": of, "generation": chance.randrange(2, 5), "kind": chance.choice(kinds)}
        crowd.append(event(name, begin, end, of, 0, f"{of}.0", **where, queued=n))
    return [*found, process("trainer", crowd, start=3)]


@pytest.mark.parametrize("processes", [orderly, untidy])
def test_perfetto_finds_what_we_wrote(tmp_path: Path, processes: Any) -> None:
    kept(tmp_path, _by_file(processes()))
    figures = write_trace(tmp_path, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert faults_of(text) == []
    ours = counts_of(text)
    events = json.loads(text)["traceEvents"]
    slices = [e for e in events if e["ph"] in "Xi"]
    with opened(text) as trace:
        # to Perfetto an instant is a slice without length
        assert trace.rows("select count(*) from slice") == [[ours.slices + ours.instants]]
        assert trace.rows("select count(*) from flow") == [[ours.arrows]]
        assert trace.rows("select count(*) from counter") == [[ours.counters]]
        assert (figures.slices, figures.arrows, figures.counters) == (ours.slices, ours.arrows, ours.counters)
        assert trace.rows("select count(*) from stats where severity != 'info' and value > 0") == [[0]]
        named = "join thread_track on slice.track_id = thread_track.id join thread using(utid)"
        found = trace.rows(f"select thread.name, slice.name, slice.ts, slice.dur from slice {named}")
        threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        times = [[round(e.get(key, 0) * 1000) for key in ("ts", "dur")] for e in slices]
        written = [[threads[e["tid"]], e["name"], *at] for e, at in zip(slices, times, strict=True)]
        assert sorted(found) == sorted(written)
        ids = "join args as a on a.arg_set_id = s.arg_set_id and a.key = 'args.id'"
        astray = (
            f"select count(*) from flow where (select a.string_value from slice s {ids} where s.id = slice_out) !="
            f" (select a.string_value from slice s {ids} where s.id = slice_in)"
        )
        assert trace.rows(astray) == [[0]]
        assert trace.rows("select count(*) from slice where depth > 0 and dur > 0") == [[0]]


def _by_file(processes: Sequence[ProcessEvents]) -> list[ProcessEvents]:
    return sorted(processes, key=lambda p: p.process)

"""The trace of a schedule whose truth is known, and of what is left of one after a kill."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_schedule import MS, event, kept, process, schedule

from shmstage.errors import SettingsError
from shmstage.testing.trace_checker import TraceCounts, counts_of, faults_of
from shmstage.timeline.clocks import FIRST_NS, REACH_NS, on_one_axis
from shmstage.timeline.reading import ProcessEvents
from shmstage.timeline.trace import TraceFigures, trace_events, write_trace


def traced(*processes: ProcessEvents) -> list[dict[str, Any]]:
    return list(trace_events(on_one_axis(processes)))


def names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def on_track(events: list[dict[str, Any]], *tracks: str) -> list[dict[str, Any]]:
    known = names(events)
    return [e for e in events if e["ph"] in "Xi" and known[e["tid"]] in tracks]


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event.get("dur", 0) * 1000)


def origin(*processes: ProcessEvents) -> int:
    return min(e.t for p in processes for e in p.events) - FIRST_NS


def test_the_trace_of_a_run_passes_the_checker_and_says_what_it_holds(tmp_path: Path) -> None:
    orchestrator, trainer, truth = schedule(steps=3, microbatches=3)
    kept(tmp_path, [orchestrator, trainer])
    figures = write_trace(tmp_path, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert faults_of(text) == []
    counts = counts_of(text)
    assert counts == TraceCounts(figures.slices, figures.instants, figures.flows, figures.arrows, figures.counters)
    assert figures.flows == len(truth.identities) and figures.arrows == 4 * figures.flows
    assert figures.counters == 9 * 5 and figures.left_out == 0


def test_each_thing_has_its_track_in_the_order_of_the_way(tmp_path: Path) -> None:
    orchestrator, trainer, _ = schedule()
    found = list(names(traced(orchestrator, trainer)).values())
    assert found == [
        "source", "source instants", "packer", "packer instants", "slot 0", "slot 1", "slot 2", "control calls",
        "bookkeeping", "trainer host", "trainer host instants", "uploads", "dispatch", "device", "device instants",
        "update", "idle", "snapshots", "snapshots 2", "snapshots instants",
    ]  # fmt: skip


def test_device_work_begins_when_it_could(tmp_path: Path) -> None:
    orchestrator, trainer, truth = schedule(steps=3, late_update=7 * MS, late_first=2 * MS)
    zero = origin(orchestrator, trainer)
    events = traced(orchestrator, trainer)
    device = [(e["args"]["id"], *nanoseconds(e)) for e in on_track(events, "device")]
    assert device == [(identity, begin - zero, end - zero) for identity, begin, end in truth.device]
    updates = [nanoseconds(e) for e in on_track(events, "update")]
    assert updates == [(begin - zero, end - zero) for begin, end in truth.updates]


def test_the_idle_of_a_boundary_is_marked_to_the_nanosecond() -> None:
    orchestrator, trainer, truth = schedule(steps=4, late_update=7 * MS, late_first=2 * MS)
    marked = Counter[int]()
    for mark in on_track(traced(orchestrator, trainer), "idle"):
        begin, end = nanoseconds(mark)
        marked[mark["args"]["step"]] += end - begin
        assert mark["args"]["boundary_idle_s"] == truth.idle[mark["args"]["step"]] / 1e9
    assert dict(marked) == truth.idle == {0: 9 * MS, 1: 9 * MS, 2: 9 * MS}


def test_time_in_which_the_devices_scored_is_not_marked_as_idle() -> None:
    orchestrator, trainer, truth = schedule(steps=2, late_first=4 * MS)
    landed = truth.updates[0][1]
    scored = event("scored", landed + 1 * MS, landed + 2 * MS, kind="actor")
    trainer.events.append(scored)
    zero = origin(orchestrator, trainer)
    assert [nanoseconds(e) for e in on_track(traced(orchestrator, trainer), "idle")] == [
        (landed - zero, landed + 1 * MS - zero), (landed + 2 * MS - zero, landed + 4 * MS - zero),
    ]  # fmt: skip


def test_a_slot_is_taken_from_acquired_to_the_end_of_its_last_lease_and_named_by_its_microbatch() -> None:
    orchestrator, trainer, _ = schedule(steps=2, microbatches=3)
    zero = origin(orchestrator, trainer)
    (first, second) = on_track(traced(orchestrator, trainer), "slot 1")
    assert [first["name"], second["name"]] == ["0.1", "1.1"]
    assert first["args"] == {
        "step": 0, "index": 1, "id": "0.1@1:2", "digest": f"{1:032x}", "slot": 1, "generation": 2,
        "nbytes": 1 << 20, "tokens": 999, "leases_ended": 1,
    }  # fmt: skip
    acquired = [e for e in orchestrator.events if e.event == "slot_acquired" and e.figures["slot"] == 1]
    ended = [e for e in trainer.events if e.event == "lease_ended" and e.figures["slot"] == 1]
    assert nanoseconds(first) == (acquired[0].end - zero, ended[0].t - zero)


def test_a_slot_of_several_hosts_is_taken_until_the_last_of_them_gave_it_back() -> None:
    orchestrator, trainer, _ = schedule(steps=1, microbatches=1)
    lease = next(e for e in trainer.events if e.event == "lease_ended")
    slower = process("trainer-1", [replace(lease, t=lease.t + 5 * MS)])
    (taken,) = on_track(traced(orchestrator, trainer, slower), "slot 0")
    assert nanoseconds(taken)[1] == lease.t + 5 * MS - origin(orchestrator, trainer)
    assert taken["args"]["leases_ended"] == 2


def test_a_slot_that_nobody_gave_back_is_taken_until_it_is_taken_again_or_to_the_end() -> None:
    orchestrator, trainer, _ = schedule(steps=2, microbatches=3)
    trainer.events = [e for e in trainer.events if e.event != "lease_ended"]
    zero = origin(orchestrator, trainer)
    first, second = (nanoseconds(e) for e in on_track(traced(orchestrator, trainer), "slot 1"))
    assert first[1] == second[0]
    assert second[1] == max(e.end or e.t for e in orchestrator.events) - zero


def test_a_second_epoch_counts_generations_anew_and_its_leases_are_its_own() -> None:
    one, trainer, _ = schedule(steps=1)
    two, other, _ = schedule(steps=1, begin=5000 * MS)
    zero = origin(one)
    events = traced(one, trainer, replace(two, start=2, pid=7), replace(other, start=2, pid=8))
    assert [round(e["dur"]) for e in on_track(events, "slot 0")] == [9001, 9001]
    assert {nanoseconds(e)[0] + zero for e in on_track(events, "slot 0")} == {
        e.end for e in one.events + two.events if e.event == "slot_acquired" and e.figures["slot"] == 0
    }


def test_overlapping_spans_go_into_lanes_of_their_own() -> None:
    uploads = [event("staged", begin, end, id="a") for begin, end in ((10, 50), (20, 30), (30, 60), (50, 55), (52, 53))]
    events = traced(process("trainer", uploads))
    assert list(names(events).values()) == ["uploads", "uploads 2", "uploads 3"]
    lanes = {lane: [nanoseconds(e) for e in on_track(events, lane)] for lane in names(events).values()}
    expected = ((10, 50), (50, 55), (20, 30), (30, 60), (52, 53))
    moved = [(begin + FIRST_NS - 10, end + FIRST_NS - 10) for begin, end in expected]
    assert lanes == {"uploads": moved[:2], "uploads 2": moved[2:4], "uploads 3": moved[4:]}


def test_what_has_no_length_takes_its_nanosecond_of_a_lane() -> None:
    uploads = [event("staged", 10, 10, id="a"), event("staged", 10, 20, id="b"), event("staged", 20, 20, id="c")]
    events = traced(process("trainer", uploads))
    lanes = {lane: [e["args"]["id"] for e in on_track(events, lane)] for lane in names(events).values()}
    assert lanes == {"uploads": ["a", "c"], "uploads 2": ["b"]}


def test_between_steps_that_do_not_follow_each_other_no_idle_is_marked() -> None:
    """The trainer was restored to an earlier step: that is no boundary."""
    orchestrator, trainer, _ = schedule(steps=2)
    again = [replace(e, step=e.step + 4) if e.step == 1 else e for e in trainer.events]
    assert on_track(traced(orchestrator, trainer), "idle")
    assert not on_track(traced(orchestrator, replace(trainer, events=again)), "idle")


def flow(events: list[dict[str, Any]]) -> list[list[str]]:
    """Per flow the tracks that it goes through."""
    known = names(events)
    found: dict[int, list[str]] = {}
    for e in events:
        if e["ph"] in "stf":
            found.setdefault(e["id"], []).append(known[e["tid"]])
    return list(found.values())


WHOLE_WAY = ["packer", "slot 0", "uploads", "dispatch", "device"]


def test_arrows_lead_a_microbatch_from_packed_to_ready() -> None:
    orchestrator, trainer, _ = schedule(steps=1, microbatches=1)
    assert flow(traced(orchestrator, trainer)) == [WHOLE_WAY]


@pytest.mark.parametrize(
    ("lost", "way"),
    [
        (("packed",), WHOLE_WAY[1:]),
        (("published",), WHOLE_WAY[2:]),
        (("staged",), ["packer", "slot 0", "dispatch", "device"]),
        (("ready",), WHOLE_WAY[:4]),
        (("staged", "dispatched"), WHOLE_WAY[:2]),  # ready is an instant then
    ],
)
def test_arrows_pass_over_what_is_missing(lost: tuple[str, ...], way: list[str]) -> None:
    orchestrator, trainer, _ = schedule(steps=1, microbatches=1)
    left = [replace(p, events=[e for e in p.events if e.event not in lost]) for p in (orchestrator, trainer)]
    assert flow(traced(*left)) == [way]


def test_a_replay_and_a_second_host_have_arrows_of_their_own() -> None:
    orchestrator, trainer, truth = schedule(steps=1, microbatches=1)
    of = {"step": 0, "index": 0, "id": truth.identities[0], "kind": "replay"}
    at = max(e.t for e in trainer.events)
    replayed = [event("dispatched", at, at + 10, **of), event("ready", at + 100, **of)]
    other = replace(trainer, pid=9, process="trainer-1")
    trainer = replace(trainer, events=[*trainer.events, *replayed])
    assert flow(traced(orchestrator, trainer, other)) == [WHOLE_WAY, WHOLE_WAY, ["dispatch", "device"]]


def test_what_is_staged_again_begins_an_arrow_of_its_own() -> None:
    orchestrator, trainer, _ = schedule(steps=1, microbatches=1)
    staged = next(e for e in trainer.events if e.event == "staged")
    lost = replace(staged, t=staged.t - 1000, end=staged.t - 500)
    trainer.events.append(lost)
    assert flow(traced(orchestrator, trainer)) == [WHOLE_WAY[:3], WHOLE_WAY[2:]]


def test_hosts_with_clocks_of_their_own_are_aligned_by_the_wall() -> None:
    orchestrator, trainer, _ = schedule(steps=1)
    hours = 3600 * 10**9
    moved = [replace(e, t=e.t + hours, end=e.end and e.end + hours) for e in trainer.events]
    elsewhere = replace(trainer, events=moved, wall_offset_ns=trainer.wall_offset_ns - hours)
    assert traced(orchestrator, elsewhere) == traced(orchestrator, trainer)
    # one clock, read at two moments: the difference of the readings is no difference of the clocks
    near = replace(trainer, wall_offset_ns=trainer.wall_offset_ns + 10 * MS)
    assert traced(orchestrator, near) == traced(orchestrator, trainer)


def test_events_of_a_damaged_clock_are_left_out_and_counted(tmp_path: Path) -> None:
    orchestrator, trainer, _ = schedule(steps=1)
    whole = traced(orchestrator, trainer)
    wild = [event("staged", -REACH_NS, 1), event("retired", 1 << 62), event("staged", 50 * MS, 1 << 62)]
    trainer.events += wild
    assert traced(orchestrator, trainer) == whole
    kept(tmp_path, [orchestrator, trainer])
    assert write_trace(tmp_path, tmp_path / "t.json").left_out == 3


def test_figures_that_not_every_reader_takes_are_written_as_text(tmp_path: Path) -> None:
    odd = {"a": float("nan"), "b": 1 << 70, "c": "\ud800", "d": [1], "e": None, "f": True, "g": "x" * 999, "": 1.5}
    events = traced(process("trainer", [event("staged", 1, 2, id="\udfff", **odd), event("memory", 3, **odd)]))
    (upload,) = on_track(events, "uploads")
    assert upload["args"] == {
        "id": "?", "?": 1.5, "a": "nan", "b": str(1 << 70), "c": "?", "d": "[1]", "e": "None", "f": True,
        "g": "x" * 200,
    }  # fmt: skip
    assert [(e["name"], e["args"]) for e in events if e["ph"] == "C"] == [("?", {"value": 1.5})]


def test_counters_have_the_names_that_perfetto_shows() -> None:
    figures = {"free_slots": 2, "held_nbytes": 10, "queued": 1}
    both = [event("gauged", 5, **figures), event("memory", 5, rss_nbytes=7, shared_nbytes=8)]
    counted = {e["name"]: e["args"] for e in traced(process("trainer", both[:1])) if e["ph"] == "C"}
    assert counted == {"free": {"slots": 2}, "bytes": {"held": 10}, "queue": {"depth": 1}}
    memory = [(e["name"], e["args"]) for e in traced(process("trainer", both[1:])) if e["ph"] == "C"]
    assert memory == [("memory", {"resident": 7}), ("memory", {"shared": 8})]


def test_what_was_lost_is_said_with_the_process() -> None:
    lost = replace(process("trainer", [event("retired", 5)]), dropped=3, beginning_lost=True)
    labels = [e["args"]["labels"] for e in traced(lost) if e["name"] == "process_labels"]
    assert labels == ["the beginning made room for newer events, 3 events dropped"]


def test_a_run_without_events_and_an_unwritable_path_are_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no events in"):
        write_trace(tmp_path, tmp_path / "t.json")
    kept(tmp_path, [process("trainer", [event("retired", 5)])])
    (tmp_path / "d").mkdir()
    with pytest.raises(SettingsError, match="choose another --trace"):
        write_trace(tmp_path, tmp_path / "d")
    with pytest.raises(SettingsError, match="choose another --trace"):
        write_trace(tmp_path, tmp_path / "no" / "t.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "events"]


def test_figures_are_those_of_the_trace(tmp_path: Path) -> None:
    kept(tmp_path, [process("trainer", [event("staged", 5, 9), event("retired", 9), event("memory", 9, rss_nbytes=3)])])
    assert write_trace(tmp_path, tmp_path / "t.json") == TraceFigures(
        slices=1, instants=1, flows=0, arrows=0, counters=1, tracks=2, left_out=0
    )

"""What real processes note: every event, in order, so that trace, page and step lines tell of the same waits."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from command_line import finish, kill_role, start, wait_for_step

from shmstage.events import LANES
from shmstage.launch.run_directory import completed
from shmstage.launch.single_host import run
from shmstage.operate.report_command import main as report
from shmstage.operate.report_inputs import record_of
from shmstage.settings import BOUNDARIES, Settings
from shmstage.testing.trace_checker import counts_of, faults_of
from shmstage.timeline.boundaries import boundaries_of
from shmstage.timeline.microbatches import Attempt, attempts_of
from shmstage.timeline.reading import ProcessEvents, read_events
from shmstage.timeline.run_report import report_of
from shmstage.timeline.trace import write_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS, MICROBATCHES, ROWS, TOKENS = 5, 3, 8, 32
#: the way of a micro-batch, whichever process notes it
WAY = (
    "slot_asked", "slot_acquired", "pack_begun", "packed", "published", "sent", "received", "upload_begun",
    "dispatch_begun", "dispatch_returned",
)  # fmt: skip


class Quiet:
    def poll(self) -> None:
        return


def simulated(out: Path, mode: str, **more: Any) -> Settings:
    """A run on a device that takes a given time; nothing is compiled."""
    return completed(Settings(
        run=f"events-{os.getpid()}-{out.name}", out=out, boundary=mode,  # type: ignore[arg-type]
        rows=ROWS, tokens=TOKENS, microbatches_per_step=MICROBATCHES, checkpoint_every=1, weight_sync="async",
        latch=False,
        engine="shmstage.testing.engines_simulated:make_engine",
        engine_settings={"microbatch_s": 0.004, "update_s": 0.002, "upload_gbps": 0.01, "settles": True},
        source="shmstage.testing.simulated_input:make_source",
        source_settings={"rows": ROWS, "tokens": TOKENS},
        **{"steps": STEPS, **more},
    ))  # fmt: skip


@pytest.fixture(scope="module", params=BOUNDARIES)
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """OUT of a run in each mode."""
    path = tmp_path_factory.mktemp("runs") / str(request.param)
    run(simulated(path, request.param), Quiet())
    yield path


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def attempt_of(out: Path) -> Attempt:
    (attempt,) = attempts_of(read_events(out))
    return attempt


def names_in(processes: list[ProcessEvents]) -> set[str]:
    return {event.event for process in processes for event in process.events}


def assert_same_idle(out: Path) -> None:
    """Of every boundary: the step line's idle is what the events give, to the nanosecond."""
    from_events = {b.after.step: b.idle.idle_ns / 1e9 for a in attempts_of(read_events(out)) for b in boundaries_of(a)}
    from_lines = {line["step"]: line["boundary_idle_s"] for line in lines_of(out)}
    assert from_lines.pop(1) is None
    assert len(from_lines) > 1 and from_events == from_lines


def test_every_event_that_applies_is_noted_by_its_process(out: Path) -> None:
    orchestrator, trainer = sorted(read_events(out), key=lambda process: process.process)
    assert (orchestrator.process, trainer.process) == ("orchestrator", "trainer")
    found = names_in([orchestrator, trainer])
    assert found == set(LANES) - {"patched", "scored"}  # nothing is scored here
    assert names_in([orchestrator]) & names_in([trainer]) == {"memory"}
    for process in (orchestrator, trainer):
        assert (process.dropped, process.unread, process.beginning_lost) == (0, 0, False)
        assert all(event.lane == LANES[event.event] for event in process.events)


def test_the_instants_of_a_microbatch_follow_each_other(out: Path) -> None:
    attempt = attempt_of(out)
    assert sorted(step for step in attempt.steps if step) == list(range(1, STEPS + 1))
    micros = [micro for step in attempt.steps.values() for micro in step.microbatches.values()]
    assert len(micros) == STEPS * MICROBATCHES
    for micro in micros:
        way = [getattr(micro, name) for name in WAY]
        assert all(way) and way == sorted(way), micro
        assert micro.upload_begun < micro.staged_ready <= micro.ready and micro.dispatch_begun < micro.ready
        assert micro.upload_begun < micro.lease_ended and micro.settled
        assert (micro.slot >= 0, micro.tokens) == (True, ROWS * TOKENS) and micro.nbytes > ROWS * TOKENS * 4
    # the last places are not asked for again, so nobody looks whether they are free
    retired = [micro for micro in micros if micro.retired]
    assert len(retired) >= len(micros) - 2
    assert all(micro.retired >= max(micro.finished, micro.settled, micro.staged_ready) for micro in retired)


def test_an_update_lands_after_its_microbatches_and_what_is_saved_after_it(out: Path) -> None:
    for number, step in attempt_of(out).steps.items():
        if number:
            assert max(m.ready for m in step.microbatches.values()) <= step.update_landed
            assert step.update_dispatched <= step.update_returned <= step.update_landed
            assert step.checkpoint_durable > step.update_landed and step.weights_published > step.update_landed


def test_calls_are_told_by_both_sides_with_what_they_carry(out: Path) -> None:
    by_process = {process.process: process.events for process in read_events(out)}
    sides = [
        {e.figures["sequence"]: e for e in by_process[process] if e.event == name}
        for process, name in (("orchestrator", "called"), ("trainer", "received"), ("trainer", "executed"))
    ]
    called, received, executed = ({k: e for k, e in side.items() if k} for side in sides)  # 0 is the handshake
    assert called.keys() == received.keys() == executed.keys()
    for sequence, call in called.items():
        assert call.t <= received[sequence].t <= call.end and received[sequence].t == executed[sequence].t
        assert call.figures["command"] == received[sequence].figures["command"] == executed[sequence].figures["command"]
        known = received[sequence]
        assert (known.index, known.id) == (call.index, call.id) and known.step in (call.step, -1)
    asked = Counter(e.figures["command"] for e in called.values() if e.step >= 0)
    assert asked["get_metrics"] == STEPS and asked["apply_deferred_update"] in (0, STEPS, STEPS - 1)


def test_the_idle_of_the_step_lines_comes_out_of_the_events(out: Path) -> None:
    assert_same_idle(out)


def test_the_trace_has_no_fault_and_marks_the_same_idle(out: Path, tmp_path: Path) -> None:
    figures = write_trace(out, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert faults_of(text) == []
    assert counts_of(text).flows == figures.flows == STEPS * MICROBATCHES and figures.left_out == 0
    marked = Counter[int]()
    for mark in json.loads(text)["traceEvents"]:
        if mark.get("ph") == "X" and str(mark["name"]).startswith("idle after step"):
            marked[mark["args"]["step"] + 1] += round(mark["dur"] * 1000)
    told = {line["step"]: round(line["boundary_idle_s"] * 1e9) for line in lines_of(out)[1:]}
    assert {step: marked[step] for step in told} == told


def test_the_page_is_built_and_finds_nothing_odd(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report([str(out), "--out", str(tmp_path / "report.html"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (of_run,) = told["runs"]
    summary = json.loads((out / "summary.json").read_text())
    assert of_run["boundary_idle_s"] == summary["boundary_idle_s"] and of_run["step_s"] == summary["step_s"]
    assert of_run["boundaries"] == of_run["with_events"] == of_run["drawn"] == STEPS - 1
    assert not [text for text in told["warnings"] if "instants drawn" in text or "missing" in text], told["warnings"]
    memory = report_of(record_of(str(out))).memory["curves"]
    assert {"orchestrator resident", "trainer resident", "held by the feeder"} <= memory.keys()


def test_scores_and_late_fields_are_noted_and_are_no_idle_in_the_same_way(tmp_path: Path) -> None:
    from shmstage.demo.source import recorded_bundle

    settings = Settings(
        run=f"events-{os.getpid()}-scored", out=tmp_path / "out", boundary="staged_before_update", steps=4,
        microbatches_per_step=2, recompute_old_logps=True, reference_logps=True, checkpoint_every=2,
        weight_sync="async", eval_bundle=recorded_bundle(), eval_every=2,
    )  # fmt: skip
    run(completed(settings), Quiet())
    processes = read_events(tmp_path / "out")
    assert names_in(processes) == set(LANES)
    scored = Counter(e.figures["kind"] for p in processes for e in p.events if e.event == "scored")
    assert scored["actor"] == scored["reference"] == 8 and scored["eval"] > 0
    assert_same_idle(tmp_path / "out")
    write_trace(tmp_path / "out", tmp_path / "trace.json")
    assert faults_of((tmp_path / "trace.json").read_text()) == []


def test_a_killed_trainer_leaves_what_it_noted_and_its_successor_goes_on_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[engine]\nfactory = "shmstage.testing.engines_simulated:make_engine"\nmicrobatch_s = 0.02\n'
        f'checkpoint_dir = "{tmp_path / "out" / "checkpoints"}"\n'
        '[source]\nfactory = "shmstage.testing.simulated_input:make_source"\nrows = 8\ntokens = 32\n'
    )
    process = start(
        "run", "--config", "run.toml", "--rows", "8", "--tokens", "32", "--steps", "40", "--checkpoint-every", "1",
        "--boundary", "staged_before_update", "--restart-backoff-s", "0.05", "--no-latch", "--out", "out", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    wait_for_step(process, 5)
    kill_role(process, tmp_path / "out", "trainer")
    code, _, err = finish(process)
    assert code == 0, err
    processes = read_events(tmp_path / "out")
    starts = [process for process in processes if process.process == "trainer"]
    assert len(starts) == 2 and len({process.pid for process in starts}) == 2
    assert all(process.unread == 0 and process.events for process in processes)
    attempts = attempts_of(processes)
    assert len(attempts) == 2
    assert max(attempts[0].steps) >= 4 and max(attempts[1].steps) == 40
    write_trace(tmp_path / "out", tmp_path / "trace.json")
    assert faults_of((tmp_path / "trace.json").read_text()) == []
    assert report([str(tmp_path / "out"), "--out", str(tmp_path / "report.html"), "--json"]) == 0


def test_events_change_nothing_and_where_they_are_off_nothing_is_written(tmp_path: Path) -> None:
    made = {
        events: run(simulated(tmp_path / events, "staged_before_update", steps=2, events=events), Quiet())
        for events in ("on", "off")
    }
    for key in ("param_digest", "digests", "losses", "denominators"):
        assert made["on"][key] == made["off"][key]
    assert (tmp_path / "on" / "events").is_dir() and not (tmp_path / "off" / "events").exists()


def test_where_events_cannot_be_written_the_run_goes_on(tmp_path: Path) -> None:
    """One process meets a full disk, the other cannot open its file. (What lies behind a link is not removed.)"""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    whole = run(simulated(out, "staged_before_update", steps=2), Quiet())
    (out / "events").rename(elsewhere)
    (out / "events").symlink_to(elsewhere)
    for process in ("trainer", "orchestrator"):
        (elsewhere / f"{process}.jsonl").unlink()
    (elsewhere / "trainer.jsonl").symlink_to("/dev/full")
    (elsewhere / "orchestrator.jsonl").mkdir()
    shutil.rmtree(out / "checkpoints")  # so that it may start anew there
    again = run(simulated(out, "staged_before_update", steps=2), Quiet())
    assert (again["steps"], again["param_digest"]) == (2, whole["param_digest"])
    assert "record lost" in (out / "trainer.log").read_text()
    assert "no more events are written" in (out / "orchestrator.log").read_text()


def test_a_fresh_start_in_the_same_place_begins_its_events_anew(tmp_path: Path) -> None:
    for _ in range(2):
        shutil.rmtree(tmp_path / "out" / "checkpoints", ignore_errors=True)
        assert run(simulated(tmp_path / "out", "serial", steps=2), Quiet())["steps"] == 2
    assert [process.process for process in read_events(tmp_path / "out")] == ["orchestrator", "trainer"]

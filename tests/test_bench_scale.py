"""The model to scale: its core keeps order, it gives back what was measured, and it fails when an input is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
Bench = Callable[[str], Any]
ORDERS = ("serial", "pipelined", "staged_after_update", "staged_before_update")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Imports a script of ``bench/``, which finds its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


# --- the core ---------------------------------------------------------------------------------------------


def test_who_asked_first_goes_first_at_one_instant(bench: Bench) -> None:
    simulation, went = bench("scale_events").Simulation(), []

    def process(name: str, seconds: float) -> Generator[float, None, None]:
        yield seconds
        went.append((simulation.now, name))

    for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 2.0), ("d", 0.0)):
        simulation.spawn(process(name, seconds))
    simulation.run()
    assert went == [(0.0, "d"), (1.0, "b"), (2.0, "a"), (2.0, "c")]


def test_a_resource_serves_in_order_and_adds_up_what_was_held(bench: Bench) -> None:
    events = bench("scale_events")
    simulation = events.Simulation()
    places = events.Resource(simulation, "places", 2)
    held = {"a": 4.0, "b": 1.0, "c": 2.0, "d": 0.5}
    ended = {name: simulation.spawn(places.hold(seconds), name) for name, seconds in held.items()}
    simulation.run()
    # c has b's place next, and d has to wait for c
    assert {name: each.when for name, each in ended.items()} == {"a": 4.0, "b": 1.0, "c": 3.0, "d": 3.5}
    assert places.busy_s == sum(held.values())


def test_a_signal_wakes_all_who_wait_and_holds_up_nobody_who_comes_late(bench: Bench) -> None:
    events = bench("scale_events")
    simulation, signal, at = events.Simulation(), events.Signal("it"), []

    def wait(before: float) -> Generator[Any, None, None]:
        yield before
        yield signal
        at.append(simulation.now)

    def tell() -> Generator[float, None, None]:
        yield 3.0
        simulation.fire(signal)

    for process in (wait(0.0), wait(1.0), wait(5.0), tell()):
        simulation.spawn(process)
    simulation.run()
    assert at == [3.0, 3.0, 5.0] and signal.when == 3.0
    with pytest.raises(ValueError, match=r"it happened at 3\.0 already"):
        simulation.fire(signal)


def test_a_model_that_cannot_go_on_says_what_it_waits_for(bench: Bench) -> None:
    events = bench("scale_events")
    simulation = events.Simulation()
    places = events.Resource(simulation, "slots")

    def greedy() -> Generator[Any, None, None]:
        yield places.acquire()
        yield places.acquire()

    simulation.spawn(greedy())
    with pytest.raises(events.StuckError, match="a place of slots"):
        simulation.run()
    with pytest.raises(events.StuckError, match="has not happened"):
        _ = events.Signal("it").when


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_time_goes_forward_only(bench: Bench, seconds: float) -> None:
    simulation = bench("scale_events").Simulation()
    simulation.spawn(iter([seconds]))
    with pytest.raises(ValueError, match="want a finite number, 0 or more"):
        simulation.run()


# --- the calibration --------------------------------------------------------------------------------------


def test_every_measured_arm_comes_out_within_ten_percent(bench: Bench) -> None:
    calibration = bench("scale_calibration")
    figures = calibration.figures_of()
    targets = calibration.targets_of(figures)
    assert len(targets) == 16 and all(each["target"] == 10.0 for each in targets)
    assert calibration.problems_of(figures) == []
    figures["A0 2"]["device_idle_s"] += 0.001
    assert [each.partition(" s by")[0] for each in calibration.problems_of(figures)] == [
        f"A0 2: idle {figures['A0 2']['idle_s']['model']}"
    ]
    assert max(each["value"] for each in targets) < 10


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("microbatch_s", 1.1), ("microbatch_s", 0.85), ("update_s", 1.1), ("arrival_call_s", 1.25),
        ("arrival_call_s", 0.9), ("arrival_stage_s", 1.1), ("arrival_stage_s", 0.9), ("placing_call_s", 0.8),
        ("placing_call_s", 1.4), ("placing_staged_s", 1.15), ("placing_staged_s", 0.9), ("device_wait_s", 1.1),
        ("bookkeeping_s", 2.1), ("readiness_s", 1.3), ("after_landing_s", 1.1), ("after_landing_s", 0.7),
    ],
)  # fmt: skip
def test_a_wrong_duration_is_noticed(bench: Bench, name: str, factor: float) -> None:
    calibration, reference = bench("scale_calibration"), bench("scale_inputs").REFERENCE
    wrong = replace(reference, **{name: getattr(reference, name) * factor})
    assert calibration.problems_of(calibration.figures_of(wrong))


def test_a_loop_without_what_the_reference_blocks_on_is_noticed(bench: Bench) -> None:
    """The step at 3 per step is 10 s longer than compute and boundary: a call inside it waits for the devices."""
    inputs, reference = bench("scale_inputs"), bench("scale_reference")
    free = reference.ReferenceLoop(inputs.REFERENCE, "serial", 3, blocks=False).run()
    assert free.step_s < 0.9 * inputs.TPU_RIG["A0", 3][1] and free.instep_idle_s == pytest.approx(0, abs=1e-6)


def test_a_call_of_the_reference_returns_when_the_microbatch_before_it_is_done(bench: Bench) -> None:
    inputs = bench("scale_inputs")
    quick = replace(inputs.REFERENCE, arrival_call_s=0.5, placing_call_s=0.5)
    loop = bench("scale_reference").ReferenceLoop(quick, "serial", 9)
    loop.run()
    step = [each for each in loop.device.operations if each.name.endswith(" of step 4")]
    assert all(later.dispatched >= earlier.finished.when for earlier, later in zip(step, step[2:], strict=False))


def test_bookkeeping_behind_the_first_call_delays_the_second_only(bench: Bench) -> None:
    inputs, reference = bench("scale_inputs"), bench("scale_reference")
    given = replace(inputs.REFERENCE, bookkeeping_s=5.0)
    found, before = (reference.ReferenceLoop(each, "pipelined", 2).run() for each in (given, inputs.REFERENCE))
    assert found.idle_s == pytest.approx(before.idle_s)
    late = 5.0 + given.arrival_call_s + given.placing_call_s - given.microbatch_s
    assert found.instep_idle_s == pytest.approx(late, abs=0.01)


def test_inferred_inputs_are_what_their_source_gives(bench: Bench) -> None:
    inputs, own = bench("scale_inputs"), bench("scale_calibration").own_arrival_s
    given, net = inputs.REFERENCE, inputs.NET_IDLE_S
    assert given.arrival_call_s == pytest.approx(sum(map(own, ("A0", "A0p", "A1"))) / 3, abs=0.005)
    assert given.arrival_stage_s == pytest.approx(sum(map(own, ("A2", "A3"))) / 2, abs=0.005)
    assert given.bookkeeping_s == pytest.approx((net["A0"] + net["A0p"]) / 2 - net["A1"], abs=0.005)


def test_with_each_arms_own_upload_the_structure_is_exact(bench: Bench) -> None:
    """At 2 per step, where the reference told what every arm's uploads took, what is left is below 2 %."""
    own = bench("scale_calibration").other_arrivals()["each arm's own at 2 per step"]
    assert all(abs(value) < 0.02 for arm, each in own.items() if arm.endswith(" 2") for value in each.values())


def test_figures_that_gave_no_input_come_out_too(bench: Bench) -> None:
    rows = bench("scale_calibration").held_out()
    assert len(rows) == 4 and all(abs(each["off"]) < 0.01 for each in rows)


def test_serial_idle_is_the_sum_of_its_legs(bench: Bench) -> None:
    given = bench("scale_inputs").REFERENCE
    legs = given.readiness_s + given.after_landing_s + given.bookkeeping_s + given.arrival_call_s + given.placing_call_s
    # a readiness more at 2 per step: the call with the flush in it has seen the last micro-batch when it returns
    found = {count: bench("scale_reference").ReferenceLoop(given, "serial", count).run() for count in (2, 3)}
    assert found[3].idle_s == pytest.approx(legs, abs=1e-6)
    assert found[2].idle_s == pytest.approx(legs + given.readiness_s, abs=1e-6)


def test_an_arrival_longer_than_the_last_microbatch_is_idle_before_the_update(bench: Bench) -> None:
    inputs, reference = bench("scale_inputs"), bench("scale_reference")
    slow = replace(inputs.REFERENCE, arrival_stage_s=20.0, device_wait_s=0.0, placing_staged_s=0.0)
    found = reference.ReferenceLoop(slow, "staged_before_update", 3).run()
    exposed = 20.0 - slow.microbatch_s + 2 * slow.readiness_s + slow.after_landing_s
    assert found.idle_s == pytest.approx(exposed, abs=0.01)


# --- the predictions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["blocks", "free"])
@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_the_estimators_agree_with_the_devices_own_begin_and_end(bench: Bench, engine: str, microbatches: int) -> None:
    predictions = bench("scale_predictions")
    told = [predictions.predict(law, engine, microbatches, n) for law in ("rows", "batch") for n in (1, 2, 1024)]
    assert predictions.problems_of(told) == []
    for each in told:
        ideal = microbatches * each["microbatch_s"] + 1.5
        for side in ("reference", "ours"):
            for order in ORDERS:
                times = each[side][order]
                assert times["idle_s"] >= 0 and times["instep_idle_s"] >= -1e-6
                assert times["step_s"] == pytest.approx(ideal + times["idle_s"] + times["instep_idle_s"], abs=1e-5)
    told[0]["ours"]["serial"]["idle_off_s"] = 0.5
    assert len(predictions.problems_of(told)) == 1


def test_the_model_says_the_same_twice(bench: Bench) -> None:
    predict = bench("scale_predictions").predict
    assert json.dumps(predict("batch", "blocks", 3, 512)) == json.dumps(predict("batch", "blocks", 3, 512))


def test_both_laws_are_the_measured_job_at_its_size(bench: Bench) -> None:
    predict = bench("scale_predictions").predict
    rows, batch = predict("rows", "blocks", 3, 32), predict("batch", "blocks", 3, 32)
    assert rows["chips"] == 128 and rows["reference"] == batch["reference"] and rows["ours"] == batch["ours"]
    assert rows["reference"]["serial"]["idle_s"] == bench("scale_calibration").figures_of()["A0 3"]["idle_s"]["model"]


def test_jobs_grow_by_their_law(bench: Bench) -> None:
    inputs = bench("scale_inputs")
    assert inputs.job("rows", 64) == inputs.Job(64, 2 * 5.15e9, 13.38, 256, 128)
    assert inputs.job("batch", 64) == inputs.Job(64, 5.15e9, 13.38 / 2, 128, 64)
    given = inputs.REFERENCE
    idle_s = bench("scale_predictions").predict("rows", "blocks", 3, 64)["reference"]["serial"]["idle_s"]
    fixed = given.readiness_s + given.after_landing_s + given.bookkeeping_s
    assert idle_s == pytest.approx(fixed + 2 * (given.arrival_call_s + given.placing_call_s), abs=1e-6)


def test_our_serial_order_packs_after_the_books(bench: Bench) -> None:
    inputs = bench("scale_inputs")
    given, ours = inputs.REFERENCE, inputs.OURS
    encoded_nbytes = 5.15e9 * ours.upload_share
    legs = given.readiness_s + given.bookkeeping_s + encoded_nbytes / ours.fill_rate + encoded_nbytes / ours.upload_rate
    idle_s = bench("scale_predictions").predict("batch", "blocks", 3, 1)["ours"]["serial"]["idle_s"]
    # that the update's landing is seen, and a call that may wait until 128 trajectories of another are planned
    assert idle_s == pytest.approx(legs + given.readiness_s, abs=0.003)


def test_the_funnel_stands_where_the_reference_says(bench: Bench) -> None:
    load = bench("scale_predictions").predict("rows", "blocks", 3, 256)["reference_load"]
    assert load["orchestrator_ram_nbytes"] == pytest.approx(205e9)
    assert load["orchestrator_network_nbytes"] == pytest.approx(3 * 8 * 5.15e9)


def test_plans_travel_and_payloads_do_not(bench: Bench) -> None:
    inputs, predict = bench("scale_inputs"), bench("scale_predictions").predict
    for hosts, shared in ((2, 0), (32, 0), (1024, 15)):  # 64 rows: 16 hosts have tokens of one
        told = predict("batch", "free", 3, hosts)
        load, payload_nbytes = told["load"], told["payload_nbytes"]
        assert load["host_fetched_nbytes"] == pytest.approx(3 * payload_nbytes / 7 / hosts * (1 - 1 / hosts))
        commands = load["messages"] * inputs.OURS.message_nbytes
        assert load["orchestrator_network_nbytes"] == pytest.approx(3 * 128 * (256 + 112 * shared) + commands)
        assert load["orchestrator_network_nbytes"] < 0.01 * told["reference_load"]["orchestrator_network_nbytes"]


def test_one_host_has_no_network_and_twice_the_hosts_twice_the_messages(bench: Bench) -> None:
    load = {hosts: bench("scale_predictions").predict("rows", "blocks", 3, hosts)["load"] for hosts in (1, 2, 4)}
    assert load[1]["orchestrator_network_nbytes"] == 0 and load[1]["host_fetched_nbytes"] == 0
    assert load[4]["messages"] == 2 * load[2]["messages"] > 4 * load[1]["messages"]


def test_two_phases_that_nothing_hides_stand_in_the_idle(bench: Bench) -> None:
    """Staged before the update, an engine that settles: get_metrics and F's call hide behind the update alone."""
    inputs, ours = bench("scale_inputs"), bench("scale_ours")
    given = replace(inputs.OURS, host_call_s=0.0, network_s=0.0, call_rest_s=0.5)
    job = inputs.job("rows", 2)
    found, _ = ours.OurLoop(job, "staged_before_update", 3, given=given).run()
    # the apply's reply takes half a rest, two commands of two phases follow, F is dispatched in the middle of the last
    after_dispatch = 0.25 + 3 * 0.5 + 0.25
    assert found.idle_s == pytest.approx(inputs.REFERENCE.readiness_s + after_dispatch - 1.5, abs=1e-6)


def test_without_costs_of_its_own_nothing_of_ours_is_idle(bench: Bench) -> None:
    inputs, ours = bench("scale_inputs"), bench("scale_ours")
    names = [each.name for each in fields(inputs.OURS) if each.metadata["unit"] == "s"]
    free = replace(inputs.OURS, **dict.fromkeys(names, 0.0))
    for order in ORDERS[1:]:
        found, _ = ours.OurLoop(inputs.job("rows", 1024), order, 3, blocks=False, given=free).run()
        assert found.idle_s == 0 and found.step_s == pytest.approx(3 * 13.38 + 1.5)


def test_an_upload_that_outlasts_compute_is_idle(bench: Bench) -> None:
    inputs, ours = bench("scale_inputs"), bench("scale_ours")
    job = inputs.job("rows", 4)
    upload_s = 20.0
    slow = replace(inputs.OURS, upload_rate=job.payload_nbytes * inputs.OURS.upload_share / job.hosts / upload_s)
    found, _ = ours.OurLoop(job, "staged_before_update", 3, blocks=False, given=slow).run()
    # one copy after another: a step is three of them, and what calls and buffers cost between two of them
    assert 3 * upload_s <= found.step_s < 3 * upload_s + 0.05
    assert found.idle_s + found.instep_idle_s == pytest.approx(found.step_s - 3 * 13.38 - 1.5, abs=1e-5)


# --- the script -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_script_tells_assumptions_calibration_and_predictions(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "scale.py"), "--hosts", "1,1024", "--laws", "rows", "--engines", "blocks"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path), "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout)
    assert result["problems"] == [] and len(result["targets"]) == 16 and len(result["figures"]) == 10
    assert [each["hosts"] for each in result["predictions"]] == [1, 1024]
    told = {each["name"]: each for each in result["assumptions"]}
    kinds = {"stated", "measured", "inferred", "assumed"}
    assert all(each["source"] and each["kind"] in kinds for each in told.values())
    low, high = told["arrival_stage_s"]["holds_between"]
    assert 0.9 < low < 1 < high < 1.1
    assert result["machine"] and json.loads((tmp_path / "scale.json").read_text())["script"] == "scale"
    assert (tmp_path / "scale.svg").exists() != any("matplotlib" in note for note in result["notes"])
    table = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "arrival_stage_s" in table and "ours serial" in table and "MISSED" not in table


@pytest.mark.parametrize("arguments", [["--hosts", "0"], ["--hosts", "x"], ["--laws", "moon"], ["--engines", "steam"]])
def test_the_script_refuses_what_it_does_not_know(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        bench("scale").main()
    assert stopped.value.code == 2 and arguments[1] in capsys.readouterr().err

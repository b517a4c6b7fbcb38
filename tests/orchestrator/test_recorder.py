"""Recording takes nothing from the run: not its time, not its memory, not its end. What it makes replays exactly."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from input_making import TOKENS, Given, make_group, plan_settings

from shmstage.errors import BundleError, RunFailedError, StoppedError
from shmstage.memory.handle import Handle
from shmstage.orchestrator.assembly import plan_settings as plan_settings_of
from shmstage.orchestrator.input import Input
from shmstage.orchestrator.intake import Intake, Planned
from shmstage.orchestrator.recorder import Recorder, recorder_of
from shmstage.packing.bundle import Bundle, read_bundle
from shmstage.packing.fill import microbatch_digest
from shmstage.packing.plan import PlanSettings
from shmstage.packing.recording import Recording
from shmstage.packing.source import BundleSource
from shmstage.settings import Settings

WAIT_S = 20.0


def made(tmp_path: Path, **changes: Any) -> Settings:
    plain = {
        "run": "r", "out": tmp_path / "out", "record": tmp_path / "recorded", "record_steps": "2:3", "rows": 2,
        "tokens": TOKENS, "microbatches_per_step": 2,
    }  # fmt: skip
    return Settings(**{**plain, **changes})


def planned(settings: Settings, groups: int = 30) -> list[Planned]:
    source = Given([make_group(number, number // 4, [5, 3 + number % 7]) for number in range(groups)])
    return list(Intake(source, plan_settings_of(settings), passes=1))


def digest_of(planned: Planned) -> str:
    trajectories: Any = {number: arrival.trajectory for number, arrival in planned.arrivals.items()}
    return microbatch_digest(planned.plan, trajectories).hex()


def handle(planned: Planned, step: int, index: int) -> Handle:
    return cast(Handle, SimpleNamespace(step=step, index=index, digest=bytes.fromhex(digest_of(planned))))


def feed(
    recorder: Recorder, microbatches: list[Planned], per_step: int, *, begin: int = 1, landed: bool = True
) -> None:
    recorder.begin(begin)
    for number, each in enumerate(microbatches):
        step, index = begin + number // per_step, number % per_step
        recorder.packed(each, handle(each, step, index))
        if landed and index == per_step - 1:
            recorder.landed(step)


def bundle_of(settings: Settings) -> Bundle:
    assert settings.record is not None
    return read_bundle(settings.record)


def replayed(settings: Settings) -> list[str]:
    """Digests of the micro-batches that the bundle is planned into."""
    assert settings.record is not None
    source = Input(BundleSource(settings.record), settings)
    return [digest_of(each) for each in Intake(source, plan_settings_of(settings), passes=1)]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    recorders: list[Recorder] = []

    def make(settings: Settings, **options: Any) -> Recorder:
        if not options:
            recorders.append(cast(Recorder, recorder_of(settings)))
        else:
            assert settings.record is not None
            recorders.append(Recorder(Recording(settings.record, {"run": "r"}, goes_on=False), settings, **options))
        return recorders[-1]

    yield make
    for each in recorders:
        each.close()


def summary(recorder: Recorder) -> dict[str, Any]:
    return recorder.added_to({"warnings": []})


# --- what it makes ------------------------------------------------------------------------------------------


def test_without_record_there_is_no_recorder() -> None:
    assert recorder_of(Settings()) is None


def test_the_steps_that_are_named_are_recorded_and_planned_again_alike(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches, 2)
    assert summary(one)["recorded"] == {
        "path": str(settings.record), "steps": [2, 3], "trajectories": len(bundle_of(settings).trajectories),
    }  # fmt: skip
    assert replayed(settings) == [digest_of(each) for each in microbatches[2:6]]
    told = bundle_of(settings).manifest["provenance"]
    assert [each["digest"] for each in told["microbatches"]] == replayed(settings)
    assert (told["landed"], told["settings"]["rows"]) == (3, 2)


def test_the_bundle_is_there_as_soon_as_its_last_step_has_landed(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    one = recorder(settings)
    feed(one, planned(settings), 2)
    one._thread.join(WAIT_S)
    assert bundle_of(settings).manifest["provenance"]["steps"] == [2, 3]


def test_under_other_settings_it_is_planned_as_any_input_and_said_to_differ(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    one = recorder(settings)
    feed(one, planned(settings), 2)
    one.close()
    other = Input(BundleSource(tmp_path / "recorded"), made(tmp_path, rows=3))
    assert other.windows_are_microbatches is False
    assert other.replay is not None and other.replay.differences == ("rows = 2 there, 3 here",)


@st.composite
def inputs(draw: st.DrawFn) -> tuple[PlanSettings, list[list[int]]]:
    lengths = st.lists(st.integers(1, TOKENS), min_size=1, max_size=4)
    return draw(plan_settings), draw(st.lists(lengths, min_size=3, max_size=14))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(inputs(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_whatever_the_limits_are_a_recording_is_planned_into_the_very_micro_batches(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[PlanSettings, list[list[int]]],
    groups: int,
    first: int,
    passes: int,
) -> None:
    """With ``max_real_tokens`` a micro-batch may leave while rows of it are empty: alone, it has to all the same."""
    plan, lengths = case
    folder = tmp_path_factory.mktemp("recorded")
    chosen = made(
        folder, rows=plan.rows, tokens=TOKENS, max_segments_per_row=plan.max_segments_per_row,
        segment_align=plan.segment_align, max_real_tokens=plan.max_real_tokens, on_overlong="drop",
        record_steps=f"{first}:{first + 1}", steps=100,
    )  # fmt: skip
    source = Given([make_group(number, number // groups, each) for number, each in enumerate(lengths)])
    longest = plan_settings_of(chosen).longest
    if not any(length <= longest for each in lengths for length in each):
        return
    microbatches = list(Intake(source, plan_settings_of(chosen), passes=passes))
    one = cast(Recorder, recorder_of(chosen))
    feed(one, microbatches, 2)
    one.close()
    want = [digest_of(each) for each in microbatches[2 * (first - 1) : 2 * (first + 1)]]
    assert (replayed(chosen) if want else []) == want


# --- restarts -----------------------------------------------------------------------------------------------


def test_what_an_attempt_before_recorded_is_not_recorded_again(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches[:5], 2)  # up to the middle of step 3
    feed(one, microbatches[2:], 2, begin=2)
    assert summary(one)["warnings"] == []
    assert replayed(settings) == [digest_of(each) for each in microbatches[2:6]]


def test_a_successor_completes_what_was_begun(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches[:5], 2)
    one.close(goes_on=True)
    assert not (tmp_path / "recorded").exists()
    again = recorder(settings.model_copy(update={"resume": True}))
    feed(again, microbatches[4:], 2, begin=3)
    assert summary(again)["warnings"] == []
    assert replayed(settings) == [digest_of(each) for each in microbatches[2:6]]


def test_a_successor_tells_what_was_recorded_before_it(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    one = recorder(settings)
    feed(one, planned(settings), 2)
    told = summary(one)
    assert told["recorded"]["steps"] == [2, 3]
    assert summary(recorder(settings.model_copy(update={"resume": True}))) == told


def test_what_somebody_else_put_there_is_not_taken_for_a_recording(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path, resume=True)
    (tmp_path / "recorded").mkdir()
    one = recorder(settings)
    feed(one, planned(settings), 2)
    told = summary(one)
    assert told["recorded"]["steps"] == []
    assert "recorded is not what this run recorded, which records nothing" in told["warnings"][0]


def test_a_step_of_which_a_kill_lost_a_part_is_left_out(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches[:3], 2)  # the second micro-batch of step 2 was never written
    one.close(goes_on=True)
    again = recorder(settings.model_copy(update={"resume": True}))
    feed(again, microbatches[4:], 2, begin=3)  # step 2 is durable all the same
    told = summary(again)
    assert told["recorded"]["steps"] == [3]
    assert told["warnings"] == ["record_steps = 2:3: step 2 was not trained after this start"]
    assert replayed(settings) == [digest_of(each) for each in microbatches[4:6]]


def test_other_bytes_than_before_a_restart_end_the_recording(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches[:5], 2)
    feed(one, [*microbatches[2:4], microbatches[7]], 2, begin=2)
    told = summary(one)
    assert told["warnings"] == [
        "recording ends before step 3: its micro-batch 0 has another digest than before the restart"
    ]
    assert told["recorded"]["steps"] == [2]


# --- how a run ends -----------------------------------------------------------------------------------------


def test_a_run_that_fails_leaves_the_step_that_failed(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    microbatches = planned(settings)
    one = recorder(settings)
    feed(one, microbatches[:4], 2, landed=False)
    one.ended_by(RunFailedError, RunFailedError("step 2 failed"), None)
    assert bundle_of(settings).manifest["provenance"]["steps"] == [2]
    assert bundle_of(settings).manifest["provenance"]["landed"] == 0


def test_a_run_that_is_stopped_leaves_no_bundle_but_its_parts(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    one = recorder(settings)
    feed(one, planned(settings)[:4], 2)
    one.ended_by(StoppedError, StoppedError("by a signal"), None)
    assert not (tmp_path / "recorded").exists()
    assert (tmp_path / ".recorded.recording" / f"{2:015d}-{0:07d}" / "COMPLETE").exists()


def test_a_run_that_ends_before_its_steps_leaves_nothing_and_says_so(
    tmp_path: Path, recorder: Callable[..., Recorder]
) -> None:
    settings = made(tmp_path)
    one = recorder(settings)
    feed(one, planned(settings)[:2], 2)
    told = summary(one)
    assert told["recorded"]["steps"] == []
    assert told["warnings"] == ["record_steps = 2:3: step 2 was not trained after this start"]
    assert list(tmp_path.iterdir()) == []


# --- nothing waits for the disk -----------------------------------------------------------------------------


class Stuck:
    """The disk takes nothing until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes = threading.Event()
        self.begun = threading.Event()
        real = Recording.write

        def write(*arguments: Any) -> None:
            self.begun.set()
            assert self.goes.wait(WAIT_S)
            real(*arguments)

        monkeypatch.setattr(Recording, "write", write)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(monkeypatch)
    yield made
    made.goes.set()


def test_a_disk_that_does_not_keep_up_ends_the_recording_and_what_came_before_is_kept(
    tmp_path: Path, recorder: Callable[..., Recorder], stuck: Stuck
) -> None:
    settings = made(tmp_path, record_steps="1:4")
    microbatches = planned(settings)
    limit = sum(each.nbytes for each in microbatches[:4])
    one = recorder(settings, waiting_nbytes=limit)
    feed(one, microbatches[:8], 2)  # returns though nothing can be written
    assert one._held_nbytes <= limit
    stuck.goes.set()
    told = summary(one)
    assert told["recorded"]["steps"] == [1, 2]
    assert "recording ends before step 3: the disk does not keep up" in told["warnings"][0]
    assert replayed(settings) == [digest_of(each) for each in microbatches[:4]]


def test_one_micro_batch_may_be_larger_than_the_limit(tmp_path: Path, recorder: Callable[..., Recorder]) -> None:
    settings = made(tmp_path)
    one = recorder(settings, waiting_nbytes=1)
    microbatches = planned(settings)
    one.begin(2)
    for number, index in itertools.product((2, 3), (0, 1)):
        each = microbatches[2 * number - 2 + index]
        one.packed(each, handle(each, number, index))
        wait_until_written(one)
    one.landed(3)
    assert summary(one)["recorded"]["steps"] == [2, 3]


def wait_until_written(recorder: Recorder) -> None:
    with recorder._condition:
        assert recorder._condition.wait_for(lambda: not recorder._waiting, WAIT_S)


def test_a_disk_that_hangs_does_not_hold_up_the_end_of_the_run(
    tmp_path: Path, recorder: Callable[..., Recorder], stuck: Stuck
) -> None:
    settings = made(tmp_path)
    one = recorder(settings, close_s=0.0)
    feed(one, planned(settings), 2)
    assert stuck.begun.wait(WAIT_S)
    told = summary(one)
    assert told["recorded"]["steps"] == []
    assert told["warnings"] == ["recording ends before step 2: the disk did not take what was left within 0 s"]
    stuck.goes.set()
    one._thread.join(WAIT_S)
    assert not (tmp_path / "recorded").exists()


def test_the_end_of_the_run_waits_for_the_disk_once(
    tmp_path: Path, recorder: Callable[..., Recorder], stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made(tmp_path)
    one = recorder(settings, close_s=0.01)
    feed(one, planned(settings), 2)
    waits: list[float | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(one._thread, "join", waits.append)
        summary(one)
        one.ended_by(None, None, None)
    assert waits == [0.01, 0.0]


def test_a_full_disk_with_the_log_on_it_ends_the_recording_only(
    tmp_path: Path, recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    settings = made(tmp_path)
    one = recorder(settings, waiting_nbytes=1)
    monkeypatch.setattr(Recording, "write", full)
    microbatches = planned(settings)
    one.begin(2)
    with open("/dev/full", "w") as log, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", log)
        one.packed(microbatches[2], handle(microbatches[2], 2, 0))
        wait_until_written(one)
        one.packed(microbatches[3], handle(microbatches[3], 2, 1))
        one.packed(microbatches[4], handle(microbatches[4], 3, 0))
        assert one._held_nbytes == 0
        assert one._thread.is_alive()
        with pytest.raises(OSError, match="No space left"):
            log.close()
    assert "No space left on device" in summary(one)["warnings"][0]


def test_a_full_disk_ends_the_recording_only(
    tmp_path: Path, recorder: Callable[..., Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise BundleError("x cannot be written: No space left on device; choose another place")

    settings = made(tmp_path)
    one = recorder(settings)
    monkeypatch.setattr(Recording, "write", full)
    feed(one, planned(settings), 2)
    told = summary(one)
    assert told["warnings"] == [
        "recording ends before step 2: x cannot be written: No space left on device; choose another place"
    ]
    assert list(tmp_path.iterdir()) == []

"""``examples/grpo_arithmetic`` learns, keeps to its staleness, and trains the same whatever dies and in any mode."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
TRAIN = EXAMPLES / "grpo_arithmetic" / "train.py"
for directory in (str(HERE), str(EXAMPLES)):
    if directory not in sys.path:
        sys.path.insert(0, directory)

import fake_rollout_worker as fake  # noqa: E402
from grpo_arithmetic import crew  # noqa: E402
from grpo_arithmetic.rollouts import RolloutSource, make_source  # noqa: E402
from grpo_arithmetic.table import curve_of, row_of  # noqa: E402
from grpo_arithmetic.task import MAX_TOKENS, Rollouts, problem_of, shape_of  # noqa: E402

from shmstage import Group  # noqa: E402
from shmstage.errors import RunFailedError, SettingsError, WaitTimeoutError  # noqa: E402
from shmstage.memory.names import owned_objects  # noqa: E402
from shmstage.packing.journal import Journal  # noqa: E402
from shmstage.packing.plan import Planner, PlanSettings  # noqa: E402
from shmstage.settings import BOUNDARIES  # noqa: E402

SMALL = {"workers": 2, "prompts_per_batch": 4, "prompts_per_call": 2, "group_size": 2}


def publication(version: int) -> dict[str, Any]:
    return {
        "run_id": f"grpo-test-{os.getpid()}", "pool": "none", "epoch": 1, "layout": [], "version": version,
        "handle": [], "skipped": False, "skipped_total": 0,
    }  # fmt: skip


@contextmanager
def source_of(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[RolloutSource]:
    """With stand-ins for the workers; weights of version 0 are there."""
    monkeypatch.setattr(crew, "WORKER", "fake_rollout_worker")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    source = make_source({**SMALL, **settings})
    try:
        source.on_weights(publication(0))
        yield source
    finally:
        source.close()


def names(groups: list[Group]) -> list[str]:
    return [group.group_id for group in groups]


def digests(groups: list[Group]) -> list[str]:
    return [each.digest.hex() for group in groups for each in group.trajectories]


# --- the settings: a batch is a step --------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_a_batch_fills_a_step_exactly_whatever_lengths_it_has(microbatches: int) -> None:
    rollouts = Rollouts()
    shape = shape_of(rollouts, microbatches)
    assert shape.pop("microbatches_per_step") == microbatches
    planner, chosen = Planner(PlanSettings(**shape)), random.Random(microbatches)
    for batch in range(20):
        shortest = chosen.choice([1, 6, MAX_TOKENS])
        for number in range(rollouts.trajectories):
            planner.add(1000 * batch + number, chosen.randint(shortest, MAX_TOKENS))
        assert len(planner.close_window()) == microbatches
        assert planner.leftovers == ()


def test_what_cannot_fill_a_step_is_refused() -> None:
    with pytest.raises(SettingsError, match="256 trajectories do not divide into 3 micro-batches"):
        shape_of(Rollouts(), 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_stalenes": 1}, "unknown source settings max_stalenes; known are .*max_staleness"),
        ({"max_staleness": -1}, "max_staleness = -1: give a whole number of at least 0"),
        ({"workers": "2"}, "workers = '2': give a whole number of at least 1"),
        ({"workers": 2.5}, "workers = 2.5: give a whole number of at least 1"),
        ({"seed": True}, "seed = True: give a whole number of at least 0"),
        ({"stop_at": float("nan")}, "stop_at = nan: give a number of at least 0"),
        ({"prompts_per_call": 3}, "prompts_per_batch = 32 is no multiple of prompts_per_call = 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make_source(settings)


def test_a_prompt_is_the_same_in_every_process() -> None:
    assert [problem_of(0, number).prompt for number in range(4)] == [problem_of(0, n).prompt for n in range(4)]
    assert len({problem_of(0, number).prompt for number in range(100)}) > 10
    assert problem_of(0, 1) != problem_of(1, 1)


# --- the source -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_is_not_sampled_before_weights_are_new_enough(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with source_of(monkeypatch, max_staleness=staleness, weights_timeout_s=0.05) as source:
        groups = source.groups(0)
        got = list(islice(groups, 4 * (staleness + 1)))
        assert names(got) == [f"p{number}" for number in range(4 * (staleness + 1))]
        said = f"batch {staleness + 1} waited .* for weights of version 1, the newest is 0"
        with pytest.raises(WaitTimeoutError, match=said):
            next(groups)
        source.on_weights(publication(1))
        more = list(islice(source.groups(len(got)), 4))
    assert {each.policy_version for group in got for each in group.trajectories} == {0}
    assert {(group.batch_index, each.policy_version) for group in more for each in group.trajectories} == {
        (staleness + 1, 1)
    }


@pytest.mark.slow
def test_groups_go_on_in_the_middle_of_a_batch_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    with source_of(monkeypatch) as source:
        whole = list(islice(source.groups(0), 8))
    with source_of(monkeypatch) as source:
        rest = list(islice(source.groups(3), 5))
    assert names(rest) == ["p3", "p4", "p5", "p6", "p7"]
    assert digests(rest) == digests(whole[3:])


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_its_prompts_are_given_to_another(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with source_of(monkeypatch) as source:
        undisturbed = list(islice(source.groups(0), 8))
    with source_of(monkeypatch, kill_at=5) as source:
        disturbed = list(islice(source.groups(0), 8))
        assert source._crew is not None and source._crew.restarts == 1
    assert names(disturbed) == names(undisturbed)
    assert digests(disturbed) == digests(undisturbed)
    assert "was lost at call 2 and is started again" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "timeout_s", "said"),
    [
        (fake.HANGS_BEFORE_READY, 0.1, "was not ready within 0.1 s; raise call_timeout_s"),
        (fake.SAYS_SOMETHING_ELSE, 100.0, "said .*banner.* where 'ready' is due"),
    ],
)
def test_a_worker_that_never_is_ready_is_taken_for_dead(
    seed: int, timeout_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"max_restarts": 0, "call_timeout_s": timeout_s, "workers": 1}
    with source_of(monkeypatch, seed=seed, **limits) as source, pytest.raises(RunFailedError, match=said):
        next(source.groups(0))


@pytest.mark.slow
def test_prompts_of_a_killed_worker_are_sampled_with_the_newest_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were the newest when it was asked can be gone, with the trainer that published them."""
    with source_of(monkeypatch, kill_at=5) as source:
        lost = crew.Crew._lost

        def published_meanwhile(*arguments: Any) -> None:
            source.on_weights(publication(1))
            lost(*arguments)

        monkeypatch.setattr(crew.Crew, "_lost", published_meanwhile)
        groups = list(islice(source.groups(0), 6))
    assert [group.trajectories[0].policy_version for group in groups] == [0, 0, 0, 0, 1, 1]


@pytest.mark.slow
def test_weights_whose_trainer_died_are_waited_for_and_not_a_workers_death(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"seed": fake.CANNOT_READ_VERSION_0, "max_restarts": 0}
    said = r"call [23] waited 0\.001 s for weights that can be read"
    with (
        source_of(monkeypatch, **limits, weights_timeout_s=0.001) as source,
        pytest.raises(WaitTimeoutError, match=said),
    ):
        list(islice(source.groups(0), 8))
    with source_of(monkeypatch, **limits) as source:
        ask_again = crew.Crew._ask_again

        def published_meanwhile(*arguments: Any) -> None:
            source.on_weights(publication(1))
            ask_again(*arguments)

        monkeypatch.setattr(crew.Crew, "_ask_again", published_meanwhile)
        groups = list(islice(source.groups(0), 8))
    assert [group.trajectories[0].policy_version for group in groups] == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_what_a_killed_reader_of_the_weights_leaves_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the summary counts it as leaked."""
    run_id = publication(0)["run_id"]
    reader = (
        "import os, sys; from shmstage.memory.identity import ProcessIdentity;"
        "identity = ProcessIdentity.create(sys.argv[1], 'weights reader'); os.kill(os.getpid(), 9)"
    )
    with source_of(monkeypatch) as source:
        next(source.groups(0))
        subprocess.run([sys.executable, "-c", reader, run_id], check=False, timeout=60)
        assert len(owned_objects(run_id)) == 1
    assert owned_objects(run_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [fake.HANGS_BEFORE_READY, fake.HANGS_AT_EVERY_CALL])
def test_closing_does_not_wait_for_a_worker_that_hangs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "STOP_S", 0.2)
    with source_of(monkeypatch, seed=seed) as source:
        got: list[list[Group]] = []
        reading = threading.Thread(target=lambda: got.append(list(source.groups(0))))
        reading.start()
        while source._crew is None or not source._crew._workers:
            threading.Event().wait(0.01)
        source.close()
        reading.join(30)
    assert got == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [fake.DIES_AT_EVERY_CALL, fake.NEVER_READY])
def test_workers_that_go_on_dying_end_the_input(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        source_of(monkeypatch, seed=seed, max_restarts=2) as source,
        pytest.raises(RunFailedError, match=r"workers died 3 times.* max_restarts = 2"),
    ):
        next(source.groups(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (fake.SAMPLES_WITH_OLD_WEIGHTS, "sampled with version -2; want one from 0 to 0"),
        (fake.ANSWERS_ANOTHER_CALL, "call 0 of batch 0 was answered as call 1"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(seed: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with source_of(monkeypatch, seed=seed) as source, pytest.raises(RunFailedError, match=said):
        next(source.groups(0))


@pytest.mark.slow
def test_the_input_ends_when_rewards_are_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's reward is a tenth of the call's number, two calls a batch: 0.5 on average in batch 2, 0.7 in 3."""
    with source_of(monkeypatch, max_staleness=9, stop_at=0.34, stop_after=2) as source:
        assert len(list(source.groups(0))) == 4 * 3
    with source_of(monkeypatch, max_staleness=9, stop_at=0.36, stop_after=2) as source:
        assert len(list(source.groups(0))) == 4 * 4


def test_closing_ends_a_wait_for_weights() -> None:
    source = make_source(SMALL)
    got: list[list[Group]] = []
    reading = threading.Thread(target=lambda: got.append(list(source.groups(0))))
    reading.start()
    source.close()
    reading.join(30)
    assert got == [[]]


def test_a_row_of_the_table_says_reward_and_staleness() -> None:
    line = {
        "step": 5, "metrics": {"reward": 0.3, "completions": 0.4}, "trajectory_versions": [4, 2, 3], "loss": 0.5,
        "grad_norm": 1.0, "boundary_idle_s": None, "staged": True, "step_s": 0.1,
    }  # fmt: skip
    row = row_of(line)
    assert (row[0], row[1], row[5]) == ("5", "0.750", "2")
    assert curve_of({"reward": [0.3, 0.2], "completions": [0.4, 0.4]}) == pytest.approx([0.75, 0.5])


# --- the whole ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the policy is warmed up once, and programs are compiled once."""
    directory = tmp_path_factory.mktemp("grpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(directory / "programs"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("PYTHONPATH", str(HERE.parents[1]))
        yield directory


def train(workshop: Path, out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(TRAIN), "--json", "--out", str(out), "--policy", str(workshop / "policy")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary["leaked_pools"] == 0
    return summary


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_from_under_3_tenths_to_9_tenths(workshop: Path, tmp_path: Path) -> None:
    summary = train(workshop, tmp_path / "out")
    curve = summary["reward"]
    assert curve[0] < 0.3
    assert sum(curve[-5:]) / 5 >= 0.9 - 1e-6
    assert summary["reward_reached"] is True
    kept = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert kept["reward"] == curve and len(curve) == summary["steps"]
    plot = Path(summary["plot"]).read_text()
    assert plot.startswith("<?xml") and "<svg" in plot


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_no_staleness_all_modes_train_the_same_also_with_a_worker_killed(workshop: Path, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    for mode in BOUNDARIES:
        arguments = ["--steps", "4", "--target", "0", "--max-staleness", "0", "--boundary", mode]
        if mode == "staged_before_update":
            arguments += ["--kill-at", "70", "--workers", "3"]
        found[mode] = train(workshop, tmp_path / mode, *arguments)
    first = found["serial"]
    assert first["steps"] == 4 and len(set(first["losses"])) == 4
    for mode in BOUNDARIES:
        for key in ("param_digest", "digests", "losses", "denominators", "reward"):
            assert found[mode][key] == first[key], (mode, key)
        for line in lines_of(tmp_path / mode):
            assert set(line["trajectory_versions"]) == {line["step"] - 1}
    assert "was lost at call" in (tmp_path / "staged_before_update" / "orchestrator.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_trained_is_as_old_as_max_staleness_allows_at_most(workshop: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = train(workshop, out, "--steps", "6", "--target", "1.01", "--max-staleness", "2", code=1)
    assert summary["reward_reached"] is False
    journal = Journal(out / "journal")
    sampled = {each.trajectory_id: each for group in journal.read(journal.begin) for each in group.trajectories}
    journal.close()
    for line in lines_of(out):
        assert len(line["trajectory_ids"]) == 256
        for name, version in zip(line["trajectory_ids"], line["trajectory_versions"], strict=True):
            assert line["step"] - 1 - 2 <= version <= line["step"] - 1
            if name in sampled:
                assert sampled[name].policy_version == version
                assert sampled[name].batch_index == line["step"] - 1
    assert sampled


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_one_object_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    command = [sys.executable, str(TRAIN), "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "holds a run" in json.loads(done.stdout)["error"]["text"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_input_is_said_before_the_policy_is_warmed_up(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    command = [sys.executable, str(TRAIN), "--json", "--out", str(tmp_path / "out"), "--policy", str(policy)]
    done = subprocess.run([*command, "--prompts", "7"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "prompts_per_batch = 7" in json.loads(done.stdout)["error"]["text"]
    assert "warming" not in done.stderr and not policy.exists()

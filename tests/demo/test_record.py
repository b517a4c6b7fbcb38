"""Rollouts carry the log-probs they were drawn with, and a recording can be repeated."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from packed_by_hand import compiled_logps, pack, tiny_params

from shmstage.demo import record as recording
from shmstage.demo.arithmetic import TaskConfig
from shmstage.demo.model import ModelConfig, per_token_logps
from shmstage.demo.policy import read_policy
from shmstage.demo.record import RecordSettings, advantages_of, main, record
from shmstage.demo.sampling import Rollout, sample
from shmstage.demo.source import recorded_bundle
from shmstage.errors import BundleError, SettingsError
from shmstage.packing.bundle import read_bundle
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.fill import fill_microbatch
from shmstage.packing.plan import Planner, PlanSettings

END = 7
PROMPTS = [np.array(prompt, np.int32) for prompt in ([3, 4], [5, 6, 8, 9, 10], [1], [3, 4])]


def draw(key: int) -> list[Rollout]:
    # Greedy enough to be peaked, random enough to differ: the parameters are those of the model's own tests.
    return sample(tiny_params(), PROMPTS, jax.random.key(key), end=END, max_tokens=24)


@pytest.mark.slow
def test_a_rollout_carries_the_logps_the_policy_gives_it() -> None:
    for prompt, rollout in zip(PROMPTS, draw(0), strict=True):
        length = len(rollout.tokens)
        np.testing.assert_array_equal(rollout.tokens[: len(prompt)], prompt)
        assert not rollout.logps[: len(prompt)].any()
        batch = pack([], tokens=24)
        batch["completion_ids"][0, :length] = rollout.tokens
        batch["segment_ids"][0, :length] = 1
        batch["segment_positions"][0, :length] = np.arange(length)
        scored = np.asarray(compiled_logps(tiny_params(), batch))[0, len(prompt) : length]
        np.testing.assert_allclose(rollout.logps[len(prompt) :], scored, atol=1e-4)


@pytest.mark.slow
def test_a_rollout_ends_with_its_first_end_token_or_at_the_limit() -> None:
    ended = 0
    for key in range(8):
        for rollout in draw(key):
            completion = rollout.tokens[rollout.prompt_length :]
            assert END not in completion[:-1]
            assert completion[-1] == END or len(rollout.tokens) == 24
            ended += completion[-1] == END
    assert ended > 0


@pytest.mark.slow
def test_the_same_key_draws_the_same_and_equal_prompts_draw_apart() -> None:
    one, again, other = draw(0), draw(0), draw(1)
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logps, b.logps)
    assert one[0].tokens.tolist() != other[0].tokens.tolist()
    assert one[0].tokens.tolist() != one[3].tokens.tolist()


def test_advantages_are_the_reward_less_the_groups_mean_over_its_deviation() -> None:
    found = advantages_of(np.array([[0.0, 1.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.3]]))
    np.testing.assert_allclose(found[0], [-1, 1, 1, -1], atol=1e-3)
    np.testing.assert_array_equal(found[1], 0)


@pytest.mark.slow
def test_one_seed_records_one_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "ModelConfig", lambda: ModelConfig(d_model=16, layers=1, heads=2, d_ff=16))
    monkeypatch.setattr(recording, "TaskConfig", lambda: TaskConfig(max_terms=4))
    monkeypatch.setattr(recording, "MAX_TOKENS", 40)
    arguments = [
        "--groups",
        "3",
        "--group-size",
        "2",
        "--groups-per-batch",
        "2",
        "--warmup-steps",
        "2",
        "--json",
    ]
    for name in ("one", "again"):
        assert main([str(tmp_path / name), "--seed", "4", *arguments]) == 0
        printed = capsys.readouterr()
        summary = json.loads(printed.out)
        assert summary["trajectories"] == 6 and summary["batches"] == 2
        assert "sampled 3/3 groups" in printed.err
    files = {path.name for path in (tmp_path / "one").iterdir()}
    assert files == {"COMPLETE", "manifest.json", "policy.safetensors", "shard-00000.safetensors"}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert read_policy(tmp_path / "one")["embedding"].shape == (256, 16)
    assert [t.batch_index for t in read_bundle(tmp_path / "one").trajectories] == [0, 0, 0, 0, 1, 1]


def test_an_existing_directory_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="exists; a bundle is never overwritten"):
        record(tmp_path, RecordSettings(), print)


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"group_size": 1}, {"warmup_steps": -1}, {"seed": -1}])
def test_a_count_that_makes_no_sense_is_refused_by_name(wrong: dict[str, int]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(SettingsError, match=f"{name} = {value}: must be at least"):
        RecordSettings(**wrong)


@pytest.mark.slow
def test_the_shipped_policy_is_the_one_that_sampled_the_shipped_bundle() -> None:
    """Packed as training packs it, the recorded log-probs come out again: ratios start at 1."""
    trajectories = dict(enumerate(read_bundle(recorded_bundle()).trajectories[:64]))
    planner = Planner(PlanSettings(rows=4, tokens=256))
    for arrival, trajectory in trajectories.items():
        planner.add(arrival, trajectory.length)
    plan = [*planner.close_window(), *planner.flush()][0]
    layout = microbatch_layout(4, 256)
    views = layout.views(np.empty(layout.nbytes, np.uint8), 0)
    fill_microbatch(plan, trajectories, views)
    scored = np.asarray(jax.jit(per_token_logps)(read_policy(recorded_bundle()), views))
    trained = views["completion_mask"] > 0
    assert trained.sum() > 200
    np.testing.assert_allclose(scored[trained], views["old_per_token_logps"][trained], atol=1e-3)

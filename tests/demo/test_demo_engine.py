"""What the factory accepts, and where training starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from shmstage.demo.engine import EngineSettings, initial_params, make_engine, parse
from shmstage.demo.model import config_of, parameter_count
from shmstage.demo.policy import read_policy
from shmstage.demo.source import make_source, recorded_bundle
from shmstage.errors import BundleError, SettingsError
from shmstage.packing.bundle import read_bundle


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learnin_rate": 0.1}, r"unknown engine setting learnin_rate = 0.1; did you mean learning_rate\?"),
        ({"zzz": 1}, "unknown engine setting zzz = 1; known are .*weight_decay"),
        ({"learning_rate": "fast"}, "learning_rate = 'fast': must be a float"),
        ({"learning_rate": 0}, "learning_rate = 0.0: must be greater than 0"),
        ({"learning_rate": "nan"}, "learning_rate = nan"),
        ({"learning_rate": True}, "learning_rate = True: must be a float"),
        ({"layers": 2.5}, "layers = 2.5: must be a int"),
        ({"policy": 3}, "policy = 3: must be a str"),
        ({"seed": -1}, "seed = -1: must not be negative"),
        ({"d_model": 64}, 'd_model = 64: the recorded policy has 80; add policy = "fresh"'),
        ({"policy": "fresh", "d_model": 30, "heads": 4}, "d_model = 30 with heads = 4"),
        ({"clip_low": 2}, "clip_low = 2.0"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_engine(settings)


def test_settings_from_the_command_line_are_strings() -> None:
    assert parse({"learning_rate": "1e-3", "layers": "3"}) == EngineSettings(learning_rate=1e-3, layers=3)
    assert parse({"kl_coefficient": 1, "checkpoint_dir": None}) == EngineSettings(kl_coefficient=1.0)


def test_a_recorded_policy_that_was_altered_or_is_missing_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded_bundle(), copy)
    file = copy / "policy.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(BundleError, match=r"has sha256 .*, the manifest says"):
        initial_params(EngineSettings(policy=str(copy)))
    file.unlink()
    with pytest.raises(BundleError, match="No such file"):
        initial_params(EngineSettings(policy=str(copy)))


def test_the_shipped_policy_has_a_few_hundred_thousand_parameters() -> None:
    params = read_policy(recorded_bundle())
    assert 200_000 < parameter_count(params) < 1_000_000
    assert config_of(params).vocabulary == 256
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_a_fresh_policy_is_drawn_from_the_seed() -> None:
    sizes = {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16, "vocabulary": 32}
    one, again, other = (
        initial_params(EngineSettings(policy="fresh", seed=seed, **sizes)) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one["embedding"], again["embedding"])
    assert np.any(one["embedding"] != other["embedding"])


def test_the_shipped_bundle_is_whole_small_and_uneven() -> None:
    bundle = read_bundle(recorded_bundle())
    counts = bundle.manifest["counts"]
    assert counts["trajectories"] >= 300 and counts["batches"] >= 2
    lengths = {trajectory.length for trajectory in bundle.trajectories}
    assert min(lengths) <= 20 and max(lengths) >= 120 and len(lengths) > 50
    assert bundle.manifest["provenance"]["rewards"]["distinct"] > 10
    assert sum(file.stat().st_size for file in recorded_bundle().iterdir()) < 1_000_000


def test_advantages_of_a_group_sum_to_zero_over_its_trajectories() -> None:
    seen = 0
    for group in make_source({}).groups(0):
        advantages = [
            trajectory.advantages.max() + trajectory.advantages.min() for trajectory in group.trajectories
        ]
        assert abs(sum(advantages)) < 1e-4
        seen += any(advantages)
    assert seen > 10


def test_the_source_names_a_setting_it_does_not_know() -> None:
    with pytest.raises(
        SettingsError, match="unknown source setting path = 'x'; the demo's source knows bundle, routing_layers"
    ):
        make_source({"path": "x"})
    with pytest.raises(SettingsError, match="bundle = 3"):
        make_source({"bundle": 3})


def test_made_up_routing_is_the_same_each_time_and_leaves_the_rest_alone() -> None:
    settings = {"routing_layers": 3, "routing_top_k": 2, "routing_experts": 16}
    plain, routed, again = make_source({}), make_source(settings), make_source(settings)
    for bare, one, same in zip(plain.groups(40), routed.groups(40), again.groups(40), strict=True):
        assert (one.group_id, one.batch_index) == (bare.group_id, bare.batch_index)
        for without, given, other in zip(bare.trajectories, one.trajectories, same.trajectories, strict=True):
            assert given.routing is not None
            assert given.routing.shape == (without.length - 1, 3, 2)
            assert given.experts == 16 and given.trajectory_id == without.trajectory_id
            assert given.digest == other.digest != without.digest
            np.testing.assert_array_equal(given.tokens, without.tokens)
    ids = np.concatenate([t.routing for g in routed.groups(40) for t in g.trajectories if t.routing is not None])
    assert set(np.unique(ids)) == {-1, *range(16)}
    assert routed.replayable


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"routing_layers": 2}, r"routing_top_k = None: must be an integer from 1 to 32768; routing has all of"),
        ({"routing_layers": 0, "routing_top_k": 2, "routing_experts": 4}, "routing_layers = 0: must be"),
        ({"routing_layers": 2, "routing_top_k": 5, "routing_experts": 4}, "routing_top_k = 5 of routing_experts = 4"),
        ({"routing_layers": True, "routing_top_k": 1, "routing_experts": 4}, "routing_layers = True"),
        ({"routing_layers": 1, "routing_top_k": 1, "routing_experts": 1 << 16}, "from 1 to 32768"),
    ],
)
def test_routing_that_cannot_be_made_up_is_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        make_source(settings)


@pytest.mark.slow
def test_the_source_leaves_jax_out() -> None:
    code = "import sys, shmstage.demo.source; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

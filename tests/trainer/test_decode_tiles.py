"""Routing that lies in tiles is restored as from one piece, and where each tile lies on a device of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.routed_by_seed import routed_arrays

from shmstage.testing.numpy_packer import encode_routing
from shmstage.trainer.decode import dense_routing, with_dense_routing
from shmstage.trainer.digests import decoded_digest, payload_digest

# what compiles takes its time
pytestmark = pytest.mark.slow

ENCODED = ("ragged", "ragged_packed")
decoded = jax.jit(dense_routing)


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tiles=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    tile=st.tuples(st.integers(1, 2), st.integers(1, 11)),
    layers=st.integers(1, 4),
    top_k=st.integers(1, 5),
    more_experts=st.sampled_from([0, 1, 9, 500, 32763]),
    fill=st.sampled_from([0.0, 0.5, 1.0]),
    encoding=st.sampled_from(ENCODED),
)
def test_tiles_of_any_shape_are_restored_bit_for_bit(
    seed: int, tiles: tuple[int, int], tile: tuple[int, int], layers: int, top_k: int, more_experts: int, fill: float,
    encoding: str,
) -> None:  # fmt: skip
    experts = top_k + more_experts
    rows, tokens = tiles[0] * tile[0], tiles[1] * tile[1]
    arrays = routed_arrays(seed, rows=rows, tokens=tokens, layers=layers, top_k=top_k, experts=experts, fill=fill)
    real = int((arrays["segment_ids"] > 0).sum())
    for limit in {0, real}:
        encoded = encode_routing(arrays, encoding, experts=experts, max_real_tokens=limit, tiles=tiles)
        got = np.asarray(decoded({name: jnp.array(array) for name, array in encoded.items()}))
        assert got.dtype == np.int16
        np.testing.assert_array_equal(got, arrays["routed_experts"])


@pytest.mark.parametrize("encoding", ENCODED)
def test_a_digest_of_tiles_is_of_decoded_values_and_in_place(encoding: str) -> None:
    arrays = routed_arrays(1, rows=4, tokens=8, layers=3, top_k=2, experts=8)
    encoded = encode_routing(arrays, encoding, experts=8, tiles=(2, 2))
    batch = {name: jnp.array(array) for name, array in encoded.items()}
    assert decoded_digest(batch) == payload_digest(arrays)
    assert list(with_dense_routing(batch)) == list(arrays)


def test_the_largest_micro_batch_in_use_traces_within_int32_in_tiles() -> None:
    """As ``test_decode`` has it, for 16 x 4 devices."""
    groups, shape = 4 * 16384 // 8, jax.ShapeDtypeStruct
    batch = {
        "routed_experts_packed": shape((16, 4, groups, 60, 10, 9), jnp.uint8),
        "routed_experts_validity": shape((16, 4, groups, 60), jnp.uint8),
        "routed_experts_offsets": shape((16, 4, 5), jnp.int32),
        "segment_ids": shape((64, 65536), jnp.int32),
    }
    traced = jax.make_jaxpr(dense_routing)(batch)
    assert traced.out_avals[0].shape == (64, 65536, 60, 10)
    longest = max(size for eqn in traced.jaxpr.eqns for var in eqn.outvars for size in var.aval.shape)
    assert longest <= 64 * 65536


def test_a_tile_on_its_own_device_needs_no_other_device() -> None:
    """2 x 2 devices, rows and tokens divided: the program that restores has no collective in it."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "trainer.tiles_on_four_devices"], capture_output=True, text=True, timeout=110,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found == {encoding: {"devices": 4, "same": True, "collectives": []} for encoding in ENCODED}

"""The decoder restores what was encoded, bit for bit; the oracle is numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer.routed_by_seed import Arrays, routed_arrays

from shmstage.packing.routing import is_encoded
from shmstage.testing.numpy_packer import encode_routing
from shmstage.trainer.decode import decoding, dense_routing, unpack, with_dense_routing
from shmstage.trainer.digests import decoded_digest, payload_digest

# what compiles takes its time
pytestmark = pytest.mark.slow

ENCODED = ("ragged", "ragged_packed")
decoded = jax.jit(dense_routing)


def assert_restored(arrays: Arrays, encoding: str, experts: int, max_real_tokens: int = 0) -> None:
    encoded = encode_routing(arrays, encoding, experts=experts, max_real_tokens=max_real_tokens)
    assert "routed_experts" not in encoded
    got = np.asarray(decoded({name: jnp.array(array) for name, array in encoded.items()}))
    assert (got.dtype, got.shape) == (np.int16, arrays["routed_experts"].shape)
    np.testing.assert_array_equal(got, arrays["routed_experts"])


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("experts", [128, 256, 384, 512])
def test_the_numbers_of_experts_in_use_are_restored_bit_for_bit(encoding: str, experts: int) -> None:
    arrays = routed_arrays(experts, rows=3, tokens=21, layers=5, top_k=10, experts=experts)
    assert arrays["routed_experts"].max() == experts - 1
    assert_restored(arrays, encoding, experts)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 11, 13, 15])
def test_ids_of_any_width_are_restored_also_those_that_lie_in_three_bytes(bits: int) -> None:
    arrays = routed_arrays(bits, rows=2, tokens=9, layers=3, top_k=2, experts=1 << bits)
    assert_restored(arrays, "ragged_packed", 1 << bits)


@settings(max_examples=12, derandomize=True, database=None, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 19),
    layers=st.integers(1, 5),
    top_k=st.integers(1, 7),
    more_experts=st.sampled_from([0, 1, 2, 9, 100, 1000, 32761]),
    fill=st.sampled_from([0.0, 0.3, 1.0]),
    encoding=st.sampled_from(ENCODED),
)
def test_any_shape_and_any_number_of_experts_is_restored_bit_for_bit(
    seed: int, rows: int, tokens: int, layers: int, top_k: int, more_experts: int, fill: float, encoding: str
) -> None:
    """Odd layers and top-k, one expert, 15 bits, rows without a token, micro-batches without any, capacity to spare."""
    experts = top_k + more_experts
    arrays = routed_arrays(seed, rows=rows, tokens=tokens, layers=layers, top_k=top_k, experts=experts, fill=fill)
    real = int((arrays["segment_ids"] > 0).sum())
    for limit in {0, real, real + 3}:
        assert_restored(arrays, encoding, experts, limit)


def test_bytes_of_a_group_mean_what_the_contract_says() -> None:
    """Written out by hand: ids of 3 bits, token j in bits 3 j to 3 j + 2 of one little-endian integer of 3 bytes."""
    ids = [5, 0, 7, 1, 2, 3, 4, 6]
    number = sum(each << (3 * j) for j, each in enumerate(ids))
    packed = np.frombuffer(number.to_bytes(3, "little"), np.uint8).reshape(1, 1, 1, 3)
    validity = np.array([[0b11110111]], np.uint8)  # token 3 is unset
    got = unpack(jnp.array(packed), jnp.array(validity))
    assert got.reshape(-1).tolist() == [5, 0, 7, -1, 2, 3, 4, 6]


def test_what_pads_the_last_group_is_never_read_as_a_token() -> None:
    arrays = routed_arrays(3, rows=2, tokens=7, layers=2, top_k=2, experts=8, fill=1.0)
    encoded = encode_routing(arrays, "ragged_packed", experts=8)
    count = int(encoded["routed_experts_offsets"][-1])
    encoded["routed_experts_validity"][count // 8] |= (0xFF << count % 8) & 0xFF  # garbage behind the last token
    encoded["routed_experts_packed"][count // 8 + 1 :] = 0xA5
    got = decoded({name: jnp.array(array) for name, array in encoded.items()})
    np.testing.assert_array_equal(got, arrays["routed_experts"])


@pytest.mark.parametrize("encoding", ENCODED)
def test_the_decoded_array_stands_where_its_encoded_fields_stood(encoding: str) -> None:
    arrays = routed_arrays(1, rows=2, tokens=8, layers=2, top_k=2, experts=8)
    encoded = encode_routing(arrays, encoding, experts=8)
    assert is_encoded(encoded) and not is_encoded(arrays) and not is_encoded(["completion_ids"])
    assert list(with_dense_routing({n: jnp.array(a) for n, a in encoded.items()})) == list(arrays)
    assert with_dense_routing(arrays) == arrays  # type: ignore[arg-type]


def test_what_reads_the_decoded_array_is_compiled_apart_from_the_decoder() -> None:
    """Fused into the loss it could change the order of its sums; that it does not today is luck."""
    arrays = routed_arrays(1, rows=2, tokens=8, layers=2, top_k=2, experts=8)
    encoded = {n: jnp.array(a) for n, a in encode_routing(arrays, "ragged", experts=8).items()}
    assert "optimization_barrier" in str(jax.make_jaxpr(with_dense_routing)(encoded))


@pytest.mark.parametrize("encoding", ENCODED)
def test_a_digest_is_of_decoded_values(encoding: str) -> None:
    arrays = routed_arrays(1, rows=2, tokens=8, layers=3, top_k=2, experts=8)
    encoded = {n: jnp.array(a) for n, a in encode_routing(arrays, encoding, experts=8).items()}
    dense = {n: jnp.array(a) for n, a in arrays.items()}
    assert decoded_digest(encoded) == decoded_digest(dense) == payload_digest(arrays)
    changed = encoded["routed_experts_ragged" if encoding == "ragged" else "routed_experts_validity"].at[0, 0].set(0)
    other = "routed_experts_ragged" if encoding == "ragged" else "routed_experts_validity"
    assert decoded_digest({**encoded, other: changed}) != decoded_digest(dense)


def test_one_function_is_wrapped_once() -> None:
    """Programs are kept by the function they were compiled for; a second engine compiles nothing again."""

    def loss(params: object, batch: object) -> object:
        return params, batch

    assert decoding(loss) is decoding(loss)
    assert decoding(loss).__name__ == "loss"


def test_the_largest_micro_batch_in_use_traces_within_int32() -> None:
    """64 x 65536 tokens, 60 layers, top-10 of 512: 2.5e9 ids, more than int32 counts; nothing is computed here."""
    groups, shape = 64 * 65536 // 8, jax.ShapeDtypeStruct
    batch = {
        "routed_experts_packed": shape((groups, 60, 10, 9), jnp.uint8),
        "routed_experts_validity": shape((groups, 60), jnp.uint8),
        "routed_experts_offsets": shape((65,), jnp.int32),
        "segment_ids": shape((64, 65536), jnp.int32),
    }
    traced = jax.make_jaxpr(dense_routing)(batch)
    assert traced.out_avals[0].shape == (64, 65536, 60, 10)
    # an index over all ids, or over all bytes, would be an iota or a reshape to one axis of that length
    longest = max(size for eqn in traced.jaxpr.eqns for var in eqn.outvars for size in var.aval.shape)
    assert longest <= 64 * 65536

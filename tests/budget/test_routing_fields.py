"""The fields of routing in each encoding, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from shmstage.errors import LayoutError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.routing import ROUTING_ENCODINGS, id_bits, routing_fields, token_nbits

GOLDEN: dict[str, Any] = {"rows": 64, "tokens": 65536, "layers": 60, "top_k": 10, "experts": 512}


def nbytes(encoding: str, **changes: Any) -> dict[str, int]:
    layout = Layout.of(routing_fields(encoding, **{**GOLDEN, **changes}))
    return {field.name: field.nbytes for field in layout.fields}


def test_the_golden_figures_of_routing() -> None:
    """L2: 5,033,164,800 bytes dense; 9-bit ids 2,831,155,200, and validity and row offsets are fields of their own."""
    assert nbytes("dense") == {"routed_experts": 5_033_164_800}
    assert nbytes("ragged") == {"routed_experts_ragged": 5_033_164_800, "routed_experts_offsets": 65 * 4}
    assert nbytes("ragged_packed") == {
        "routed_experts_packed": 2_831_155_200,
        "routed_experts_validity": 31_457_280,
        "routed_experts_offsets": 65 * 4,
    }


def test_dense_is_the_field_that_micro_batches_have_today() -> None:
    layout = microbatch_layout(2, 8, optional=frozenset({"routing"}), layers=3, top_k=2)
    found = {field.name: (field.dtype, field.shape) for field in layout.fields}
    specs = routing_fields("dense", rows=2, tokens=8, layers=3, top_k=2)
    assert specs == {"routed_experts": found["routed_experts"]}


def test_ragged_encodings_have_room_for_the_most_real_tokens_only() -> None:
    """What a slot holds of ragged routing follows ``max_real_tokens``, not the padded shape."""
    quarter = 64 * 65536 // 4
    assert nbytes("ragged", max_real_tokens=quarter)["routed_experts_ragged"] == 5_033_164_800 // 4
    assert nbytes("ragged_packed", max_real_tokens=quarter)["routed_experts_packed"] == 2_831_155_200 // 4
    assert nbytes("dense", max_real_tokens=quarter) == nbytes("dense")
    # more than there are tokens is no limit
    assert nbytes("ragged", max_real_tokens=1 << 40) == nbytes("ragged")


@pytest.mark.parametrize(
    ("experts", "bits"), [(1, 1), (2, 1), (3, 2), (4, 2), (256, 8), (257, 9), (512, 9), (513, 10), (1 << 15, 15)]
)
def test_an_id_takes_as_many_bits_as_the_largest_one_needs(experts: int, bits: int) -> None:
    assert id_bits(experts) == bits
    assert (experts - 1) >> bits == 0


def test_bits_that_fill_no_byte_take_one_more() -> None:
    packed = nbytes("ragged_packed", rows=1, tokens=3, layers=1, top_k=1, experts=5)
    assert (packed["routed_experts_packed"], packed["routed_experts_validity"]) == (2, 1)  # 9 bits and 3 bits


def test_bits_per_token_add_up_to_the_fields() -> None:
    for encoding in ROUTING_ENCODINGS:
        total = sum(nbytes(encoding).values()) - (65 * 4 if encoding != "dense" else 0)
        assert token_nbits(encoding, layers=60, top_k=10, experts=512) * 64 * 65536 == 8 * total


@pytest.mark.parametrize(
    ("encoding", "changes", "said"),
    [
        ("zip", {}, "routing_encoding = 'zip'; it is one of dense, ragged, ragged_packed"),
        ("ragged_packed", {"experts": 0}, "experts = 0; packed routing needs the number of experts, 1 to 32768"),
        ("ragged_packed", {"experts": 32769}, "experts = 32769"),
        ("dense", {"layers": 0}, "0 layers x top-10; give at least 1"),
        ("ragged", {"rows": 65536}, "counts to 2147483647; set max_real_tokens"),
    ],
)
def test_what_cannot_be_encoded_is_refused(encoding: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        routing_fields(encoding, **{**GOLDEN, **changes})

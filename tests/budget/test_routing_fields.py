"""The fields of routing in each encoding, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from shmstage.errors import LayoutError, SettingsError
from shmstage.memory.layout import Layout
from shmstage.packing.fields import microbatch_layout
from shmstage.packing.routing import experts_for, id_bits, routing_fields, token_nbits
from shmstage.settings import ROUTING_ENCODINGS

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


def test_a_group_of_eight_tokens_is_never_cut() -> None:
    fields = routing_fields("ragged_packed", rows=1, tokens=11, layers=4, top_k=2, experts=5)
    assert fields["routed_experts_packed"] == ("uint8", (2, 4, 2, 3))
    assert fields["routed_experts_validity"] == ("uint8", (2, 4))
    assert routing_fields("ragged", rows=1, tokens=11, layers=4, top_k=2)["routed_experts_ragged"][1] == (16, 4, 2)


def test_at_one_quarter_fill_packed_is_less_than_a_sixth_of_dense() -> None:
    """With 4-byte fields and all: what is written to a slot and uploaded from it."""
    sizes = {
        encoding: microbatch_layout(
            64, 65536, optional=frozenset({"routing"}), layers=60, top_k=10, encoding=encoding, experts=512,
            max_real_tokens=64 * 65536 // 4,
        ).payload_nbytes
        for encoding in ROUTING_ENCODINGS
    }  # fmt: skip
    assert sizes["ragged_packed"] <= 0.17 * sizes["dense"]


def test_the_number_of_experts_is_asked_for_where_nobody_says_it() -> None:
    assert experts_for("ragged_packed", asked=0, said=16, who="t") == 16
    assert experts_for("ragged_packed", asked=32, said=16, who="t") == 32
    assert experts_for("ragged", asked=0, said=0, who="t") == 0
    with pytest.raises(SettingsError, match=r"needs the number of experts, which t does not say; set experts"):
        experts_for("ragged_packed", asked=0, said=0, who="t")
    with pytest.raises(SettingsError, match=r"experts = 8: t chooses from 16; set experts = 16"):
        experts_for("dense", asked=8, said=16, who="t")


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

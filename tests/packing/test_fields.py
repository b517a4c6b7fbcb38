from __future__ import annotations

import pytest
from trajectory_making import make_trajectory

from shmstage.errors import LayoutError
from shmstage.packing.fields import OPTIONAL_FIELDS, microbatch_layout, optional_fields


def test_the_layout_of_a_large_microbatch_has_the_golden_size() -> None:
    """L2: 64 x 65,536, routing of 60 layers x top-10 and seven 4-byte fields; the routing alone."""
    optional = frozenset({"routing", "ref_logprobs"})
    layout = microbatch_layout(64, 65_536, optional=optional, layers=60, top_k=10)
    assert layout.payload_nbytes == 5_150_605_312
    assert {field.name: field.nbytes for field in layout.fields}["routed_experts"] == 5_033_164_800


def test_packed_fields_have_the_names_and_dtypes_of_the_jax_rl_world() -> None:
    layout = microbatch_layout(2, 8, optional=OPTIONAL_FIELDS, layers=3, top_k=4)
    assert {field.name: (field.dtype, field.shape) for field in layout.fields} == {
        "completion_ids": ("int32", (2, 8)),
        "segment_ids": ("int32", (2, 8)),
        "segment_positions": ("int32", (2, 8)),
        "completion_mask": ("float32", (2, 8)),
        "advantages": ("float32", (2, 8)),
        "old_per_token_logps": ("float32", (2, 8)),
        "ref_per_token_logps": ("float32", (2, 8)),
        "returns": ("float32", (2, 8)),
        "old_values": ("float32", (2, 8)),
        "routed_experts": ("int16", (2, 8, 3, 4)),
    }


def test_absent_optional_fields_stay_absent() -> None:
    layout = microbatch_layout(2, 8, optional=frozenset({"returns"}))
    names = {field.name for field in layout.fields}
    assert "returns" in names
    assert not names & {"old_values", "ref_per_token_logps", "routed_experts"}


def test_optional_fields_are_those_a_trajectory_carries() -> None:
    carried = frozenset({"routing", "old_values"})
    assert optional_fields(make_trajectory(3, optional=carried)) == carried
    assert optional_fields(make_trajectory(3)) == frozenset()


@pytest.mark.parametrize(
    ("rows", "tokens", "optional", "match"),
    [
        (0, 8, frozenset(), "0 rows x 8 tokens"),
        (1, 8, frozenset({"rewards"}), "rewards"),
        (1, 8, frozenset({"routing"}), "0 layers x top-0"),
    ],
)
def test_impossible_layouts_are_refused(rows: int, tokens: int, optional: frozenset[str], match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        microbatch_layout(rows, tokens, optional=optional)

"""The native functions refuse what does not fit by themselves: no caller's mistake writes out of bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shmstage import _native

ROWS, TOKENS = 2, 4


def call(**changes: Any) -> tuple[bytes, bytes, bytes]:
    given: dict[str, Any] = {
        "rows": ROWS,
        "tokens": TOKENS,
        "segments": [(0, 1, 2)],
        "segment_ids": np.full(ROWS * TOKENS * 4, 7, np.uint8),
        "segment_positions": np.full(ROWS * TOKENS * 4, 7, np.uint8),
        "into": np.full(ROWS * TOKENS, 7, np.uint8),
        "token_nbytes": 1,
        "pad": 255,
        "sources": [b"ab"],
    }
    given.update(changes)
    field = (given["into"], given["token_nbytes"], given["pad"], given["sources"])
    written = [given["segment_ids"], given["segment_positions"], given["into"]]
    try:
        _native.fill_microbatch(
            given["rows"],
            given["tokens"],
            given["segments"],
            given["segment_ids"],
            given["segment_positions"],
            [field],
        )
    except Exception:
        assert all(set(bytes(part)) <= {7} for part in written), "written before the refusal"
        raise
    ids, positions, into = (bytes(part) for part in written)
    return ids, positions, into


def test_padding_lies_before_between_and_after_the_sources() -> None:
    ids, positions, into = call(segments=[(0, 1, 2), (1, 0, 1), (1, 2, 2)], sources=[b"ab", b"c", b"d"])
    assert np.frombuffer(ids, np.int32).tolist() == [0, 1, 1, 0, 1, 0, 2, 2]
    assert np.frombuffer(positions, np.int32).tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert into == b"\xffab\xffc\xffd\xff"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"into": np.full(ROWS * TOKENS - 1, 7, np.uint8)}, "destination of 7 bytes, want 8"),
        ({"into": np.full(ROWS * TOKENS + 1, 7, np.uint8)}, "destination of 9 bytes, want 8"),
        ({"segment_ids": np.full(31, 7, np.uint8)}, "segment_ids of 31 bytes, want 32"),
        ({"segment_positions": np.full(33, 7, np.uint8)}, "segment_positions of 33 bytes, want 32"),
        ({"sources": [b"abc"]}, "longer than its segment"),
        ({"sources": []}, "not one source per segment"),
        ({"sources": [b"ab", b"cd"]}, "not one source per segment"),
        ({"token_nbytes": 0}, "destination of 8 bytes, want 0"),
        ({"token_nbytes": 2, "into": np.full(16, 7, np.uint8), "sources": [b"abc"]}, "whole number of tokens"),
        ({"segments": [(2, 0, 1)]}, "row out of range"),
        ({"segments": [(0, 3, 2)]}, "past its row's end"),
        ({"segments": [(0, 2**64 - 1, 2)]}, "past its row's end"),
        ({"segments": [(0, 1, 2**64 - 1)]}, "past its row's end"),
        ({"segments": [(1, 0, 1), (0, 0, 1)], "sources": [b"a", b"b"]}, "rows out of order"),
        ({"segments": [(0, 0, 2), (0, 1, 2)], "sources": [b"ab", b"ab"]}, "overlap"),
        ({"rows": 2**62, "tokens": 2**31 - 1}, "does not fit in 64 bits"),
        ({"rows": 2**62, "tokens": 16}, "does not fit in 64 bits"),
        ({"tokens": 2**31}, "tokens a row"),
    ],
)
def test_sizes_that_do_not_match_are_refused_before_anything_is_written(changes: dict[str, Any], match: str) -> None:
    """S75: products and sums are checked, never wrapped."""
    with pytest.raises(ValueError, match=match):
        call(**changes)


def test_a_read_only_destination_is_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        call(into=b"\x07" * 8)


def test_routing_faults_are_found_at_their_place() -> None:
    routing = np.array([[0, 1], [5, 4], [-1, -1], [3, 3], [0, -1]], np.int16)
    assert _native.routing_fault(routing, 2, 6) == 3
    assert _native.routing_fault(routing[:3], 2, 6) == -1
    assert _native.routing_fault(routing[:3], 2, 5) == 1
    assert _native.routing_fault(routing[4:], 2, 6) == 0
    with pytest.raises(ValueError, match="whole number of choices"):
        _native.routing_fault(routing, 3, 6)
    with pytest.raises(ValueError, match="whole number of choices"):
        _native.routing_fault(routing, 0, 6)

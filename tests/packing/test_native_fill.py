"""The native functions refuse what does not fit by themselves: no caller's mistake writes out of bounds."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from record_making import gather

from shmstage import _native

ROWS, TOKENS = 2, 4


def words(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int32)


def call(**changes: Any) -> tuple[bytes, bytes, bytes]:
    given: dict[str, Any] = {
        "rows": ROWS,
        "tokens": TOKENS,
        "segments": [(0, 1, 2)],
        "segment_ids": np.full(ROWS * TOKENS * 4, 7, np.uint8),
        "segment_positions": np.full(ROWS * TOKENS * 4, 7, np.uint8),
        "into": np.full(ROWS * TOKENS * 4, 7, np.uint8),
        "number": 0,
        "sources": [words(8, 9)],
    }
    given.update(changes)
    written = [given["segment_ids"], given["segment_positions"], given["into"]]
    records = [_native.TrajectoryRecord(len(source), (source,), None, 0) for source in given["sources"]]
    gathered = gather(given["rows"], given["segments"], records)
    try:
        _native.fill_microbatch(
            gathered,
            given["tokens"],
            given["segment_ids"],
            given["segment_positions"],
            [(given["into"], given["number"], 255)],
        )
    except Exception:
        assert all(set(bytes(part)) <= {7} for part in written), "written before the refusal"
        raise
    ids, positions, into = (bytes(part) for part in written)
    return ids, positions, into


def test_padding_lies_before_between_and_after_the_sources() -> None:
    segments = [(0, 1, 2), (1, 0, 1), (1, 2, 2)]
    ids, positions, into = call(segments=segments, sources=[words(8, 9), words(3), words(4, 5)])
    assert np.frombuffer(ids, np.int32).tolist() == [0, 1, 1, 0, 1, 0, 2, 2]
    assert np.frombuffer(positions, np.int32).tolist() == [0, 0, 1, 0, 0, 0, 0, 1]
    assert np.frombuffer(into, np.int32).tolist() == [-1, 8, 9, -1, 3, -1, 4, 5]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"into": np.full(ROWS * TOKENS * 4 - 1, 7, np.uint8)}, "destination of 31 bytes, want 32"),
        ({"into": np.full(ROWS * TOKENS * 4 + 1, 7, np.uint8)}, "destination of 33 bytes, want 32"),
        ({"segment_ids": np.full(31, 7, np.uint8)}, "segment_ids of 31 bytes, want 32"),
        ({"segment_positions": np.full(33, 7, np.uint8)}, "segment_positions of 33 bytes, want 32"),
        ({"number": 1}, "the records lack field 1"),
        ({"number": 99}, "no such field: 99"),
        ({"segments": [(0, 3, 2)]}, "past its row's end"),
        ({"segments": [(0, 2**64 - 1, 2)]}, "past its row's end"),
        ({"segments": [(0, 0, 2), (0, 1, 2)], "sources": [words(1, 2), words(1, 2)]}, "overlap"),
        ({"tokens": 2**31}, "tokens a row"),
    ],
)
def test_sizes_that_do_not_match_are_refused_before_anything_is_written(changes: dict[str, Any], match: str) -> None:
    """S75: products and sums are checked, never wrapped."""
    with pytest.raises(ValueError, match=match):
        call(**changes)


def test_a_read_only_destination_is_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        call(into=b"\x07" * 32)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((3, (words(1, 2),)), "field of 8 bytes, want 12"),
        ((2, (words(1, 2, 3),)), "field of 12 bytes, want 8"),
        ((2, (np.arange(4, dtype=np.int32)[::2],)), "not C-contiguous"),
        ((2, (memoryview(bytes(16))[::2],)), "not C-contiguous"),
        ((2**31, ()), "2\\*\\*31 - 1 tokens"),
        ((1, (None,) * 9), "9 fields, at most 8"),
        ((1, (), (words(1), 1, 2**62, 8, 0)), "does not fit in 64 bits"),
        ((1, (), (words(1), 1, 0, 8, 0)), "without layers"),
        ((1, (), (words(1), 1, 1, 2, 16)), "16 bits, at most 15"),
        ((1, (), (words(1), 2, 1, 2, 0)), "more tokens than there are"),
        ((1, (), (words(1, 2), 1, 1, 2, 0)), "routing of 8 bytes, want 4"),
    ],
)
def test_a_record_is_refused_where_a_size_does_not_fit(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _native.TrajectoryRecord(*arguments)


def test_records_that_do_not_fit_their_segments_or_one_another_are_refused() -> None:
    one, longer = _native.TrajectoryRecord(2, (words(1, 2),)), _native.TrajectoryRecord(3, (words(1, 2, 3),))
    with pytest.raises(ValueError, match="a record of 3 tokens for a segment of 2"):
        gather(1, [(0, 0, 2)], [longer])
    others = [
        _native.TrajectoryRecord(2, (words(1, 2), words(1, 2))),
        _native.TrajectoryRecord(2, (None, words(1, 2))),
        _native.TrajectoryRecord(2, (words(1, 2),), (words(1, 2), 2, 1, 2, 0)),
        _native.TrajectoryRecord(2, (words(1, 2),), None, 0, 5),
    ]
    for other in others:
        with pytest.raises(ValueError, match="different fields"):
            gather(1, [(0, 0, 2), (0, 2, 2)], [one, other])
    with pytest.raises(KeyError):
        gather(1, [(0, 0, 2), (0, 2, 2)], [one])
    for wrong in (None, object()):
        with pytest.raises(TypeError, match="not a TrajectoryRecord"):
            gather(1, [(0, 0, 2)], [wrong])
    held = {0: SimpleNamespace(record=one)}
    for rows in ([[(0, 0, 2)]], [((0, 0),)], [(7,)]):
        with pytest.raises(TypeError):
            _native.Gathered(rows, held)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        _native.Gathered([((0, -1, 2),)], held)


def test_what_is_gathered_is_counted() -> None:
    records = [_native.TrajectoryRecord(2, (), None, loss_tokens) for loss_tokens in (2, 0, 1)]
    gathered = gather(2, [(0, 0, 2), (0, 2, 2), (1, 0, 2)], records)
    assert (gathered.tokens, gathered.loss_tokens, gathered.trained, gathered.held_bits) == (6, 3, 2, 0)


def test_a_record_keeps_what_it_points_to() -> None:
    """Arrays and buffers whose names are gone, behind a mapping that is gone and rows that were changed."""
    numbers, buffer = words(1, 2), bytearray(words(3, 4).tobytes())
    references = [sys.getrefcount(numbers), sys.getrefcount(buffer)]
    record = _native.TrajectoryRecord(2, (numbers, buffer))
    assert [sys.getrefcount(numbers), sys.getrefcount(buffer)] == [count + 1 for count in references]
    with pytest.raises(BufferError):
        buffer.extend(b"1234")
    rows, held = [((0, 0, 2),)], {0: SimpleNamespace(record=record)}
    gathered = _native.Gathered(rows, held)
    del record
    rows.clear(), held.clear()
    assert [sys.getrefcount(numbers), sys.getrefcount(buffer)] == [count + 1 for count in references]
    into = [np.zeros(2, np.int32) for _ in range(4)]
    _native.fill_microbatch(gathered, 2, *into[:2], [(into[2], 0, 0), (into[3], 1, 0)])
    assert (into[2].tolist(), into[3].tolist()) == ([1, 2], [3, 4])
    del gathered
    assert [sys.getrefcount(numbers), sys.getrefcount(buffer)] == references
    buffer.extend(b"1234")


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

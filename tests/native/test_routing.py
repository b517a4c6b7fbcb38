"""Native routing against the numpy oracle, bit for bit: packed, ragged and dense, from dense and from held sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_making import gather, routed
from routing_oracle import Array, held, pack_groups, random_routing, whole_groups

from shmstage import _native

EXPERTS = [1, 2, 3, 16, 17, 128, 200, 256, 257, 384, 512]


def bits_of(experts: int) -> int:
    return max((experts - 1).bit_length(), 1)


def call(
    encoding: str,
    rows: int,
    tokens: int,
    segments: list[tuple[int, int, int]],
    shape: tuple[int, int],
    bits: int,
    capacity: int,
    sources: list[Any],
    threads: int = 1,
) -> dict[str, Array]:
    layers, top_k = shape
    if encoding == "dense":
        ids = np.full((rows, tokens, layers, top_k), 77, np.int16)
    elif encoding == "ragged":
        ids = np.full((capacity, layers, top_k), 77, np.int16)
    else:
        ids = np.full((capacity // 8, layers, top_k, bits), 77, np.uint8)
    validity = np.full((capacity // 8, layers), 77, np.uint8) if encoding == "ragged_packed" else None
    offsets = None if encoding == "dense" else np.full(rows + 1, 77, np.int32)
    words = [np.empty((rows, tokens), np.int32) for _ in range(2)]
    try:
        lengths = [length for _, _, length in segments]
        records = [routed(length, source, shape, bits) for length, source in zip(lengths, sources, strict=True)]
        width = 0 if encoding in ("dense", "ragged") else bits
        routing = (encoding, layers, top_k, width, ids, validity, offsets)
        _native.fill_microbatch(gather(rows, segments, records), tokens, *words, [], routing, threads)
    except Exception:
        written = [part for part in (ids, validity, offsets) if part is not None]
        assert all((part == 77).all() for part in written), "written before the refusal"
        raise
    made = {"ids": ids, "validity": validity, "offsets": offsets}
    return {name: array for name, array in made.items() if array is not None}


def wanted(
    encoding: str,
    rows: int,
    tokens: int,
    segments: list[tuple[int, int, int]],
    shape: tuple[int, int],
    bits: int,
    capacity: int,
    routing: list[Array],
) -> dict[str, Array]:
    dense = np.full((rows, tokens, *shape), -1, np.int16)
    ragged = np.full((capacity, *shape), -1, np.int16)
    offsets = np.zeros(rows + 1, np.int32)
    at = 0
    for (row, start, length), source in zip(segments, routing, strict=True):
        dense[row, start : start + len(source)] = source
        ragged[at : at + len(source)] = source
        at += length
        offsets[row + 1 :] += length
    if encoding == "dense":
        return {"ids": dense}
    if encoding == "ragged":
        return {"ids": ragged, "offsets": offsets}
    ids, validity = pack_groups(ragged, bits)
    return {"ids": ids, "validity": validity, "offsets": offsets}


@st.composite
def microbatches(draw: st.DrawFn) -> dict[str, Any]:
    rows, tokens = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    segments = []
    for row in range(rows):
        at = draw(st.integers(0, 3))
        while at <= tokens and draw(st.integers(0, 4)):
            length = draw(st.integers(0, min(tokens - at, 19)))
            segments.append((row, at, length))
            at += length + draw(st.integers(0, 2))
    experts = draw(st.sampled_from(EXPERTS))
    top_k = draw(st.integers(1, min(experts, 10)))
    real = sum(length for _, _, length in segments)
    spare = draw(st.integers(0, 2))
    return {
        "rows": rows,
        "tokens": tokens,
        "segments": segments,
        "shape": (draw(st.integers(1, 5)), top_k),
        "experts": experts,
        "capacity": -(-max(real, 1) // 8) * 8 + 8 * spare,
        "seed": draw(st.integers(0, 2**32 - 1)),
        "threads": draw(st.sampled_from([1, 3])),
    }


@pytest.mark.slow
@given(microbatches(), st.sampled_from(["dense", "ragged", "ragged_packed"]))
def test_every_encoding_is_what_the_oracle_makes(made: dict[str, Any], encoding: str) -> None:
    dice = np.random.default_rng(made["seed"])
    bits = bits_of(made["experts"])
    routing, sources = [], []
    for _, _, length in made["segments"]:
        rows = max(length - int(dice.integers(2)), 0)
        routing.append(random_routing(dice, rows, *made["shape"], made["experts"]))
        sources.append((held(routing[-1], bits), rows) if dice.integers(2) else routing[-1])
    place = (made["rows"], made["tokens"], made["segments"], made["shape"], bits, made["capacity"])
    got = call(encoding, *place, sources, made["threads"])
    want = wanted(encoding, *place, routing)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.parametrize("experts", [1, 2, 128, 256, 384, 512, 1 << 15])
@pytest.mark.parametrize("tokens", [0, 1, 8, 13])
def test_held_routing_is_the_group_form_and_comes_back(experts: int, tokens: int) -> None:
    dice = np.random.default_rng(experts + tokens)
    top_k, bits = min(experts, 7), bits_of(experts)
    routing = np.full((tokens, 5, top_k), -1, np.int16)
    for token, layer in np.ndindex(tokens, 5):
        if dice.random() < 0.8:
            routing[token, layer] = dice.choice(experts, top_k, replace=False)
    packed = _native.pack_routing(routing, 5, top_k, bits)
    assert packed == held(routing, bits)
    back = np.full_like(routing, 77)
    _native.unpack_routing(back, packed, 5, top_k, bits)
    np.testing.assert_array_equal(back, routing)


@pytest.mark.parametrize("layers", [1, 3, 8])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_an_id_that_is_too_large_is_cut_off_and_leaves_its_neighbours_whole(layers: int, top_k: int) -> None:
    routing = np.full((8, layers, top_k), 5, np.int16)
    routing[3] = 5 | 8 | 0x4000
    back = np.empty_like(routing)
    _native.unpack_routing(back, _native.pack_routing(routing, layers, top_k, 3), layers, top_k, 3)
    assert (back == 5).all()


GOOD: dict[str, Any] = {
    "encoding": "ragged_packed",
    "rows": 2,
    "tokens": 8,
    "segments": [(0, 0, 3), (1, 1, 5)],
    "shape": (2, 3),
    "bits": 4,
    "capacity": 8,
    "sources": [whole_groups(np.zeros((0, 2, 3), np.int16), 3), (held(np.ones((5, 2, 3), np.int16), 4), 5)],
}


def test_the_arguments_that_the_refusals_start_from_are_good() -> None:
    assert call(**GOOD)["offsets"].tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"segments": [(0, 0, 3), (1, 1, 6)]}, "9 real tokens, capacity 8"),
        ({"encoding": "ragged", "capacity": 7}, "8 real tokens, capacity 7"),
        ({"encoding": "sparse"}, "unknown encoding sparse"),
        ({"bits": 0, "sources": [b"", bytes(12 * 5)]}, "0 bits"),
        ({"bits": 16}, "16 bits, at most 15"),
        ({"shape": (2, 0)}, "without layers or without ids"),
        ({"sources": [b"", b"1"]}, "routing of 1 bytes, want 0"),
        ({"sources": [b"", bytes(12 * 6)]}, "routing of more tokens than there are"),
        ({"sources": [b"", (held(np.ones((9, 2, 3), np.int16), 4), 5)]}, "routing of 52 bytes, want 26"),
        ({"sources": [b"", (held(np.ones((6, 2, 3), np.int16), 4), 6)]}, "routing of more tokens than there are"),
        ({"sources": [b"", (b"", 2**63)]}, "routing of more tokens than there are"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(**{**GOOD, **changes})


def test_destinations_of_another_size_are_refused() -> None:
    words = [np.empty((1, 8), np.int32) for _ in range(2)]
    good = {"ids": np.empty(8 * 6 * 2, np.int8), "validity": np.empty(2, np.uint8), "offsets": np.empty(2, np.int32)}
    for name, size, match in [
        ("ids", 5, "whole number of tokens"),
        ("validity", 1, "validity of 1 bytes, want 8"),
        ("offsets", 3, "offsets of 12 bytes, want 8"),
    ]:
        parts = {**good, name: np.empty(size, good[name].dtype)}
        routing = ("ragged_packed", 2, 3, 4, parts["ids"], parts["validity"], parts["offsets"])
        gathered = gather(1, [(0, 0, 2)], [routed(2, b"", (2, 3), 4)])
        with pytest.raises(ValueError, match=match):
            _native.fill_microbatch(gathered, 8, *words, [], routing)


def test_routing_of_another_shape_or_width_is_refused_before_anything_is_written() -> None:
    packed = (held(np.ones((2, 2, 3), np.int16), 4), 2)
    words = [np.full((1, 8), 77, np.int32) for _ in range(2)]
    ids, validity, offsets = np.full(6 * 5, 77, np.uint8), np.full(2, 77, np.uint8), np.full(2, 77, np.int32)
    gathered = gather(1, [(0, 0, 2)], [routed(2, packed, (2, 3), 4)])
    assert gathered.held_bits == 4
    for layers, top_k, bits, match in [
        (2, 3, 5, "routing held in 4 bits, want 5"),
        (3, 2, 4, "routing of 2 layers and top-3, want 3 and top-2"),
    ]:
        routing = ("ragged_packed", layers, top_k, bits, ids, validity, offsets)
        with pytest.raises(ValueError, match=match):
            _native.fill_microbatch(gathered, 8, *words, [], routing)
    assert all((part == 77).all() for part in (*words, ids, validity, offsets))
    other = routed(2, (held(np.ones((2, 2, 3), np.int16), 5), 2), (2, 3), 5)
    with pytest.raises(ValueError, match="routing packed in 4 and in 5 bits"):
        gather(1, [(0, 0, 2), (0, 2, 2)], [routed(2, packed, (2, 3), 4), other])


@pytest.mark.parametrize("encoding", ["dense", "ragged", "ragged_packed"])
def test_what_lies_past_the_tokens_of_held_routing_reaches_nobody(encoding: str) -> None:
    first, second = np.full((3, 2, 3), 15, np.int16), np.full((2, 2, 3), 1, np.int16)
    place = (encoding, 1, 8, [(0, 0, 3), (0, 3, 2)], (2, 3), 4, 8)
    got = call(*place, [(b"\xff" * 26, 3), second])
    want = wanted(*place, [first, second])
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [0, 1, 2, 5])
@pytest.mark.parametrize("shift", [0, 4, 16])
def test_a_micro_batch_large_enough_to_be_shared_and_streamed_is_written_whole(threads: int, shift: int) -> None:
    """Destinations that begin inside a cache line, parts that end in the middle of a segment, nothing beside them."""
    rows, tokens = 3, 500_000
    segments = [(0, 3, 499_990), (1, 0, 100), (1, 101, 399_000), (2, 250_000, 250_000)]
    memory = [np.full(rows * tokens + 32, 7, np.int32) for _ in range(3)]
    views = [part[shift // 4 :][: rows * tokens] for part in memory]
    sources = [np.arange(1, length + 1, dtype=np.int32) for _, _, length in segments]
    records = [_native.TrajectoryRecord(len(source), (source,)) for source in sources]
    gathered = gather(rows, segments, records)
    _native.fill_microbatch(gathered, tokens, views[0], views[1], [(views[2], 0, 255)], None, threads)
    want = [
        np.zeros((rows, tokens), np.int32),
        np.zeros((rows, tokens), np.int32),
        np.full((rows, tokens), -1, np.int32),
    ]
    numbers = {(0, 3): 1, (1, 0): 1, (1, 101): 2, (2, 250_000): 1}
    for (row, start, length), source in zip(segments, sources, strict=True):
        want[0][row, start : start + length] = numbers[row, start]
        want[1][row, start : start + length] = np.arange(length)
        want[2][row, start : start + length] = source
    for part, view, expected in zip(memory, views, want, strict=True):
        np.testing.assert_array_equal(view.reshape(rows, tokens), expected)
        assert (part[: shift // 4] == 7).all() and (part[shift // 4 + rows * tokens :] == 7).all()

"""Spans of trajectories on their way: what comes out is what went in, and a byte changed on its way is noticed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_making import make_trajectory

from shmstage import _native
from shmstage.errors import ProtocolError, TrajectoryError
from shmstage.packing import pieces as module
from shmstage.packing.fields import OPTIONAL_FIELDS, ROUTING, WORD_FIELDS
from shmstage.packing.held_form import HeldForm
from shmstage.packing.held_routing import HeldRouting
from shmstage.packing.pieces import Piece, decode_pieces, encode_pieces, hash_of_whole, verify_whole
from shmstage.packing.trajectory import Trajectory

HEAD, ENTRY = 64, 128


def trajectory(length: int, seed: int = 0, *, name: str = "t", held: bool = False, **changes: Any) -> Trajectory:
    one = make_trajectory(length, name=name, seed=seed, **{"optional": OPTIONAL_FIELDS, "experts": 300, **changes})
    return HeldForm("ragged_packed", 300).of(one) if held else one


def values_of(piece: Piece) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a piece, routing decoded by a fill of one row."""
    tokens = piece.end - piece.begin
    found = {name: np.full(tokens, 77, np.int32) for name in ("ids", "positions")}
    here = [(n, row) for n, row in enumerate(WORD_FIELDS) if not row.optional or row.source in piece.optional]
    found.update({row.source: np.full(tokens, 77, row.dtype) for _, row in here})
    routing = None
    if piece.routing is not None:
        shape = piece.routing.shape[1:]
        found["routing"] = np.full((tokens, *shape), 77, np.int16)
        routing = ("dense", *shape, 0, found["routing"], None, None)
    if tokens:
        plan = np.array([[0, 0, piece.length, 0, 0]], np.int64)
        window = (0, 1, piece.begin, piece.end)
        words = [(found[row.source], n, 0) for n, row in here]
        _native.fill_window(plan, [piece.record], window, (1, 1), found["ids"], found["positions"], words, routing)
    return found


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 40), max_size=5), seed=st.integers(0, 1 << 20))
def test_what_comes_out_is_the_span_that_went_in(data: Any, lengths: list[int], seed: int) -> None:
    """Any span, empty ones and empty trajectories too; held routing cut inside its groups; some fields, or all."""
    given_, spans = [], []
    for number, length in enumerate(lengths):
        optional = data.draw(st.sampled_from([frozenset(), frozenset({"returns", "routing"}), OPTIONAL_FIELDS]))
        changes: dict[str, Any] = {"optional": optional, "name": "t" * number + "é"}
        if "routing" in optional:
            changes["routing_rows"] = max(length - data.draw(st.integers(0, 1)), 0)
        given_.append(trajectory(length, seed + number, held=data.draw(st.booleans()), **changes))
        begin = data.draw(st.integers(0, length))
        spans.append((begin, data.draw(st.integers(begin, length))))
    out = decode_pieces(encode_pieces(given_, spans))
    assert len(out) == len(given_)
    for one, (begin, end), piece in zip(given_, spans, out, strict=True):
        assert (piece.begin, piece.end) == (begin, end)
        for name in ("trajectory_id", "digest", "length", "optional", "experts"):
            assert getattr(piece, name) == getattr(one, name), name
        values = values_of(piece)
        for row in WORD_FIELDS:
            if not row.optional or row.source in one.optional:
                np.testing.assert_array_equal(values[row.source], getattr(one, row.source)[begin:end])
        assert (piece.routing is None) == (one.routing is None)
        if one.routing is not None and piece.routing is not None:
            assert piece.routing.shape == one.routing.shape
            dense = np.full((one.length, *one.routing.shape[1:]), -1, np.int16)
            dense[: len(one.routing)] = np.asarray(one.routing)
            np.testing.assert_array_equal(values["routing"], dense[begin:end])
        assert verify_whole(piece) == ((begin, end) == (0, one.length))


def test_pieces_lie_where_they_came_and_keep_their_memory() -> None:
    sent = [bytearray(part) for part in encode_pieces([trajectory(40), trajectory(9, held=True)], [(3, 33), (0, 9)])]
    parts = [np.frombuffer(part, np.uint8) for part in sent]  # as they come from somewhere, at addresses of their own
    gone = [weakref.ref(part) for part in parts[1:]]
    pieces = decode_pieces(parts)
    assert [array for piece in pieces for array in piece._arrays] == parts[1:]
    records = [piece.record for piece in pieces]
    pieces.clear()
    parts.clear()
    gc.collect()
    assert all(part() is not None for part in gone), "a record reads from memory that nothing keeps"
    records.clear()
    gc.collect()
    assert all(part() is None for part in gone)


def test_what_is_sent_is_what_is_held_and_no_copy_of_it() -> None:
    dense, held = trajectory(40), trajectory(40, held=True)
    for one, span in ((dense, (3, 33)), (held, (0, 40))):
        for array, row in zip(encode_pieces([one], [span])[1:], [*WORD_FIELDS, ROUTING], strict=True):
            whole = getattr(one, row.source)
            if isinstance(whole, HeldRouting):
                whole = np.frombuffer(whole.data, np.uint8)
            assert np.shares_memory(array, whole) and not array.flags.owndata, row.source


@pytest.mark.parametrize("held", [False, True])
def test_any_byte_that_changed_is_noticed_and_names_its_trajectory(held: bool) -> None:
    given_ = [trajectory(9, 1, name="first", held=held), trajectory(5, 2, name="second", held=held)]
    parts = encode_pieces(given_, [(2, 7), (0, 5)])
    names_at, names = HEAD + 2 * ENTRY, ("first", "second")
    assert decode_pieces(parts)[1].trajectory_id == "second"
    first_arrays = len(parts) // 2
    for which, part in enumerate(parts):
        for at in range(len(part)):
            changed = part.copy()
            changed[at] ^= 1 << at % 8
            with pytest.raises(ProtocolError) as raised:
                decode_pieces([*parts[:which], changed, *parts[which + 1 :]])
            if which == 0 and (at < HEAD or at >= names_at):
                continue  # of the head, or of a name itself
            number = int(which > first_arrays if which else at >= HEAD + ENTRY)
            assert f"piece {number} of 2, trajectory '{names[number]}'" in str(raised.value), (which, at)


def test_any_length_that_came_short_or_long_is_noticed() -> None:
    parts = encode_pieces([trajectory(9, held=True), trajectory(7, 1)], [(2, 7), (0, 7)])
    nbytes = sum(map(len, parts))
    for which, part in enumerate(parts):
        for changed in [*(part[:size] for size in range(len(part))), np.append(part, np.zeros(1, np.uint8))]:
            with pytest.raises(ProtocolError):
                decode_pieces([*parts[:which], changed, *parts[which + 1 :]])
    with pytest.raises(ProtocolError, match=f"2 pieces in {nbytes} bytes were sent, {nbytes - 1} bytes came"):
        decode_pieces([*parts[:-1], parts[-1][1:]])
    # the same bytes in all, cut at other places
    joined = [*parts[:1], np.concatenate(parts[1:3]), *parts[3:]]
    moved = [*parts[:1], parts[1][:-1], np.append(parts[1][-1:], parts[2]), *parts[3:]]
    empty = [*parts, np.zeros(0, np.uint8)]
    for wrong, text in ((joined, "bytes were sent"), (moved, "bytes were sent"), (empty, "1 arrays too many")):
        with pytest.raises(ProtocolError, match=text):
            decode_pieces(wrong)
    with pytest.raises(ProtocolError, match="begin with a head"):
        decode_pieces([])
    with pytest.raises(ProtocolError, match="begin with 64 bytes; got 0"):
        decode_pieces([np.zeros(0, np.uint8)])
    for number in (0, len(parts) - 1):
        part = np.repeat(parts[number], 8)
        for odd in (part.view(np.int8), part.reshape(-1, 8), part[::2]):
            with pytest.raises(ProtocolError, match="pieces come as uint8"):
                decode_pieces([*parts[:number], odd, *parts[number + 1 :]])


def forged(parts: list[Any], **changes: int) -> list[Any]:
    """One piece with an entry of other numbers, and hashes that are right for them."""
    head = parts[0].copy()
    entry = module._Entry(*module._ENTRY.unpack(head[HEAD + 16 : HEAD + ENTRY].tobytes()))._replace(**changes)
    packed = module._ENTRY.pack(*entry)
    told = xxhash.xxh3_128(packed + b"t\0")
    for array in parts[1:]:
        told.update(array.data)
    head[HEAD : HEAD + ENTRY] = np.frombuffer(told.digest() + packed, np.uint8)
    return [head, *parts[1:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 1 << 63, "end": 1 << 63},
        {"length": 1 << 31},
        {"begin": 91},
        {"end": 101},
        {"begin": 0},
        {"end": (1 << 64) - 1, "length": (1 << 64) - 1},
        {"routed": 98},
        {"routed": 101},
        {"routed": 1 << 63},
        {"layers": 0},
        {"layers": (1 << 64) - 1},
        {"top_k": 0},
        {"top_k": 1 << 62},
        {"bits": 16},
        {"bits": 0},
        {"bits": 4},
        {"bits": (1 << 32) - 1},
        {"experts": (1 << 15) + 1},
        {"present": 0},
        {"present": 0x4F},
        {"present": 0xFFFFFFFF},
        {"layers": 0, "top_k": 0, "routed": 0, "bits": 0},
    ],
)
def test_an_entry_that_lies_is_refused_whatever_its_numbers(changes: dict[str, int]) -> None:
    parts = encode_pieces([trajectory(100, held=True, optional=OPTIONAL_FIELDS - {"returns"})], [(24, 90)])
    assert len(decode_pieces(forged(parts))) == 1
    with pytest.raises(ProtocolError, match="piece 0 of 1, trajectory 't'"):
        decode_pieces(forged(parts, **changes))


def test_a_head_that_lies_is_refused() -> None:
    parts = encode_pieces([trajectory(3)], [(0, 3)])
    nbytes = sum(map(len, parts))

    def head(*fields: Any) -> Any:
        packed = module._HEADER.pack(*fields)
        made = np.frombuffer(packed + xxhash.xxh3_64_digest(packed), np.uint8)
        return [np.concatenate([made, parts[0][HEAD:]]), *parts[1:]]

    good = (b"shmPIECE", 2, ENTRY, 1, nbytes)
    assert len(decode_pieces(head(*good))) == 1
    for place, value in [(0, b"shmPIECF"), (1, 1), (2, 64), (3, 0), (3, 2), (3, (1 << 64) - 1), (4, nbytes - 1)]:
        with pytest.raises(ProtocolError):
            decode_pieces(head(*(value if n == place else field for n, field in enumerate(good))))


def test_a_digest_that_is_not_of_the_values_is_found_by_full_verification() -> None:
    for held in (False, True):
        one = trajectory(9, held=held)
        object.__setattr__(one, "digest", b"\1" * 16)
        (piece,) = decode_pieces(encode_pieces([one], [(0, 9)]))
        with pytest.raises(ProtocolError, match="'t': what came has digest [0-9a-f]{32}, its store says 0101"):
            verify_whole(piece)
        (part,) = decode_pieces(encode_pieces([one], [(0, 8)]))
        assert not verify_whole(part)


@pytest.mark.parametrize("span", [(-1, 3), (2, 1), (0, 10), (10, 10)])
def test_a_span_that_is_not_within_its_trajectory_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(TrajectoryError, match=rf"'t': tokens {span[0]} to {span[1]} of 9 were asked for"):
        encode_pieces([trajectory(9)], [span])


def test_held_routing_travels_in_whole_groups_and_no_more() -> None:
    one = trajectory(40, held=True, routing_rows=39)
    assert isinstance(one.routing, HeldRouting)
    each = 2 * (3 * 9 + 1)  # layers x (top-3 of 9 bits, and validity)
    for (begin, end), groups in [((0, 8), 1), ((7, 9), 2), ((8, 16), 1), ((15, 33), 4), ((39, 40), 0), ((32, 40), 1)]:
        (piece,) = decode_pieces(encode_pieces([one], [(begin, end)]))
        assert len(piece._arrays[-1]) == groups * each


@pytest.mark.parametrize("held", [False, True])
def test_a_hash_made_ahead_is_that_of_the_whole_and_of_no_part(held: bool) -> None:
    given_ = [trajectory(9, 1, held=held), trajectory(5, 2, name="second", held=held)]
    hashes = [hash_of_whole(one) for one in given_]
    for spans in ([(0, 9), (0, 5)], [(0, 9), (1, 5)], [(0, 8), (0, 5)], [(0, 0), (5, 5)]):
        sent, plain = encode_pieces(given_, spans, hashes), encode_pieces(given_, spans)
        assert [part.tobytes() for part in sent] == [part.tobytes() for part in plain]
    with pytest.raises(ProtocolError, match="piece 1 of 2, trajectory 'second'"):  # it is taken, not made again
        decode_pieces(encode_pieces(given_, [(0, 9), (0, 5)], [hashes[0], hashes[0]]))


def test_no_pieces_are_a_head_alone() -> None:
    parts = encode_pieces([], [])
    assert [len(part) for part in parts] == [HEAD] and decode_pieces(parts) == []


def test_shapes_whose_product_is_beyond_64_bits_are_refused_where_they_take_no_room() -> None:
    parts = encode_pieces([trajectory(9, held=True)], [(0, 0)])
    with pytest.raises(ProtocolError, match="trajectory 't': size does not fit in 64 bits"):
        decode_pieces(forged(parts, layers=1 << 32, top_k=1 << 32))

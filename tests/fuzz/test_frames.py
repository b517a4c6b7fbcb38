"""Frames and handles from anybody."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from fuzzing import fuzz, survives
from hypothesis import given
from hypothesis import strategies as st
from mutations import NUMBERS, Rng, mutated

from shmstage.errors import LayoutError, ProtocolError, ShmstageError
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.trainer.arguments import Arguments, for_the_record
from shmstage.wire.codec import FRAME_LIMIT_NBYTES, decode, encode
from shmstage.wire.handles import handle_from_wire, handle_to_wire
from shmstage.wire.messages import PROTOCOL_VERSION, Attached, Hello, Message, Published, Reply, Request, TokenEvent
from shmstage.wire.schema import DEPTH_LIMIT

pytestmark = pytest.mark.slow

LAYOUT = Layout.of({"x": ("int32", (2, 3)), "l": ("float32", (2,))}, late=["l"])
HANDLE = handle_to_wire(Handle(1, 4, LAYOUT.layout_id, b"\7" * 16, 2, 3, 1, True, 9, 2))
EXAMPLES: list[Message] = [
    Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.x", [LAYOUT.to_wire()], [[0, 4]], "/dev/shm/a.lock", 7, 99),
    Request(1, 3, 4, "fwd_bwd", {"handle": HANDLE, "defer_update": True}),
    Reply(4, True, {"upload_s": 0.25, "digest": b"\0\1", "none": None, "deep": [{"a": [-1]}]}, "", ""),
    TokenEvent(1, "fwd_bwd", "0.1@2:4", 0, 1, True, "", {"ready_ns": 12}),
    Attached(PROTOCOL_VERSION, "run", 1, "/shmstage.x", [LAYOUT.to_wire()], 0, "/dev/shm/a.lock", 7, 99),
    Published(1, HANDLE),
]
FRAMES = [encode(message) for message in EXAMPLES]
NOT_NUMBERS = ("digest", "is_final")
#: an empty list, one byte of a frame, takes 64 in memory
CAP_NBYTES = 2_000_000

keys = st.text(max_size=3) | st.integers(0, 3)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([number - 2**63 for number in NUMBERS] + NUMBERS)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


def check_frame(frame: bytes, cap_nbytes: int = CAP_NBYTES) -> None:
    outcome = survives(lambda: decode(frame), ProtocolError, cap_nbytes=cap_nbytes)
    if isinstance(outcome, ShmstageError):
        return
    # what is taken can be sent on, and arrives as the same: NaN is not equal to itself, its frame is
    assert encode(decode(encode(outcome))) == encode(outcome)


@fuzz
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    """S88, S91: nothing else comes out of a decoder."""
    check_frame(frame)


@fuzz
@given(st.sampled_from(FRAMES), st.integers(0, 1 << 32).map(Rng))
def test_a_damaged_frame_is_a_message_or_a_protocol_error(frame: bytes, rng: random.Random) -> None:
    check_frame(mutated(frame, rng))


@fuzz
@given(st.sampled_from(FRAMES), st.data())
def test_a_field_of_any_value_is_taken_or_refused(frame: bytes, data: st.DataObject) -> None:
    wire = msgpack.unpackb(frame)
    key = data.draw(st.sampled_from(sorted(wire)) | st.text(max_size=3))
    wire[key] = data.draw(plain)
    check_frame(msgpack.packb(wire))


@fuzz
@given(st.binary(min_size=1, max_size=9), st.integers(1, 3000), st.booleans(), st.booleans())
def test_a_frame_of_one_pattern_repeated_is_no_burden(pattern: bytes, times: int, inside: bool, ended: bool) -> None:
    """Deep nesting, lists that announce more than there is, a great many entries."""
    frame = pattern * times + (b"\xc0" * times if ended else b"")
    if inside:
        frame = FRAMES[1].replace(b"\xacdefer_update\xc3", b"\xa1x" + frame)
    check_frame(frame, 200 * max(len(frame), 20_000))


@pytest.mark.parametrize("levels", [1, 15, 16, 17, 300, 900, 990, 1020, 1023, 1024, 5000])
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1k"])
def test_nesting_of_any_depth_is_taken_or_refused(levels: int, level: bytes) -> None:
    """S88: beyond the limit the decoder, the checks or a reader would run out of stack."""
    frame = FRAMES[1].replace(b"\xacdefer_update\xc3", b"\xa1x" + level * levels + b"\xc0")
    outcome = survives(lambda: decode(frame), ProtocolError, cap_nbytes=CAP_NBYTES)
    assert isinstance(outcome, ProtocolError) == (levels > DEPTH_LIMIT - 1)


def full_frame(filler: bytes, announced: bool, nbytes: int) -> bytes:
    count = (nbytes - 200) // len(filler)
    body = (b"\xdd" + count.to_bytes(4, "big") if announced else b"") + filler * count
    return FRAMES[1].replace(b"\xacdefer_update\xc3", b"\xa1x" + body)


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\xa0", b"\x91", b"\x81\xa0", b"\xdd\x00\x01\xfe\x00"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_large_frame_takes_memory_in_proportion(filler: bytes, announced: bool) -> None:
    """S88: at most 200 bytes for a byte of frame, whatever lists and maps announce."""
    nbytes = 1 << 17
    frame = full_frame(filler, announced, nbytes)
    survives(lambda: decode(frame), ProtocolError, cap_nbytes=200 * nbytes)


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x81\xa0", b"\xc0"])
def test_the_largest_frame_is_decoded_or_refused_in_time(filler: bytes) -> None:
    frame = full_frame(filler, True, FRAME_LIMIT_NBYTES)
    survives(lambda: decode(frame), ProtocolError, cap_nbytes=0, traced=False)


@fuzz
@given(st.lists(plain, min_size=9, max_size=11) | plain, st.integers(0, 9))
def test_a_handle_of_any_values_is_taken_or_refused(value: Any, keep: int) -> None:
    """S75, S91: right in some places and wrong in others."""
    if isinstance(value, list) and len(value) == len(HANDLE):
        value = HANDLE[:keep] + value[keep : keep + 1] + HANDLE[keep + 1 :]
    outcome = survives(lambda: handle_from_wire(value), ProtocolError, cap_nbytes=CAP_NBYTES)
    if isinstance(outcome, Handle):
        assert handle_to_wire(outcome) == value
        numbers = [number for name, number in zip(Handle.__slots__, value, strict=True) if name not in NOT_NUMBERS]
        assert all(type(number) is int and 0 <= number < 1 << 64 for number in numbers)
        assert type(outcome.digest) is bytes and len(outcome.digest) == 16 and type(outcome.is_final) is bool
    assert "malformed" in for_the_record("x", {"handle": value}) or isinstance(outcome, Handle)


@fuzz
@given(plain | st.lists(plain, min_size=6, max_size=6), st.data())
def test_a_layout_of_any_values_is_taken_or_refused(value: Any, data: st.DataObject) -> None:
    """S75, S69: sizes that overflow, arrays without elements."""
    wire: Any = LAYOUT.to_wire()
    if isinstance(value, list) and len(value) == 6:
        wire[data.draw(st.integers(0, 1))] = value
    else:
        shape, nbytes = data.draw(st.lists(st.sampled_from(NUMBERS), max_size=5)), data.draw(st.sampled_from(NUMBERS))
        wire[0] = ["x", data.draw(st.sampled_from(["int8", "int32", "x"])), shape, 0, nbytes, False]

    def use() -> object:
        layout = Layout.from_wire(wire)
        assert Layout.from_wire(layout.to_wire()) == layout
        return layout.views(bytearray(8192), 0)

    survives(use, LayoutError, cap_nbytes=CAP_NBYTES)


@fuzz
@given(st.dictionaries(st.sampled_from(["handle", "step", "flag", "pairs", "x"]), plain, max_size=4))
def test_arguments_of_any_values_are_taken_or_refused(given_arguments: dict[str, Any]) -> None:
    def use() -> None:
        arguments = Arguments("fwd_bwd", given_arguments)
        arguments.handle()
        arguments.count("step")
        arguments.flag("flag")
        arguments.pairs("pairs")
        arguments.finish()

    survives(use, ProtocolError, cap_nbytes=CAP_NBYTES)
    for_the_record("fwd_bwd", given_arguments)

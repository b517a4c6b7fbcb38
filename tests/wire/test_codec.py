"""Frames: what goes in comes out, and a hostile frame is a ProtocolError and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import fields
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstage.errors import ProtocolError
from shmstage.memory.handle import Handle
from shmstage.wire.codec import FRAME_LIMIT_NBYTES, decode, encode
from shmstage.wire.handles import handle_from_wire, handle_to_wire
from shmstage.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detach,
    EndOfStream,
    EventAck,
    Hello,
    Message,
    Ping,
    Pong,
    Published,
    Reply,
    Request,
    TicketEvent,
    TokenEvent,
    Welcome,
)
from shmstage.wire.schema import DEPTH_LIMIT

U32, U64 = 2**32 - 1, 2**64 - 1
LARGEST = Handle(U32, U64, U32, b"\xff" * 16, U32, U64, U32, True, U64, U32)

EXAMPLES: list[Message] = [
    Hello(PROTOCOL_VERSION, "run", 1, "/shmstage.x", [["a", "int32", [2, 3]]], [[0, 4]], "/dev/shm/a.lock", 7, 99),
    Welcome(PROTOCOL_VERSION, 3, 8, 100, "/dev/shm/b.lock", {"platform": "cpu"}, 5),
    Request(1, 3, 4, "fwd_bwd", {"handle": handle_to_wire(LARGEST), "defer_update": True}),
    Reply(4, True, {"upload_s": 0.25, "payload_digest": b"\0\1", "none": None, "deep": [{"a": [-1]}]}, "", ""),
    TokenEvent(1, "fwd_bwd", "0.1@2:4", 0, 1, True, "", {"ready_ns": 12}),
    TicketEvent(2, 9, "metrics", 0, True, {"loss": float("inf")}, "", {"done_ns": 12}),
    EventAck(2, True),
    Ping(1),
    Pong(1, "fwd_bwd #4", 2),
    Attach(PROTOCOL_VERSION, "/dev/shm/c.lock", 9, 101),
    Attached(PROTOCOL_VERSION, "run", 1, "/shmstage.x", [], 0, "/dev/shm/a.lock", 7, 99),
    Published(1, handle_to_wire(LARGEST)),
    EndOfStream(1),
    Detach(0, 3),
]


def test_every_message_survives_the_journey() -> None:
    """S91"""
    assert {type(message) for message in EXAMPLES} == set(get_args(Message))
    for message in EXAMPLES:
        assert decode(encode(message)) == message


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[-1].consumer = 1  # type: ignore[misc,union-attr]


@pytest.mark.parametrize("command", ["fwd_bwd", "stage_fwd_bwd", "eval_step", "per_token_logps"])
def test_request_with_the_largest_handle_stays_under_300_bytes(command: str) -> None:
    arguments = {"handle": handle_to_wire(LARGEST), "defer_update": True, "role": "reference"}
    assert len(encode(Request(U64, U64, U64, command, arguments))) < 300


def test_request_size_does_not_depend_on_the_payload() -> None:
    small, large = (Handle(0, 2, 1, b"\1" * 16, rows, 1, 1, False, rows, 1) for rows in (1, 127))
    sizes = {len(encode(Request(1, 1, 1, "fwd_bwd", {"handle": handle_to_wire(h)}))) for h in (small, large)}
    assert len(sizes) == 1


def test_handle_survives_the_journey() -> None:
    assert handle_from_wire(handle_to_wire(LARGEST)) == LARGEST


@pytest.mark.parametrize(
    "change",
    [
        {"slot": -1},
        {"slot": 2**32},
        {"generation": 2**64},
        {"slot": True},
        {"digest": b"short"},
        {"digest": "0" * 16},
        {"is_final": 1},
        {"rows": 1.0},
        {"rows": np.int32(1)},
    ],
)
def test_handle_out_of_range_is_refused_at_both_ends(change: dict[str, Any]) -> None:
    """S75, S91"""
    values = {field.name: getattr(LARGEST, field.name) for field in fields(Handle)} | change
    with pytest.raises(ProtocolError, match=f"handle.{next(iter(change))}"):
        handle_to_wire(Handle(**values))
    with pytest.raises(ProtocolError, match=f"handle.{next(iter(change))}"):
        handle_from_wire([values[field.name] for field in fields(Handle)])


# --- what does not travel, does not travel in either direction ----------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.0),
        np.int32(1),
        np.zeros(2),
        (1, 2),
        {1: "a"},
        {b"k": 1},
        {("a",): 1},
        {1, 2},
        object(),
        2**64,
        -(2**63) - 1,
        1j,
        bytearray(b"a"),
        "\ud800",
    ],
)
def test_encoder_refuses_what_would_not_arrive_as_it_was(value: object) -> None:
    """S77, S90"""
    with pytest.raises(ProtocolError, match="Request"):
        encode(Request(1, 1, 1, "info", {"value": value}))


def test_refusal_names_the_place() -> None:
    with pytest.raises(ProtocolError, match=r"Reply.result.losses\[1\] is numpy.float64"):
        encode(Reply(1, True, {"losses": [1.0, np.float64(2.0)]}, "", ""))


def test_oversize_message_names_its_largest_field_and_the_limit() -> None:
    """S92"""
    with pytest.raises(ProtocolError, match=f"'arguments'; the frame limit is {FRAME_LIMIT_NBYTES}"):
        encode(Request(1, 1, 1, "save_checkpoint", {"state": b"x" * FRAME_LIMIT_NBYTES}))
    large = Request(1, 1, 1, "save_checkpoint", {"state": b"x" * 999})
    with pytest.raises(ProtocolError, match="'arguments'; the frame limit is 900"):
        encode(large, limit_nbytes=900)
    frame = encode(large, limit_nbytes=1200)
    with pytest.raises(ProtocolError, match="the limit is 900"):
        decode(frame, limit_nbytes=900)
    assert decode(frame, limit_nbytes=1200) == large


def test_oversize_frame_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S88"""
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ProtocolError, match="the limit is"):
        decode(b"\xc0" * (FRAME_LIMIT_NBYTES + 1))


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
def test_five_bytes_that_claim_gigabytes_are_refused(header: bytes) -> None:
    """S88: and a list of them is not made beforehand."""
    tracemalloc.start()
    try:
        for claim in (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\xff\xff\xff"):
            with pytest.raises(ProtocolError):
                decode(header + claim)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _raw(**changes: Any) -> bytes:
    wire = {"t": "Q", "e": 1, "n": 1, "q": 1, "c": "info", "a": {}} | changes
    return bytes(msgpack.packb(wire))


def test_raw_frame_of_these_tests_is_a_good_one() -> None:
    assert decode(_raw()) == Request(1, 1, 1, "info", {})


def _nested(depth: int, leaf: Any) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (_raw()[:-1], "not msgpack"),
        (_raw() + b"\0", "not msgpack"),
        (b"\x91" * 5000 + b"\0", "not msgpack"),
        (b"\x93\1\2\3", "holds a list"),
        (_raw(t="?"), "message kind '\\?'"),
        (_raw(t=1), "message kind 1"),
        (_raw(z=1), "unknown fields 'z'"),
        (msgpack.packb({"t": "Q", "e": 1}), "lacks 'incarnation'"),
        (_raw(e=-1), "Request.epoch"),
        (_raw(e=True), "Request.epoch"),
        (_raw(e=1.0), "Request.epoch"),
        (_raw(c=b"info"), "Request.command"),
        (_raw(a=[]), "Request.arguments"),
        (_raw(a={"x": _nested(DEPTH_LIMIT + 1, 0)}), "deeper than"),
        (_raw(a={1: 2}), "key 1; keys are str"),
        (_raw(a={"x": msgpack.ExtType(5, b"abc")}), "extension 5"),
        (_raw(a={"x": msgpack.Timestamp(1)}), "Timestamp"),
        (msgpack.packb({"t": "m"}), "message kind"),
        (b"\x82\xa1t\xa1P\xa1t\xa1P", "key 't' twice"),
        (b"\x83\xa1t\xa1P\xa1m\x01\xa1m\x02", "key 'm' twice"),
        (b"\x81\xa1t\xa1\xff", "not msgpack"),
    ],
)
def test_hostile_frame_is_refused_with_its_reason(frame: bytes, reason: str) -> None:
    """S90, S91"""
    with pytest.raises(ProtocolError, match=reason):
        decode(frame)


def test_nesting_up_to_the_limit_travels() -> None:
    message = Request(1, 1, 1, "info", {"x": _nested(DEPTH_LIMIT - 1, 0)})
    assert decode(encode(message)) == message


def test_another_version_is_refused_before_its_fields_are_read() -> None:
    frame = msgpack.packb({"t": "H", "v": PROTOCOL_VERSION + 1, "new": 1})
    with pytest.raises(ProtocolError, match=f"wire version {PROTOCOL_VERSION + 1}, this side {PROTOCOL_VERSION}"):
        decode(frame)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4),
    max_leaves=6,
)


def _decode_or_refuse(frame: bytes) -> None:
    try:
        decode(frame)
    except ProtocolError:
        pass


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    _decode_or_refuse(frame)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from("HWQRTKAPOabped"), st.dictionaries(st.sampled_from("acdeghijklmnqrsuvwxz"), _PLAIN, max_size=8))
def test_any_map_is_a_message_or_a_protocol_error(tag: str, wire: dict[str, Any]) -> None:
    try:
        frame = msgpack.packb({**wire, "t": tag})
    except (OverflowError, ValueError):
        return
    _decode_or_refuse(frame)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_any_damaged_message_is_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(frame))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=4), _PLAIN, max_size=4))
def test_what_the_encoder_takes_the_decoder_gives_back(arguments: dict[str, Any]) -> None:
    """S90"""
    message = Request(1, 1, 1, "info", arguments)
    try:
        frame = encode(message)
    except ProtocolError:
        return
    assert repr(decode(frame)) == repr(message)  # repr, because nan is not equal to itself


@pytest.mark.slow
def test_wire_imports_neither_jax_nor_zmq_nor_pydantic() -> None:
    code = "import sys, shmstage.wire.codec; print([m for m in ('jax', 'zmq', 'pydantic', 'rich') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"

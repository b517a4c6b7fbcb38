"""What fuzzing found in frames, texts of errors and shared memory, each once and by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from fuzzing import survives
from mutations import deep

from shmstage.errors import (
    InputError,
    LayoutError,
    PoolError,
    ProtocolError,
    named,
    shown,
)
from shmstage.memory.identity import PeerWatch, ProcessIdentity, _namespace_facts
from shmstage.memory.layout import MAX_NBYTES, Layout
from shmstage.memory.names import LOCK_SUFFIX, SHM_DIR, new_name
from shmstage.memory.pool import Pool
from shmstage.memory.reader import PoolReader
from shmstage.wire.codec import decode, encode
from shmstage.wire.messages import Request

CAP_NBYTES = 8_000_000
RUN = f"found-{os.getpid()}"
LAYOUT = Layout.of({"x": ("int8", (8,))})


# --- texts of errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [lambda: deep(100_000), lambda: [0] * 1_000_000, lambda: "x" * 1_000_000, lambda: 2**100_000,
     lambda: {"k" * 100_000: deep(2000)}, lambda: "\x1b[2J\n\ud800", lambda: np.zeros(100_000),
     lambda: [{"a": [1, (2, {"b": b"x" * 9999})]}], dict, lambda: None],
    ids=map(str, range(10)),
)  # fmt: skip
def test_any_value_is_shown_in_a_bounded_line(value: Callable[[], object]) -> None:
    made = value()
    text = survives(lambda: shown(made), cap_nbytes=1_000_000)
    assert isinstance(text, str) and 0 < len(text) <= 80 and text.isprintable()


def test_a_name_is_shown_as_it_is_unless_it_garbles_the_line() -> None:
    assert named("shard-1") == "shard-1"
    assert named("a\x1bb") == "'a\\x1bb'"
    assert len(named("x" * 1000)) == 80


# --- frames -------------------------------------------------------------------------------------------------


def request_with(arguments: dict[str, Any]) -> bytes:
    wire = msgpack.unpackb(encode(Request(1, 1, 1, "c", {})))
    packed: bytes = msgpack.packb(wire | {"a": arguments})
    return packed


@pytest.mark.slow
def test_a_long_key_over_many_values_is_decoded_at_once() -> None:
    """The place of each value was put into words, key and all: 250 GB of text for this frame."""
    frame = request_with({"k" * 520_000: [0] * 500_000})
    assert isinstance(survives(lambda: decode(frame), cap_nbytes=0, traced=False), Request)


def test_a_refusal_under_a_long_key_is_short() -> None:
    frame = request_with({"k\n" * 200_000: {"z": msgpack.Timestamp(1)}})
    assert isinstance(survives(lambda: decode(frame), ProtocolError, cap_nbytes=CAP_NBYTES), ProtocolError)


def test_a_frame_that_announces_more_than_it_holds_is_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """S88: some releases of msgpack make every announced list at its full length first."""
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("built"))
    frame = (b"\xdd" + (5000).to_bytes(4, "big")) * 1000
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode(frame)


def test_an_array_without_elements_may_not_be_larger_than_others() -> None:
    """S69, S75: numpy refused to make the view, with an error of its own."""
    with pytest.raises(LayoutError, match="the limit is"):
        Layout.of({"x": ("int8", (0, MAX_NBYTES, MAX_NBYTES))})
    assert Layout.of({"x": ("int8", (0, 1 << 20, 3))}).views(bytearray(4096), 0)["x"].shape == (0, 1 << 20, 3)


# --- shared memory ------------------------------------------------------------------------------------------


@pytest.fixture
def identity() -> Iterator[ProcessIdentity]:
    identity = ProcessIdentity.create(RUN, "found")
    yield identity
    identity.close()


@pytest.fixture
def pool(identity: ProcessIdentity) -> Iterator[Pool]:
    pool = Pool.create(RUN, epoch=1, layouts=[LAYOUT], slots=2, aux_slots=1, identity=identity)
    yield pool
    pool.close()


@pytest.fixture
def lock_path() -> Iterator[Path]:
    path = Path(SHM_DIR, new_name(RUN) + LOCK_SUFFIX)
    yield path
    path.unlink()


@pytest.mark.parametrize(
    "text", ["pid=²\nstart_ticks=1", "pid=12\nstart_ticks=x", "pid=99999999999999999\nstart_ticks=1\n{here}", "\xff=\0"]
)
def test_a_lifetime_lock_of_any_content_is_watched(lock_path: Path, text: str) -> None:
    """Anybody may write there; the lock decides."""
    here = "".join(f"{key}={value}\n" for key, value in _namespace_facts().items())
    lock_path.write_bytes(text.format(here=here).encode("latin-1" if "\xff" in text else "utf-8"))
    watch = PeerWatch(str(lock_path))
    assert watch.dead()
    watch.close()


def test_a_pipe_with_the_name_of_a_lifetime_lock_raises_nothing_foreign(lock_path: Path) -> None:
    """Another user may put one there."""
    os.mkfifo(lock_path)
    try:
        watch = PeerWatch(str(lock_path))
    except PoolError:
        return
    watch.dead()
    watch.close()


@pytest.mark.parametrize(
    ("offset", "value"), [(52, (3).to_bytes(4, "little")), (52, b"\xff" * 4), (24, (1 << 40).to_bytes(8, "little"))]
)
def test_more_aux_slots_than_slots_and_another_size_contradict_the_file(pool: Pool, offset: int, value: bytes) -> None:
    """S75: both were taken from the header unread."""
    with open(SHM_DIR + pool.name, "r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(PoolError, match="contradicts"):
        PoolReader.attach(pool.name, run_id=RUN, epoch=1)


def test_a_pool_that_was_never_reserved_is_not_mapped(pool: Pool) -> None:
    """Pre-faulting it would make a terabyte of pages out of a file of a few."""
    sound = Path(SHM_DIR + pool.name).read_bytes()
    nbytes = 1 << 40
    stride = (nbytes - (len(sound) - 3 * LAYOUT.nbytes)) // 3 // 4096 * 4096
    header = bytearray(sound[: len(sound) - 3 * LAYOUT.nbytes])
    size = len(header) + 3 * stride
    header[24:32], header[40:48] = size.to_bytes(8, "little"), stride.to_bytes(8, "little")
    path = Path(SHM_DIR, new_name(RUN))
    path.write_bytes(header)
    path.chmod(0o600)
    os.truncate(path, size)
    try:
        with pytest.raises(PoolError, match="was not reserved"):
            PoolReader.attach("/" + path.name, run_id=RUN, epoch=1)
    finally:
        path.unlink()


def test_a_newest_publication_in_no_slot_is_a_protocol_error(pool: Pool) -> None:
    """S75: the number comes out of memory that every reader can write."""
    reader = PoolReader.attach(pool.name, run_id=RUN, epoch=1)
    for slot in (3, 65534, -1, 1 << 40):
        with pytest.raises(ProtocolError, match="has no slot"):
            reader.published_in(slot)
    reader.close()


def test_a_run_id_that_is_no_text_is_bad_input() -> None:
    """It came out of a command line as bytes; no pool and no lock is left of it."""
    identity = ProcessIdentity.create("\udcff", "found")
    try:
        with pytest.raises(InputError, match="does not fit a pool header"):
            Pool.create("\udcff", epoch=1, layouts=[LAYOUT], slots=2, identity=identity)
    finally:
        identity.close()

"""How pieces cross Ray: parts in chunks, one object for an answer, and who is named when none comes."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shmstage.errors import PeerLostError, ProtocolError, WaitTimeoutError
from shmstage.launch.ray_stores import CHUNK_NBYTES, RayAnswers, RayStores, chunked, joined
from shmstage.packing.parts import Wanted

Bytes = npt.NDArray[np.uint8]
SIZES = [0, 1, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1, 3 * CHUNK_NBYTES, 5]


@pytest.fixture
def parts() -> list[Bytes]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, size, np.uint8) for size in SIZES]


def carried(chunks: list[Bytes], alignment: int) -> list[memoryview]:
    """The chunks in one piece of memory, each at a multiple of ``alignment``, as an object store lays them out."""
    starts, nbytes = [], 0
    for chunk in chunks:
        starts.append(nbytes)
        nbytes += -(-chunk.nbytes // alignment) * alignment
    memory = memoryview(bytearray(nbytes))
    for start, chunk in zip(starts, chunks, strict=True):
        memory[start : start + chunk.nbytes] = chunk.data
    return [memory[start : start + chunk.nbytes] for start, chunk in zip(starts, chunks, strict=True)]


@pytest.mark.parametrize("alignment", [64, CHUNK_NBYTES + 64])
def test_parts_come_as_they_were_wherever_their_chunks_lie(parts: list[Bytes], alignment: int) -> None:
    found = joined(carried(chunked(parts), alignment))
    assert [len(each) for each in found] == SIZES
    assert all((came == sent).all() for came, sent in zip(found, parts, strict=True))


def test_no_chunk_is_larger_than_what_is_copied_without_threads_and_none_is_a_copy(parts: list[Bytes]) -> None:
    chunks = chunked(parts)
    assert max(map(len, chunks)) == CHUNK_NBYTES
    assert all(any(np.shares_memory(chunk, part) for part in parts) for chunk in chunks if len(chunk))


def test_chunks_that_lie_in_a_row_are_joined_without_a_copy_and_held(parts: list[Bytes]) -> None:
    chunks = carried(chunked(parts), 64)
    memory = chunks[0].obj
    found = joined(chunks)
    assert all(np.shares_memory(each, np.frombuffer(memory, np.uint8)) for each in found if len(each))
    large = found[-2]
    del chunks, found
    assert (large == parts[-2]).all()
    with pytest.raises(BufferError, match="Existing exports"):
        memory.clear()
    del large
    memory.clear()  # nobody holds it any more


def test_chunks_that_lie_apart_are_copied(parts: list[Bytes]) -> None:
    chunks = carried(chunked(parts), CHUNK_NBYTES + 64)
    found = joined(chunks)
    assert not np.shares_memory(found[-2], np.frombuffer(chunks[0].obj, np.uint8))


def test_a_part_without_its_end_and_a_chunk_that_is_too_large_are_refused() -> None:
    whole = np.zeros(CHUNK_NBYTES, np.uint8)
    with pytest.raises(ProtocolError, match="part 1 came without its last chunk"):
        joined([whole[:5], whole])
    with pytest.raises(ProtocolError, match=f"a chunk of {CHUNK_NBYTES + 1} bytes; each has {CHUNK_NBYTES} at most"):
        joined([np.zeros(CHUNK_NBYTES + 1, np.uint8)])


@pytest.fixture
def ray_double(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of Ray as answers need: of two calls the first has come."""
    ray: Any = types.ModuleType("ray")
    ray.exceptions = types.ModuleType("ray.exceptions")
    for name in ("GetTimeoutError", "ObjectLostError", "RayActorError", "RayTaskError"):
        setattr(ray.exceptions, name, type(name, (Exception,), {}))
    ray.wait = lambda asked, num_returns, timeout: (asked[:1], asked[1:])
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    return ray


@pytest.mark.parametrize(
    ("failure", "kind", "says"),
    [
        ("GetTimeoutError", WaitTimeoutError, "no pieces within 1 s from the store of far"),
        ("ObjectLostError", PeerLostError, "no pieces come from the store of far: ObjectLostError"),
    ],
)
def test_what_does_not_come_is_late_or_lost_as_the_wait_for_all_ended(
    failure: str, kind: type[Exception], says: str, ray_double: Any
) -> None:
    def get(asked: Any, timeout: float) -> Any:
        if asked == "near's":
            return []
        raise getattr(ray_double.exceptions, failure)

    ray_double.get = get
    with pytest.raises(kind, match=says):
        RayAnswers(["near's", "far's"], ["near", "far"], 1.0).get()


def test_a_store_that_there_is_not_is_named() -> None:
    stores = RayStores(1.0)
    stores.know([], [])
    none: npt.NDArray[Any] = np.zeros(0, np.int64)
    with pytest.raises(PeerLostError, match="there is no store 2; there are 0"):
        stores.ask([Wanted(2, none, none, none, none, none, ())])

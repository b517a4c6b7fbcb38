from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from trainer.test_poison import LAYOUT, PoisonedLease, content, heavy

import shmstage
from shmstage.errors import LayoutError, PeerLostError, TrainerError, WaitTimeoutError
from shmstage.memory.aligned import aligned_buffer
from shmstage.memory.handle import Handle
from shmstage.memory.layout import Layout
from shmstage.trainer import aliasing
from shmstage.trainer.double_buffer import DoubleBuffer

pytestmark = pytest.mark.slow


class Published:
    """A consumer whose producer has published ``count`` micro-batches, overwritten as soon as they are released."""

    def __init__(self, count: int, offset: int = 0) -> None:
        self.left = deque(range(count))
        self.ended = False
        self._offset = offset

    def receive(self, timeout_s: float) -> Any:
        if self.left:
            return PoisonedLease(self.left.popleft(), aligned_buffer(LAYOUT.nbytes, 64, self._offset))
        if self.ended:
            return None
        raise WaitTimeoutError(f"nothing within {timeout_s}")


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return [float(heavy(np.float32(0), content(number))) for number in range(6)]


@pytest.mark.parametrize("offset", [0, 4])
def test_a_loop_computes_what_was_published(expected: list[float], offset: int) -> None:
    """S55"""
    source = Published(6, offset)
    source.ended = True
    losses = [heavy(np.float32(0), batch) for batch in DoubleBuffer(source)]
    assert [float(loss) for loss in losses] == expected


def test_the_next_microbatch_is_uploaded_while_this_one_is_used() -> None:
    source = Published(3)
    with DoubleBuffer(source) as batches:
        next(batches)
        assert list(source.left) == [2]


def test_a_microbatch_that_is_not_published_yet_is_not_waited_for() -> None:
    source = Published(1)
    with DoubleBuffer(source) as batches:
        assert set(next(batches)) == {"x", "bias"}
        with pytest.raises(WaitTimeoutError):
            next(batches)
        source.left.append(1)
        np.testing.assert_array_equal(next(batches)["bias"], content(1)["bias"])


def test_holding_on_to_every_batch_ends_at_a_deadline_with_the_remedy() -> None:
    source = Published(3)
    with DoubleBuffer(source, timeout_s=0.02) as batches:
        kept = [next(batches), next(batches)]
        with pytest.raises(WaitTimeoutError, match="drop references to their arrays or raise device_buffer_size"):
            next(batches)
        assert len(kept) == 2
        kept.clear()
        np.testing.assert_array_equal(next(batches)["bias"], content(2)["bias"])  # it was received and not lost


@pytest.mark.parametrize("published", [1, 2, 3])
def test_every_batch_uploaded_before_the_producer_died_is_given_out_first(published: int) -> None:
    class Dying(Published):
        def receive(self, timeout_s: float) -> Any:
            if not self.left:
                raise PeerLostError("producer 'p' died")
            return super().receive(timeout_s)

    with DoubleBuffer(Dying(published), timeout_s=1.0) as batches:
        for number in range(published):
            np.testing.assert_array_equal(next(batches)["bias"], content(number)["bias"])
        for _ in range(2):
            with pytest.raises(PeerLostError, match="producer 'p' died"):
                next(batches)


def test_an_error_of_the_batch_ahead_is_told_once_and_forgotten_when_closed() -> None:
    class Stumbling(Published):
        def receive(self, timeout_s: float) -> Any:
            if len(self.left) == 1:
                self.left.append(self.left.popleft() + 1)
                self.left.append(self.left[0])
                raise LayoutError("field 'x' is strange")
            return super().receive(timeout_s)

    with DoubleBuffer(Stumbling(2)) as batches:
        next(batches)
        with pytest.raises(LayoutError, match="strange"):
            next(batches)
        np.testing.assert_array_equal(next(batches)["bias"], content(2)["bias"])
        batches.close()
        with pytest.raises(StopIteration):
            next(batches)


def test_a_batch_is_given_out_only_when_its_slot_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: a program that has the batch donated would end what is waited for."""
    monkeypatch.setattr(aliasing, "aliases_host_memory", lambda shardings: False)
    source, watched = Published(2, offset=4), deque[Any]()
    with DoubleBuffer(source, timeout_s=0.02) as batches:
        batches._buffers._watch = lambda arrays, on_ready: watched.append((jax.block_until_ready(arrays), on_ready))
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match="the upload of micro-batch .* was not over within 0.02 s"):
                next(batches)
        ((_, on_ready),) = watched
        on_ready(0, "")
        np.testing.assert_array_equal(next(batches)["bias"], content(0)["bias"])
        _, (_, on_ready) = watched
        on_ready(0, "the slot moved on")
        with pytest.raises(TrainerError, match="was not uploaded: the slot moved on"):
            next(batches)
        assert len(batches._buffers.retired()) == 2


def test_a_loop_that_is_left_early_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    for _ in DoubleBuffer(Published(2)):
        break
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert set(threading.enumerate()) <= before


def lies_within(arrays: Iterable[jax.Array], start: int, nbytes: int) -> bool:
    """True if a shard of one of the arrays is memory of ``[start, start + nbytes)``: it was aliased, not copied."""
    pointers = (shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards)
    return any(start <= pointer < start + nbytes for pointer in pointers)


def test_arrays_are_the_private_buffers_themselves_not_copies_of_them() -> None:
    source = Published(1)
    with DoubleBuffer(source) as batches:
        batch = next(batches)
        memories = [batches._buffers.memory_of(number) for number in range(2)]
        assert any(lies_within(batch.values(), m.ctypes.data, m.nbytes) for m in memories if m.nbytes)


def test_a_field_that_jax_would_narrow_is_refused() -> None:
    """S73"""
    layout = Layout.of({"ids": ("int64", (4,))})

    class Lease:
        handle = Handle(0, 2, layout.layout_id)

        def __init__(self) -> None:
            self.late_views: dict[str, Any] = {}
            self.views = layout.views(aligned_buffer(layout.nbytes), 0)

        def check(self) -> None: ...
        def end(self) -> None: ...

    class Once:
        def receive(self, timeout_s: float) -> Any:
            return Lease()

    with DoubleBuffer(Once()) as batches, pytest.raises(LayoutError, match=r"'ids' is int64.*int32"):
        next(batches)


def test_it_is_public() -> None:
    assert shmstage.DoubleBuffer is DoubleBuffer


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "float16", "bfloat16", "float8_e4m3fn", "int4"])
def test_every_dtype_arrives_bit_for_bit(dtype: str) -> None:
    """S64, S69"""
    layout = Layout.of({"a": (dtype, (3, 5)), "empty": (dtype, (0, 4)), "scalar": (dtype, ())})
    memory = aligned_buffer(layout.nbytes)
    views = layout.views(memory, 0)
    for view in views.values():
        view[...] = np.ones(view.shape).astype(view.dtype)
    want = {name: np.array(view) for name, view in views.items()}

    def source() -> Iterator[Any]:
        lease = PoisonedLease.__new__(PoisonedLease)
        lease.handle, lease.views, lease.late_views, lease._memory = Handle(0, 2, 9), views, {}, memory
        yield lease
        yield None

    class Once:
        leases = source()

        def receive(self, timeout_s: float) -> Any:
            return next(self.leases)

    (batch,) = DoubleBuffer(Once())
    for name, value in want.items():
        assert batch[name].dtype == value.dtype
        assert np.asarray(batch[name]).tobytes() == value.tobytes()
    assert isinstance(batch["a"], jax.Array)

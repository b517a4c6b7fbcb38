"""The native copy and pre-fault."""

from __future__ import annotations

import errno
import mmap

import ml_dtypes
import numpy as np
import pytest

from shmstage import _native


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 100_003])
def test_a_copy_is_byte_for_byte(nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.zeros(nbytes + 2, np.uint8)
    _native.copy_into(target[1:-1], source)
    assert target[1:-1].tobytes() == source.tobytes()
    assert target[0] == target[-1] == 0


def test_arrays_without_a_buffer_format_are_copied_too() -> None:
    source = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16)
    target = np.zeros((3, 4), ml_dtypes.bfloat16)
    _native.copy_into(target, source)
    assert target.tobytes() == source.tobytes()


def test_sizes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes into 4"):
        _native.copy_into(bytearray(4), b"12345")


def test_read_only_and_non_contiguous_targets_are_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        _native.copy_into(b"1234", b"5678")
    with pytest.raises((ValueError, BufferError)):
        _native.copy_into(np.zeros(8, np.uint8)[::2], b"5678")


def test_a_mapping_is_populated_or_says_why_not() -> None:
    with mmap.mmap(-1, 8192) as memory:
        assert _native.populate(memory, True) in (0, errno.EINVAL)
        assert _native.populate(memory, False) in (0, errno.EINVAL)
        _native.advise_huge_pages(memory)

"""Private host buffers at a chosen alignment."""

from __future__ import annotations

from typing import Any

import numpy as np


def aligned_buffer(nbytes: int, alignment: int = 64, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8[nbytes] whose address is ``offset`` modulo ``alignment``, zeroed, its pages already touched.

    ``alignment`` is a power of two, ``0 <= offset < alignment``. Whether JAX aliases or copies such a buffer
    depends on the address alone.
    """
    assert alignment > 0 and alignment & (alignment - 1) == 0 and 0 <= offset < alignment
    room = np.empty(nbytes + 2 * alignment, np.uint8)
    room.fill(0)  # touches every page: the first upload is as fast as the others
    begin = (offset - room.ctypes.data) % alignment
    return room[begin : begin + nbytes]
